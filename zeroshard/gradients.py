"""Gradients of a unit: the buffers between autograd's gradients and what `p.grad` shows.

    local   whole gradients of this rank, not yet reduced         [numel]       only during a backward, or in no_sync
    grad    this rank's share of the reduced gradient             [held_numel]  master dtype; kept by the `p.grad`s alone

    arrive -> local;  reduce -> in flight, the Pending owns local;  finish_reduce -> grad
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from .comm import Pending, Topology
from .layout import FlatLayout

if TYPE_CHECKING:
    from .entry import Entry
    from .memory.ledger import Ledger


class Gradients:
    """The gradient side of a Unit, which gives the attributes declared here.

    filled: entries that have a gradient in local. arrived: those that got one in the running backward. expected: those whose
    arrival makes the unit complete. reduced: those in a round of the running backward. rounds: how many there were.
    """

    layout: FlatLayout
    topology: Topology
    ledger: Ledger
    entries: list[Entry]
    dtype: torch.dtype
    compute: torch.dtype
    reduce_dtype: torch.dtype
    held_numel: int
    mean: bool
    reduce_label: str

    def __init__(self, expected: set[int]):
        self.local: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.filled: set[int] = set()
        self.reduced: set[int] = set()
        self.arrived: set[int] = set()
        self.expected, self.rounds = expected, 0
        self.reducing: Pending | None = None

    @property
    def shard(self) -> torch.Tensor:
        raise NotImplementedError

    def grad_buffer(self, values: torch.Tensor | None = None) -> torch.Tensor:
        """unit.grad, made of `values` or of zeros if there is none. Held by the unit within a backward or a step only."""
        if values is not None or self.grad is None:
            values = torch.zeros_like(self.shard) if values is None else values
            values._zeroshard_unit = weakref.ref(self)  # type: ignore[attr-defined]
            self.ledger.hold("gradients", values)
            self.grad = values
        return self.grad

    def arrive(self, entry: Entry, grad: torch.Tensor, keep: bool) -> None:
        """Puts a gradient of this rank into local. `keep`: it will stay there beyond this backward."""
        local = self._open_local(self.dtype, "gradients") if keep else self._open_local(grad.dtype, "reducing")
        place = entry.view_of(local)
        if entry.index in self.filled:
            place.add_(grad)
        else:
            place.copy_(grad)
            self.filled.add(entry.index)

    def _open_local(self, dtype: torch.dtype, category: str) -> torch.Tensor:
        """The buffer that is there, or a new empty one."""
        if self.local is None:
            self.local, self.filled = torch.empty(self.layout.numel, dtype=dtype, device=self.shard.device), set()
            self.ledger.hold(category, self.local)
        return self.local

    def fold(self, entry: Entry) -> None:
        """The reduced gradient goes back among the local ones, weighted so that the next reduction gives it again."""
        place = entry.view_of(self._open_local(self.dtype, "gradients"))
        if entry.index not in self.filled:
            place.zero_()
            self.filled.add(entry.index)
        shards, replicas = self.topology.shard.size, self.topology.replicate.size
        weight = (shards * replicas if self.mean else 1) / replicas / (1 if self.held_numel < self.layout.numel else shards)
        if entry.numel:
            place.view(-1)[entry.start : entry.start + entry.numel].add_(entry.grad_piece(), alpha=weight)

    def reduce(self, wide: bool) -> None:
        """Starts to sum local over the ranks. The Pending owns local from here on. `wide`: it travels in the masters' dtype."""
        local, dtype = self.local, self.dtype if wide else self.compute
        if local is None:
            local = torch.zeros(self.layout.numel, dtype=dtype, device=self.shard.device)
        elif len(self.filled) < len(self.entries) or self._padded:
            end = 0
            for entry in self.entries:
                local[end : entry.slot.offset].zero_()
                end = entry.slot.offset + entry.slot.numel if entry.index in self.filled else entry.slot.offset
            local[end:].zero_()
        local = local.to(dtype)
        self.reduced |= self.filled
        self.local, self.filled = None, set()
        self.ledger.hold("reducing", local, beside=local.nbytes - local.nbytes // self.topology.shard.size)
        self.reducing = self.topology.shard.reduce_scatter(self.reduce_label, local, self.reduce_dtype)

    @property
    def _padded(self) -> bool:
        return sum(slot.numel for slot in self.layout.slots) < self.layout.numel

    def finish_reduce(self, alive: set[int], ranks: int) -> None:
        """Adds the sum to grad. `alive`: entries whose earlier gradient still counts. `ranks`: how many the mean is over."""
        assert self.reducing is not None
        pending, self.reducing = self.reducing, None
        part = self.topology.replicate.all_reduce(f"{self.reduce_label} over replicas", pending.wait())
        if self.mean:
            part.div_(ranks)
        part = part.to(self.dtype)
        if self.held_numel > part.numel():
            whole = torch.empty(self.layout.numel, dtype=self.dtype, device=part.device)
            whole.chunk(self.topology.shard.size)[self.topology.shard.rank].copy_(part)
            part = self.topology.shard.gather(f"{self.reduce_label} for all", whole).wait()
        if self.grad is None or not alive:
            self.grad_buffer(part)
            return
        for entry in self.entries:
            if entry.index not in alive:
                entry.piece_of(self.grad).zero_()
        self.grad += part
