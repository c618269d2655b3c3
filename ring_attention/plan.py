"""Plan: layout x mask x (rank, source) -> blocks. Pure, no communication, no floating point.

A *source* is the rank whose keys are looked at. What a rank's queries see of a source is cut into *blocks*: rectangles
of local query indices x local key indices, each with one diagonal *band*

    low <= m - n <= high          m, n counted from the rectangle's corner; None is no limit

Layouts keep positions ascending, so the keys that a query sees are one range of local indices, and its two ends move by
0 or by 1 from one query to the next: a rectangle is a longest stretch of queries over which that stays so. Where it
would take too many (strides that differ, ids that alternate) the block is *dense*: its mask comes from `Mask.allows`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ring_attention import layouts, masks
from ring_attention.layouts import Layout, Positions
from ring_attention.masks import Mask, RowRule


@dataclass(frozen=True)
class Block:
    """Batch rows `rows`, local queries q0:q1, the source's local keys k0:k1, and the band inside."""

    rows: slice
    q0: int
    q1: int
    k0: int
    k1: int
    low: int | None = None
    high: int | None = None
    dense: bool = False
    pairs: int = 0  # visible (query, key) pairs in a batch row; an upper bound where dense
    count: int = 1  # this many of them, each `stride` queries and keys after the one before: kernels make such blocks
    stride: int = 0

    @property
    def queries(self) -> int:
        return self.q1 - self.q0

    @property
    def keys(self) -> int:
        return self.k1 - self.k0


@dataclass(frozen=True)
class Step:
    """What one rank does in one step of the ring: whose keys arrive, what is computed, what of its own is sent."""

    distance: int
    source: int
    blocks: tuple[Block, ...]
    keys: tuple[int, int]  # the source's local keys that the blocks need
    target: int
    sent: tuple[int, int]  # this rank's local keys that the target needs

    @property
    def receives(self) -> bool:
        return self.keys[1] > self.keys[0]

    @property
    def sends(self) -> bool:
        return self.sent[1] > self.sent[0]


@dataclass(frozen=True)
class Plan:
    """All steps of one rank. In step t it reads the rank t places before it and is read by the rank t places after."""

    rank: int
    layout: Layout
    key_layout: Layout
    mask: Mask
    steps: tuple[Step, ...]


def make(layout: Layout, key_layout: Layout, mask: Mask, rank: int, *, dense: bool = False) -> Plan:
    """The plan of `rank`. `dense` makes every block dense, for masks that come as a table."""
    size = layout.world_size
    steps = []
    for distance in range(size):
        source, target = (rank - distance) % size, (rank + distance) % size
        mine = blocks(layout.held(rank), key_layout.held(source), mask, dense=dense)
        theirs = mine if distance == 0 else blocks(layout.held(target), key_layout.held(rank), mask, dense=dense)
        step = Step(distance, source, mine, _hull(mine), target, (0, 0) if distance == 0 else _hull(theirs))
        if step.receives or step.sends:
            steps.append(step)
    return Plan(rank, layout, key_layout, mask, tuple(steps))


class MaskTensors:
    """The tensors of a mask, compared by a checksum of their values (128 bits: equal checksums are equal values)."""

    def __init__(self, documents: Tensor | None, prefix: Tensor | None) -> None:
        self.documents, self.prefix = documents, prefix
        self.key = masks.digest(documents), masks.digest(prefix)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskTensors) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=128)
def cached(layout: str, key_layout: str, mask: str, tensors: MaskTensors, rank: int, dense: bool) -> Plan:
    """`make` from specs, kept: the layers of a model, forward and backward, share one plan."""
    rule = masks.parse(mask, tensors.documents, tensors.prefix)
    return make(layouts.parse(layout), layouts.parse(key_layout), rule, rank, dense=dense)


def blocks(i: Positions, j: Positions, mask: Mask, *, dense: bool = False) -> tuple[Block, ...]:
    """What queries at positions i see of keys at positions j (both ascending), as blocks that do not overlap."""
    if not len(i) or not len(j):
        return ()
    found: list[Block] = []
    for rule in mask.rows:
        rows = slice(rule.start, rule.stop)
        pieces = None if dense else _bands(i, j, mask, rule)
        found += [replace(block, rows=rows) for block in (_dense(i, j, mask, rule) if pieces is None else pieces)]
    return tuple(found)


_ALL_ROWS = slice(None)
CALL_PAIRS = 4096  # a kernel call costs about as much as this many (query, key) pairs
FEW_BLOCKS = 32  # never dense below this
DENSE_PAIRS = 1 << 20  # booleans in the mask of one dense block


