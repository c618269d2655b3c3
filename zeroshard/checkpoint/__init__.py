"""Checkpoints: saving, loading, export, and values for models built on the meta device."""

from .export import export
from .load import load
from .materialize import materialize
from .save import save

__all__ = ["export", "load", "materialize", "save"]
