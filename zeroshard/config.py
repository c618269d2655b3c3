"""What the user asked for: stage, precision, options, and the checks of them. Errors live here too."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class ShardError(RuntimeError):
    """Base of every error this package raises on purpose."""


class DivergenceError(ShardError):
    """The ranks asked for different things; the text names ranks and dotted names, the same on every rank."""


class StallError(ShardError):
    """A rank did not arrive within the group's timeout, or is gone; the text names it and what was waited for."""


class InputWarning(UserWarning):
    """A batch that would turn every rank's weights into NaN; `warnings.simplefilter("error", InputWarning)` stops there."""


class Stage(enum.IntEnum):
    """What is cut over the ranks. Three booleans follow from it; no other code compares stage numbers."""

    REPLICATE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3

    @property
    def shards(self) -> bool:
        """Optimizer state (and with it the master values) is cut."""
        return self >= Stage.OPTIMIZER

    @property
    def release_grads(self) -> bool:
        """Whole gradients do not outlive a unit's backward: they are reduced even inside `no_sync`."""
        return self >= Stage.GRADIENTS

    @property
    def release_params(self) -> bool:
        """Whole parameters do not outlive their use."""
        return self >= Stage.PARAMETERS


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of compute and communication. Masters are fp32.

    compute: dtype of gathered weights; floating inputs of the model's own call are cast to it. `None`: no change.
    reduce: dtype in which the ranks' gradients are summed.
    keep_fp32: patterns on dotted module names that compute in fp32 (inputs cast up, outputs back). BatchNorm always does.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("compute", "reduce"):
            value = getattr(self, name)
            if value is None and name == "compute":
                continue
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise ShardError(f"Precision({name}=...) takes a floating torch.dtype, got {value!r}")
        given: Any = self.keep_fp32
        patterns = (given,) if isinstance(given, str) else tuple(given)
        object.__setattr__(self, "keep_fp32", patterns)


Units = Sequence[Any] | None


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked arguments of `shard`."""

    stage: Stage
    units: Units
    precision: Precision | None
    reduce: str
    prefetch: int

    @staticmethod
    def check(stage: Any, units: Any, precision: Any, reduce: Any, prefetch: Any) -> Options:
        if isinstance(stage, bool) or stage not in tuple(Stage):
            raise ShardError(f"stage={stage!r}: expected one of 0, 1, 2, 3")
        if reduce not in ("mean", "sum"):
            raise ShardError(f"reduce={reduce!r}: expected 'mean' or 'sum'")
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ShardError(f"prefetch={prefetch!r}: expected a number of units, 0 or more")
        if precision is not None and not isinstance(precision, Precision):
            raise ShardError(f"precision={precision!r}: expected zeroshard.Precision(...) or None")
        if units is not None:
            units = list(units) if isinstance(units, (list, tuple, set)) else [units]
            for unit in units:
                is_class = isinstance(unit, type) and issubclass(unit, nn.Module)
                if not (is_class or isinstance(unit, (nn.Module, str))):
                    raise ShardError(f"units holds {unit!r}: expected module classes, modules, or patterns on dotted names")
        return Options(Stage(stage), units, precision, reduce, prefetch)

    @property
    def ignored(self) -> list[str]:
        """What does nothing beside the other settings, and why."""
        found = []
        if self.prefetch > 1 and not self.stage.release_params:
            found.append(f"prefetch={self.prefetch} is ignored: at stage {int(self.stage)} parameters stay whole between uses")
        if self.precision is not None and self.precision.keep_fp32 and self.precision.compute is None:
            found.append(f"Precision(keep_fp32={self.precision.keep_fp32}) is ignored without Precision(compute=...)")
        return found


COMMUNICATION = (
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def communication_settings() -> dict[str, str]:
    """What of the environment bears on how ranks find and talk to each other, where it is set."""
    return {name: value for name in COMMUNICATION if (value := os.environ.get(name)) is not None}


def launched_ranks() -> int:
    """How many ranks torchrun or accelerate has started, by the environment; 1 without them."""
    return int(communication_settings().get("WORLD_SIZE") or 1)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What all ranks must have alike to step alike: the plain values of every group."""
    kinds = (bool, int, float, str, tuple, type(None))
    return [
        {name: value for name, value in group.items() if isinstance(value, kinds)} for group in optimizer.param_groups
    ]
