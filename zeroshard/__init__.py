"""zeroshard: optimizer state, gradients and parameters partitioned over ranks, around any PyTorch loop."""

from .api import shard
from .config import DivergenceError, Precision, ShardError, StallError
from .memory import estimate
from .reading import full_gradients, full_state_dict, gathered
from .stats import stats

__all__ = [
    "DivergenceError",
    "Precision",
    "ShardError",
    "StallError",
    "estimate",
    "full_gradients",
    "full_state_dict",
    "gathered",
    "shard",
    "stats",
]
