"""zeroshard: optimizer state, gradients and parameters partitioned over ranks, around any PyTorch loop."""

import logging

from .api import shard
from .checkpoint import export, load, materialize, save
from .config import DivergenceError, InputWarning, Precision, ShardError, StallError
from .ema import EMA
from .join import join
from .memory import estimate
from .reading import full_gradients, full_state_dict, gathered
from .stats import stats
from .trace import trace

__all__ = [
    "EMA",
    "DivergenceError",
    "InputWarning",
    "Precision",
    "ShardError",
    "StallError",
    "estimate",
    "export",
    "full_gradients",
    "full_state_dict",
    "gathered",
    "join",
    "load",
    "materialize",
    "save",
    "shard",
    "stats",
    "trace",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
