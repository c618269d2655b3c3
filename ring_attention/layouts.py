"""Layouts: which positions of the whole sequence a rank holds. Pure integers, no communication.

A layout is a list of *spans* per rank: `(start, stop, step)`, read like a Python range. Positions are ascending on
every rank, so that a causal mask over a rank's own tokens is causal over their local order too.

`spec` is the layout as text. A text is what a custom op can carry, what ranks compare and what caches are keyed on;
`parse` gives the layout back. A `seq_len` of `?` is filled in once the ranks have told each other their local lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ring_attention.errors import UsageError

Span = tuple[int, int, int]
Positions = npt.NDArray[np.int64]


class Work(Protocol):
    """What a layout may want to know of a mask."""

    def row_work(self, seq_len: int) -> Positions:
        """Number of keys that each query position sees. int64 `[seq_len]`"""


class Layout:
    """Which global positions each of `world_size` ranks holds; every position is held by exactly one rank.

    Args:
        seq_len: length of the whole sequence, 0 or more; it need not divide by anything.
        world_size: number of ranks. Shares may be uneven or empty.

    Raises:
        UsageError: a negative `seq_len` or a `world_size` below 1.
    """

    needs_mask = False

    def __init__(self, seq_len: int, world_size: int) -> None:
        if seq_len < 0 or world_size < 1:
            raise UsageError(f"{type(self).__name__} needs seq_len >= 0 and world_size >= 1, got {seq_len} and {world_size}")
        self.seq_len = seq_len
        self.world_size = world_size
        self.spec = f"{type(self).__name__}:{seq_len}:{world_size}"

    @classmethod
    def build(cls, mask: Work, seq_len: int, world_size: int) -> Layout:
        """The layout for a mask; most layouts are the same for every mask."""
        return cls(seq_len, world_size)

    @classmethod
    def pending(cls, world_size: int) -> str:
        """The spec of a layout whose `seq_len` is known only when all ranks have told their share."""
        return f"{cls.__name__}:?:{world_size}"

    def spans(self, rank: int) -> list[Span]:
        raise NotImplementedError

    @cached_property
    def _held(self) -> list[Positions]:
        empty = np.empty(0, np.int64)
        return [
            np.concatenate([empty, *(np.arange(*span, dtype=np.int64) for span in self.spans(rank))])
            for rank in range(self.world_size)
        ]

    def held(self, rank: int) -> Positions:
        """The positions of a rank as a numpy array, ascending."""
        return self._held[rank]

    def size(self, rank: int) -> int:
        return len(self._held[rank])

    def positions(self, rank: int) -> Tensor:
        """Global positions held by `rank`, ascending. int64 `[S_local]`, on the CPU."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} is not one of the layout's {self.world_size} ranks")
        return torch.from_numpy(self._held[rank].copy())

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """The part of `x` that `rank` holds along `dim`, whose length is `seq_len`."""
        if x.shape[dim] != self.seq_len:
            raise UsageError(f"dim {dim} has length {x.shape[dim]}, the layout has seq_len {self.seq_len}")
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor from the parts of all ranks, in rank order."""
        got, want = [part.shape[dim] for part in parts], [self.size(rank) for rank in range(self.world_size)]
        if got != want:
            raise UsageError(f"parts have lengths {got} along dim {dim}, the layout gives {want}")
        return torch.cat(list(parts), dim).index_select(dim, self.inverse().to(parts[0].device))

    def inverse(self) -> Tensor:
        """Index that brings the parts of all ranks, joined in rank order, into sequence order. int64 `[seq_len]`"""
        return torch.from_numpy(np.argsort(np.concatenate(self._held), kind="stable"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seq_len={self.seq_len}, world_size={self.world_size})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)


def _cut(seq_len: int, pieces: int) -> list[int]:
    """Borders of `pieces` nearly equal pieces; the first ones are one longer."""
    short, extra = divmod(seq_len, pieces)
    return [piece * short + min(piece, extra) for piece in range(pieces + 1)]


class Contiguous(Layout):
    """Rank r holds the r-th run of consecutive positions. Right for windows and for full attention."""

    def spans(self, rank: int) -> list[Span]:
        border = _cut(self.seq_len, self.world_size)
        return [(border[rank], border[rank + 1], 1)]


class ZigZag(Layout):
    """Rank r holds the chunks r and 2W-1-r of 2W: an early and a late one, so that causal work is even."""

    def spans(self, rank: int) -> list[Span]:
        border = _cut(self.seq_len, 2 * self.world_size)
        late = 2 * self.world_size - 1 - rank
        return [(border[rank], border[rank + 1], 1), (border[late], border[late + 1], 1)]


class Striped(Layout):
    """Rank r holds the positions r, r+W, r+2W, ... (Striped Attention, arXiv 2311.09431)."""

    def spans(self, rank: int) -> list[Span]:
        return [(rank, self.seq_len, self.world_size)]


class Explicit(Layout):
    """A layout given by its spans."""

    def __init__(self, seq_len: int, world_size: int, spans: Sequence[Sequence[Span]]) -> None:
        super().__init__(seq_len, world_size)
        self._spans = [list(mine) for mine in spans]
        coded = "/".join(",".join("-".join(map(str, span)) for span in mine) for mine in self._spans)
        self.spec = f"Explicit:{seq_len}:{world_size}:{coded}"

    def spans(self, rank: int) -> list[Span]:
        return self._spans[rank]


class Balanced(Explicit):
    """Chunks dealt out so that every rank has the same work under `mask`, and the same number of tokens if that can be.

    The sequence is cut into equal chunks, the heaviest is given to the rank with the least work so far (longest
    processing time first). Chunks start coarse, since few long spans make few large kernel calls, and are halved until
    the busiest rank is within 2 % of the mean. Only where equal numbers of tokens leave it above 5 % may they differ.
    """

    needs_mask = True
    TARGET, LIMIT = 1.02, 1.05
    MOST_CHUNKS = 128  # per rank

    def __init__(self, mask: Work, seq_len: int, world_size: int) -> None:
        work = mask.row_work(seq_len) if world_size > 1 else np.zeros(seq_len, np.int64)
        balance, spans = self._deal(work, world_size, equal_share=True)
        if balance > self.LIMIT:
            unequal, others = self._deal(work, world_size, equal_share=False)
            spans = others if unequal < balance else spans
        super().__init__(seq_len, world_size, spans)

    def _deal(self, work: Positions, world_size: int, equal_share: bool) -> tuple[float, list[list[Span]]]:
        """The coarsest deal that is even enough, or else the most even one, with its busiest rank over the mean."""
        best: tuple[float, list[list[Span]]] | None = None
        num_chunks = 2 * world_size
        while best is None or (best[0] > self.TARGET and num_chunks < 2 * len(work)):
            spans, loads = _deal(work, _cut(len(work), max(1, min(num_chunks, len(work)))), world_size, equal_share)
            balance = max(loads) * world_size / max(sum(loads), 1)
            if best is None or balance < best[0] - 1e-3:
                best = balance, spans
            num_chunks *= 2
            if num_chunks > self.MOST_CHUNKS * world_size:
                break
        return best

    @classmethod
    def build(cls, mask: Work, seq_len: int, world_size: int) -> Layout:
        return cls(mask, seq_len, world_size)


def _deal(work: Positions, border: list[int], world_size: int, equal_share: bool) -> tuple[list[list[Span]], list[int]]:
    """Chunks -> ranks, heaviest first to the least loaded; `equal_share` lets no rank take more chunks than another."""
    sums = np.concatenate([[0], np.cumsum(work)])
    chunks = [(int(sums[b] - sums[a]), a, b) for a, b in itertools.pairwise(border)]
    most = -(-len(chunks) // world_size) if equal_share else len(chunks)
    held: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for weight, a, b in sorted(chunks, key=lambda chunk: (-chunk[0], chunk[1])):
        rank = min((r for r in range(world_size) if len(held[r]) < most), key=lambda r: (loads[r], len(held[r]), r))
        held[rank].append((a, b))
        loads[rank] += weight
    return [_joined(sorted(mine)) for mine in held], loads


def _joined(pieces: list[tuple[int, int]]) -> list[Span]:
    """Ascending pieces with neighbours joined into one span."""
    spans: list[Span] = []
    for a, b in pieces:
        if spans and spans[-1][1] == a:
            spans[-1] = (spans[-1][0], b, 1)
        elif b > a:
            spans.append((a, b, 1))
    return spans


def _runs(held: Positions) -> list[Span]:
    """Ascending positions as spans of step 1."""
    if not len(held):
        return []
    breaks = np.flatnonzero(np.diff(held) != 1) + 1
    starts, stops = held[np.concatenate([[0], breaks])], held[np.concatenate([breaks - 1, [len(held) - 1]])] + 1
    return [(int(a), int(b), 1) for a, b in zip(starts, stops, strict=True)]


def merged(layout: Layout, neighbours: int) -> Layout:
    """The layout of `world_size / neighbours` ranks, each holding what `neighbours` consecutive ranks hold together."""
    if neighbours == 1:
        return layout
    groups = [range(start, start + neighbours) for start in range(0, layout.world_size, neighbours)]
    spans = [_runs(np.sort(np.concatenate([layout.held(rank) for rank in group]))) for group in groups]
    return Explicit(layout.seq_len, len(groups), spans)


def named(name: str, mask: Work, seq_len: int, world_size: int) -> Layout:
    """A layout by its name in any case, for command lines."""
    classes = {c.__name__.lower(): c for c in (Contiguous, ZigZag, Striped, Balanced)}
    if name.lower() not in classes:
        raise UsageError(f"unknown layout {name!r}; there are {', '.join(classes)}")
    return classes[name.lower()].build(mask, seq_len, world_size)


@lru_cache(maxsize=256)
def parse(spec: str, seq_len: int | None = None) -> Layout:
    """The layout of a `spec`; `seq_len` stands in for a `?`."""
    name, told, world_size, *rest = spec.split(":")
    length = int(told) if told != "?" else seq_len
    if length is None:
        raise AssertionError(f"the length of {spec} is not known yet")
    plain: dict[str, Callable[[int, int], Layout]] = {c.__name__: c for c in (Contiguous, ZigZag, Striped)}
    if name in plain:
        return plain[name](length, int(world_size))
    spans = [[_span(s) for s in mine.split(",") if s] for mine in rest[0].split("/")]
    return Explicit(length, int(world_size), spans)


def _span(text: str) -> Span:
    start, stop, step = map(int, text.split("-"))
    return start, stop, step


def is_pending(spec: str) -> bool:
    return spec.split(":", 2)[1] == "?"
