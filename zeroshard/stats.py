"""`stats`: what a sharded model has done since `shard`, and what it holds."""

from __future__ import annotations

import dataclasses

from torch import nn

from .memory.ledger import Bytes, storage_bytes
from .runtime import runtime_of


@dataclasses.dataclass(frozen=True)
class Stats:
    """Of this rank, since `shard`.

    gathers, reductions: units gathered from, and reduced over, other ranks. bytes_sent: to other ranks, everything included.
    prefetch_hits, prefetch_misses: uses of a unit that found it on its way, or had to wait for all of it.
    resident_bytes: bytes held now, by category (`parameters`, `buffers`, `gradients`, `optimizer`, `gathered`,
        `reducing`) and `.total`. Activations are not the engine's and not counted.
    peak_bytes: the most that was held at one time; `.total` is the peak of the sum.
    skipped_steps: steps that a `GradScaler` leaves out because it finds a gradient that is not finite on some rank. Seen where
        gradients are sharded; 0 at stage 0 and on one rank, where they are plain tensors that the scaler reads by itself.
    """

    gathers: int
    reductions: int
    bytes_sent: int
    prefetch_hits: int
    prefetch_misses: int
    resident_bytes: Bytes
    peak_bytes: Bytes
    skipped_steps: int


def stats(model: nn.Module) -> Stats:
    """Counts of this rank for a sharded model; local, no rank waits for another.

    Raises:
        ShardError: the model is not sharded.
    """
    runtime = runtime_of(model, "stats")
    counters, ledger, channels = runtime.counters, runtime.ledger, runtime.topology.channels
    ledger.set("buffers", storage_bytes(model.buffers()))
    ledger.count_optimizers(runtime.optimizers)
    return Stats(
        gathers=counters.gathers,
        reductions=counters.reductions,
        bytes_sent=sum(channel.bytes_sent for channel in channels),
        prefetch_hits=counters.prefetch_hits,
        prefetch_misses=counters.prefetch_misses,
        resident_bytes=ledger.resident(),
        peak_bytes=ledger.peaks(),
        skipped_steps=sum(int(channel.skipped_steps) for channel in channels),
    )
