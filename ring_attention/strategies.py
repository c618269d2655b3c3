"""Strategies: every one is a ring of some ranks over head exchanges of the others.

ring      all ranks in the ring, the next keys travel while the ones at hand are used
gather    the same ring with all transfers posted at once: one round of latency, all keys in memory
ulysses   all ranks exchange heads, a ring of one
hybrid    a 2-D mesh: the first axis is the ring, the ranks of the second exchange heads
auto      on a 1-D group the cheapest of the first three by the estimate below, on a 2-D mesh hybrid
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ring_attention.layouts import Layout
from ring_attention.masks import Mask
from ring_attention.ulysses import Split

STRATEGIES = ("ring", "gather", "ulysses", "hybrid", "auto")


@dataclass(frozen=True)
class Sizes:
    """The size of one attention call: batch, heads, head dims, bytes per element."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    item_bytes: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> Sizes:
        """Of tensors [B, H, S, D]; what a malformed one lacks counts as 0."""
        return cls(
            dim(query, 0), dim(query, 1), dim(key, 1), dim(query, 3), dim(value, 3), query.element_size()
        )


def dim(x: Tensor, at: int) -> int:
    """The size of a dim, 0 where there is none."""
    return x.shape[at] if at < x.dim() else 0


@dataclass(frozen=True)
class Rates:
    """Orders of magnitude of a device: floating-point operations and bytes per second, seconds per message."""

    flops: float
    bytes: float
    latency: float


CPU = Rates(1e11, 1e9, 2e-4)
GPU = Rates(3e14, 1e11, 3e-5)


def rates(device: torch.device) -> Rates:
    return CPU if device.type == "cpu" else GPU


@dataclass(frozen=True)
class Choice:
    strategy: str
    why: str


def check(strategy: str, num_axes: int) -> str | None:
    """What is wrong with a strategy for a handle of that many axes."""
    if strategy not in STRATEGIES:
        return f"unknown strategy {strategy!r}; there are {', '.join(STRATEGIES)}"
    if strategy == "hybrid" and num_axes != 2:
        return "strategy 'hybrid' needs a 2-D device mesh: its first axis is the ring, the second exchanges heads"
    if num_axes == 2 and strategy not in ("hybrid", "auto"):
        return f"strategy {strategy!r} needs a process group or a 1-D device mesh, got a 2-D mesh (for 'hybrid')"
    return None


def choose(sizes: Sizes, layout: Layout, mask: Mask, device: torch.device) -> Choice:
    """The cheapest strategy on a 1-D group, from the work of the busiest rank and the bytes it sends, forward."""
    size = layout.world_size
    if size == 1:
        return Choice("ring", "one rank: nothing travels")
    pace = rates(device)
    work = mask.row_work(layout.seq_len) * (sizes.batch / mask.batch)
    loads = [float(work[layout.held(rank)].sum()) for rank in range(size)]
    pair_flops = 2 * sizes.heads * (sizes.head_dim + sizes.value_dim)
    split = Split.of(sizes.heads, sizes.kv_heads, size)
    share = max(b - a for a, b in split.queries) / sizes.heads

    token_bytes = sizes.batch * (sizes.head_dim + sizes.value_dim) * sizes.item_bytes
    ring_bytes = token_bytes * sizes.kv_heads * layout.seq_len * (size - 1) / size
    sent_heads = sizes.heads + sum(b - a for a, b in split.keys)
    heads_bytes = token_bytes * sent_heads * layout.seq_len / size * (size - 1) / size

    compute = max(loads) * pair_flops / pace.flops
    even = float(np.sum(work)) * share * pair_flops / pace.flops
    seconds = {
        "ring": max(compute, ring_bytes / pace.bytes) + (size - 1) * pace.latency,
        "gather": compute + ring_bytes / pace.bytes + pace.latency,
        "ulysses": even + heads_bytes / pace.bytes + 2 * pace.latency,
    }
    best = min(seconds, key=lambda name: seconds[name])
    costs = ", ".join(f"{name} {cost * 1e3:.2f} ms" for name, cost in seconds.items())
    return Choice(
        best,
        f"estimated forward time {costs}; keys and values sent per rank {ring_bytes / 2**20:.2f} MiB, exchanging heads "
        f"{heads_bytes / 2**20:.2f} MiB; busiest rank over mean {max(loads) * size / max(sum(loads), 1.0):.2f}, "
        f"by heads {share * size:.2f}",
    )


MOST_PORTIONS = 8  # more would save little memory and make kernel calls small
LATENCIES = 2  # a message takes this many times as long as an empty one: shorter ones would be mostly waiting


def portion(sizes: Sizes, layout: Layout, mask: Mask, device: torch.device, together: int) -> int:
    """How many key/value heads go round the ring at a time: few, because the blocks in use and on their way are of that
    size, but enough to be worth a message, and at least the `together` query heads that the kernel has threads for."""
    pace, heads = rates(device), max(sizes.kv_heads, 1)
    share = max(1, layout.seq_len // layout.world_size)
    tokens = max(1, min(share, mask.extent(layout.seq_len)))  # of another rank that are needed at a time
    head_bytes = max(1, sizes.batch * (sizes.head_dim + sizes.value_dim) * sizes.item_bytes * tokens)
    queries = sizes.batch * max(1, sizes.heads // heads)  # that read one key/value head
    least = max(math.ceil(LATENCIES * pace.latency * pace.bytes / head_bytes), -(-together // max(1, queries)))
    num_portions = max(1, min(heads // least, MOST_PORTIONS * tokens // share))
    return -(-heads // num_portions)
