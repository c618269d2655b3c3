"""EMA: an exponential moving average of the weights, kept as each rank's share of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from .config import ShardError
from .optimizer import publish
from .runtime import Runtime, runtime_of


class EMA:
    """average = decay * average + (1 - decay) * weights, starting from the weights at construction.

    averages: this rank's share of the average of each unit, by `unit.index`; [held_numel] in the master dtype, fp32 where
    that is a lower one. Integer parameters are not averaged: they are what they were last. Buffers are left alone.

        ema = EMA(model, 0.999)
        ...; optimizer.step(); ema.update()
        with ema.applied():
            evaluate(model)

    Save and load it with `save(..., ema=ema)` and `load(..., ema=ema)`.
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay <= 1:
            raise ShardError(f"EMA(decay={decay!r}): expected a number from 0 to 1")
        self.decay, self._runtime, self._applied = decay, runtime_of(model, "EMA"), False
        self.averages: dict[int, torch.Tensor] = {}
        for unit in self._runtime.units:
            low = unit.dtype.is_floating_point and unit.dtype.itemsize < 4
            self.averages[unit.index] = unit.shard.detach().to(torch.float32 if low else unit.dtype, copy=True)

    def belongs_to(self, runtime: Runtime) -> None:
        """Raises ShardError unless this is an average of that runtime's model."""
        if self._runtime is not runtime:
            raise ShardError("ema is the average of another model; pass the EMA that was made of this one")

    @torch.no_grad()
    def update(self) -> None:
        """Takes the weights as they are now into the average. Communicates nothing."""
        if self._applied:
            raise ShardError("EMA.update() inside applied(): the model holds the average itself; leave the context first")
        for unit in self._runtime.units:
            average = self.averages[unit.index]
            if average.is_floating_point() or average.is_complex():
                average.mul_(self.decay).add_(unit.shard.to(average.dtype), alpha=1 - self.decay)
            else:
                average.copy_(unit.shard)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model's weights are the average inside, and bit for bit what they were after. Collective."""
        if self._applied:
            raise ShardError("EMA.applied() inside applied(): the average is in place already")
        before = {unit.index: unit.shard.clone() for unit in self._runtime.units}
        self._applied = True
        self._show(self.averages)
        try:
            yield
        finally:
            self._show(before)
            self._applied = False

    @torch.no_grad()
    def _show(self, values: dict[int, torch.Tensor]) -> None:
        for unit in self._runtime.units:
            unit.shard.copy_(values[unit.index])
        publish(self._runtime.units, self._runtime)
