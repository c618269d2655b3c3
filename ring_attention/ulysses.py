"""Heads for sequence (DeepSpeed-Ulysses, arXiv 2309.14509): before attention each rank trades its part of the sequence
in all heads for the whole sequence in its part of the heads; afterwards back.

Any number of heads goes: query heads are dealt out as evenly as they can be, and key/value heads that several ranks
need are sent to each of them. Their gradients are added up where they come from.

U ranks of the team, B batch, H heads, S the rank's own tokens, T the tokens of the whole team, D head dim.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ring_attention.comm import Team, all_to_all
from ring_attention.layouts import Positions

Range = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """Which heads each rank of the team computes: ranges of query heads, and the key/value heads these need."""

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    groups: int  # query heads per key/value head

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, size: int) -> Split:
        groups = num_heads // num_kv_heads
        # whole groups where they deal out evenly, so that no key/value head is needed twice
        unit = groups if num_kv_heads % size == 0 else 1
        border = [unit * (rank * (num_heads // unit) // size) for rank in range(size + 1)]
        queries = tuple(itertools.pairwise(border))
        keys = tuple((a // groups, -(-b // groups) if b > a else a // groups) for a, b in queries)
        return cls(queries, keys, groups)

    def key_index(self, rank: int) -> Tensor | None:
        """Which of the rank's key/value heads each of its query heads reads; None where grouping says it already."""
        (a, b), (first, last) = self.queries[rank], self.keys[rank]
        if last - first <= 1 or (a % self.groups == 0 and b % self.groups == 0):
            return None
        return torch.arange(a, b) // self.groups - first


class HeadExchange:
    """Trades sequence for heads and back, within one team. `held[p]` are the positions of the team's rank p."""

    def __init__(self, team: Team, held: list[Positions]) -> None:
        self.team = team
        self._lengths = [len(mine) for mine in held]
        joined = np.concatenate(held)
        order = np.argsort(joined, kind="stable")
        self._sorted = bool((order == np.arange(len(order))).all())
        self._order, self._back = torch.from_numpy(order), torch.from_numpy(np.argsort(order))

    def to_heads(self, x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
        """[B, H, S, ...] -> [B, heads of this rank, T, ...], tokens in ascending order of position."""
        a, b = ranges[self.team.rank]
        shapes = [(x.shape[0], b - a, length, *x.shape[3:]) for length in self._lengths]
        parts = all_to_all(self.team, [x[:, first:last] for first, last in ranges], shapes)
        whole = torch.cat(parts, 2)
        return whole if self._sorted else whole.index_select(2, self._order.to(x.device))

    def to_sequence(self, x: Tensor, ranges: tuple[Range, ...], num_heads: int) -> Tensor:
        """[B, heads of this rank, T, ...] -> [B, H, S, ...]; heads that several ranks had are added up."""
        whole = x if self._sorted else x.index_select(2, self._back.to(x.device))
        length = self._lengths[self.team.rank]
        shapes = [(x.shape[0], last - first, length, *x.shape[3:]) for first, last in ranges]
        parts = all_to_all(self.team, list(whole.split(self._lengths, 2)), shapes)
        if sum(last - first for first, last in ranges) == num_heads:
            return torch.cat(parts, 1)
        total = x.new_zeros((x.shape[0], num_heads, length, *x.shape[3:]))
        for part, (first, last) in zip(parts, ranges, strict=True):
            total[:, first:last] += part
        return total
