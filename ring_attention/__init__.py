"""Exact attention over sequences that are split over ranks."""

import logging

from ring_attention.attention import ring_attention
from ring_attention.context import ContextParallel
from ring_attention.errors import DivergenceError, PeerError, RingError, UsageError
from ring_attention.layouts import Balanced, Contiguous, Striped, ZigZag
from ring_attention.masks import Mask

__all__ = [
    "Balanced",
    "ContextParallel",
    "Contiguous",
    "DivergenceError",
    "Mask",
    "PeerError",
    "RingError",
    "Striped",
    "UsageError",
    "ZigZag",
    "ring_attention",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
