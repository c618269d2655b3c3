"""Checkpoints: saving, loading, export, and values for models built on the meta device."""

from .load import load
from .save import save

__all__ = ["load", "save"]
