"""Live bytes of the engine's own buffers, by category, and their peaks.

    parameters   values that stay: shards, and whole values where they are kept between uses
    buffers      the model's own buffers
    gradients    what `p.grad` keeps: this rank's reduced gradients, and the whole ones that no_sync accumulates
    optimizer    the optimizers' state
    gathered     whole values that come and go
    reducing     whole gradients on their way into the reduced ones, and what arrives from other ranks for them

A buffer counts for as long as its storage lives, whoever keeps it: the ledger knows storages weakly, so nobody has to
report a release. Bytes can only peak when something is added, and dead entries are swept only when a sum would otherwise
exceed its peak, so a step in the steady state costs a dictionary write per buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "gathered", "reducing")


class Bytes(Mapping[str, int]):
    """Bytes by category; `total` is their sum, or of peaks the peak of the sum, which need not be reached at one time."""

    def __init__(self, by_category: Mapping[str, int], total: int | None = None):
        self._by_category = dict(by_category)
        self.total = sum(self._by_category.values()) if total is None else total

    def __getitem__(self, category: str) -> int:
        return self._by_category[category]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_category)

    def __len__(self) -> int:
        return len(self._by_category)

    def __repr__(self) -> str:
        rows = [*self._by_category.items(), ("total", self.total)]
        return "\n".join(f"{name:<12}{nbytes / 2**20:>12,.2f} MiB" for name, nbytes in rows)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    return sum({s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in an optimizer's state."""
    return storage_bytes(x for x in tree_leaves(dict(optimizer.state)) if isinstance(x, torch.Tensor))


class Ledger:
    """The books of one runtime."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self._sums = dict.fromkeys(CATEGORIES, 0)
        self._peaks = dict.fromkeys(CATEGORIES, 0)
        self._peak_total = 0

    def hold(self, category: str, tensor: torch.Tensor, beside: int = 0) -> None:
        """`tensor`'s storage counts under `category` from now on. `beside`: bytes that live and die with it."""
        storage = tensor.untyped_storage()
        before = self._held.pop(storage._cdata, None)
        if before is not None:
            self._sums[before[1]] -= before[2]
        nbytes = storage.nbytes() + beside
        self._held[storage._cdata] = (StorageWeakRef(storage), category, nbytes)
        self._sums[category] += nbytes
        self._note(category)

    def set(self, category: str, nbytes: int) -> None:
        """Bytes that are counted as a whole now and then."""
        self._sums[category] = nbytes
        self._note(category)

    def count_optimizers(self, optimizers: Iterable[weakref.ref[torch.optim.Optimizer]]) -> None:
        alive = [optimizer for reference in optimizers if (optimizer := reference()) is not None]
        self.set("optimizer", sum(state_bytes(optimizer) for optimizer in alive))

    def resident(self) -> Bytes:
        self._sweep()
        return Bytes(self._sums)

    def peaks(self) -> Bytes:
        return Bytes(self._peaks, self._peak_total)

    def _note(self, category: str) -> None:
        if self._sums[category] <= self._peaks[category] and sum(self._sums.values()) <= self._peak_total:
            return
        self._sweep()
        self._peaks[category] = max(self._peaks[category], self._sums[category])
        self._peak_total = max(self._peak_total, sum(self._sums.values()))

    def _sweep(self) -> None:
        for key in [key for key, (storage, _, _) in self._held.items() if storage.expired()]:
            _, category, nbytes = self._held.pop(key)
            self._sums[category] -= nbytes
