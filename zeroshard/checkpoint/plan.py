"""Pieces and boxes: where a rank's flat pieces lie in logical tensors, and who writes what several ranks hold. Pure.

    piece   elements [start, start + numel) of a flattened tensor: what a shard holds of it
    box     offsets and sizes in the logical tensor: what checkpoint files are made of, readable by any tool

A piece is a few boxes: at most 2 * ndim - 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor whose elements are adjacent when it is flattened; the first one is at `start`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """Elements [start, start + numel) of a flattened tensor of `shape`, as boxes in ascending order.

    >>> [(box.offsets, box.sizes) for box in boxes((4, 3), 2, 8)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if not numel:
        return []
    if not shape:
        return [Box((), (), 0)]
    return list(_boxes(tuple(shape), start, start + numel, (), 0))


def _boxes(shape: tuple[int, ...], begin: int, end: int, outer: tuple[int, ...], base: int) -> Iterator[Box]:
    """Of the slice at indices `outer`, which starts at flat element `base`; [begin, end) counts from there."""
    level, rest = len(outer), shape[len(outer) + 1 :]
    row = math.prod(rest)
    if not rest:
        yield Box((*outer, begin), (1,) * level + (end - begin,), base + begin)
        return
    (first, head), (last, tail) = divmod(begin, row), divmod(end, row)
    if first == last:
        yield from _boxes(shape, head, tail, (*outer, first), base + first * row)
        return
    if head:
        yield from _boxes(shape, head, row, (*outer, first), base + first * row)
        first += 1
    if last > first:
        yield Box((*outer, first) + (0,) * len(rest), (1,) * level + (last - first, *rest), base + first * row)
    if tail:
        yield from _boxes(shape, 0, tail, (*outer, last), base + last * row)


class Turns:
    """Which of several ranks that hold the same values writes them: the one that has written least so far.

    Every rank that holds them makes the same calls in the same order, so all of them agree without a word.
    """

    def __init__(self, holders: int, own: int):
        self._written, self._own = [0] * holders, own

    def mine(self, nbytes: int) -> bool:
        turn = min(range(len(self._written)), key=self._written.__getitem__)
        self._written[turn] += nbytes
        return turn == self._own