def _bands(i: Positions, j: Positions, mask: Mask, rule: RowRule) -> list[Block] | None:
    """Blocks with a band for one row rule; None if they would be too many."""
    limit = max(FEW_BLOCKS, len(i) * len(j) // CALL_PAIRS)
    found: list[Block] = []
    for count, ((qa, qb), (ka, kb)) in enumerate(_same_document(i, j, rule)):
        border = ka + int(np.searchsorted(j[ka:kb], rule.prefix)) if rule.prefix else ka
        if border > ka:
            found.append(Block(_ALL_ROWS, qa, qb, ka, border, pairs=(qb - qa) * (border - ka)))
        for block in _stretches(*mask.limits(i[qa:qb], j[border:kb])):
            q0, q1, k0, k1 = block.q0 + qa, block.q1 + qa, block.k0 + border, block.k1 + border
            found.append(replace(block, q0=q0, q1=q1, k0=k0, k1=k1))
            if len(found) > limit:
                return None
        if max(len(found), count) > limit:
            return None
    return found


def _same_document(i: Positions, j: Positions, rule: RowRule) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Runs of queries and runs of keys of one document."""
    if rule.ids is None:
        yield (0, len(i)), (0, len(j))
        return
    keys: dict[int, list[tuple[int, int]]] = {}
    for document, run in _document_runs(rule.ids[j]):
        keys.setdefault(document, []).append(run)
    for document, queries in _document_runs(rule.ids[i]):
        for run in keys.get(document, ()):
            yield queries, run


def _document_runs(ids: Positions) -> Iterator[tuple[int, tuple[int, int]]]:
    """(id, (start, stop)) of each run of equal ids; padding left out."""
    breaks = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    for start, stop in itertools.pairwise(breaks):
        if ids[start] >= 0:
            yield int(ids[start]), (start, stop)


def _stretches(low: Positions, high: Positions) -> Iterator[Block]:
    """Longest stretches of queries whose key ranges [low, high) make one band: low flat, then rising by one; high
    rising by one, then flat."""
    seen = low < high
    steps = np.stack([np.diff(low), np.diff(high)])  # [2, L - 1], column m leads from query m to m + 1
    broken = ~(seen[:-1] & seen[1:]) | ((steps != 0) & (steps != 1)).any(0)
    groups = np.flatnonzero((np.diff(steps) != 0).any(0) | np.diff(broken)) + 1
    borders = [0, *groups.tolist(), len(broken)] if len(broken) else [0]
    start, low_rose, high_stopped = 0, False, False
    for first, after in itertools.pairwise(borders):
        low_rises, high_rises = (steps[:, first] != 0).tolist()
        cut = broken[first] or (low_rose and not low_rises) or (high_stopped and high_rises)
        ends = [first + 1]
        if not cut:
            low_rose, high_stopped = low_rises, not high_rises
            continue
        if broken[first]:
            ends, low_rose, high_stopped = list(range(first + 1, after + 1)), False, False
        elif after > first + 1:
            low_rose, high_stopped = low_rises, not high_rises
        else:
            low_rose, high_stopped = False, False
        for end in ends:
            if seen[start]:
                yield _stretch(low, high, start, end)
            start = end
    if seen[start]:
        yield _stretch(low, high, start, len(low))


def _stretch(low: Positions, high: Positions, start: int, stop: int) -> Block:
    """Queries start:stop as one block; an end of the key range that never moves is the rectangle's own edge."""
    k0, k1, last = int(low[start]), int(high[stop - 1]), stop - 1
    low_band = high_band = None
    if last > start and high[start + 1] > high[start]:
        low_band = 1 - int(high[start] - low[start])
    if last > start and low[last] > low[last - 1]:
        high_band = (last - int(low[last])) - start + k0
    pairs = int((high[start:stop] - low[start:stop]).sum())
    return Block(_ALL_ROWS, start, stop, k0, k1, low_band, high_band, pairs=pairs)


def _dense(i: Positions, j: Positions, mask: Mask, rule: RowRule) -> Iterator[Block]:
    """Dense blocks of a bounded number of pairs, over the keys inside the band or the prefix."""
    low, high = mask.limits(i, j)
    if rule.prefix:
        low, high = np.zeros_like(low), np.maximum(high, np.searchsorted(j, rule.prefix))
    rows = max(1, DENSE_PAIRS // max(1, len(j)))
    for start in range(0, len(i), rows):
        stop = min(start + rows, len(i))
        seen = low[start:stop] < high[start:stop]
        if seen.any():
            k0, k1 = int(low[start:stop][seen].min()), int(high[start:stop][seen].max())
            yield Block(_ALL_ROWS, start, stop, k0, k1, dense=True, pairs=(stop - start) * (k1 - k0))


def _hull(found: tuple[Block, ...]) -> tuple[int, int]:
    return (min(b.k0 for b in found), max(b.k1 for b in found)) if found else (0, 0)


def banded(block: Block) -> Tensor:
    """What a block's band means, as booleans [queries, keys]."""
    diagonal = torch.arange(block.queries)[:, None] - torch.arange(block.keys)[None, :]
    inside = torch.ones_like(diagonal, dtype=torch.bool)
    if block.low is not None:
        inside &= diagonal >= block.low
    if block.high is not None:
        inside &= diagonal <= block.high
    return inside


def part(block: Block, queries: tuple[int, int], keys: tuple[int, int]) -> Block:
    """Queries and keys of a block, counted from its corner, as a block; band ends that bind nobody are dropped."""
    (qa, qb), (ka, kb) = queries, keys
    low = None if block.low is None else block.low - qa + ka
    high = None if block.high is None else block.high - qa + ka
    if low is not None and low <= -(kb - ka - 1):
        low = None
    if high is not None and high >= qb - qa - 1:
        high = None
    return replace(block, q0=block.q0 + qa, q1=block.q0 + qb, k0=block.k0 + ka, k1=block.k0 + kb, low=low, high=high)


def trimmed(block: Block, queries: tuple[int, int], keys: tuple[int, int]) -> Block:
    """Like `part`, without the queries and keys at its edges that see nothing there; empty if none is left."""
    whole = part(block, queries, keys)
    L, K, low, high = whole.queries, whole.keys, whole.low, whole.high
    first, last = (0 if low is None else max(0, low)), (L if high is None else min(L, K + high))
    left, right = (0 if high is None else max(0, first - high)), (K if low is None else min(K, last - low))
    return part(whole, (first, max(first, last)), (left, max(left, right)))
