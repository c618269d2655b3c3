"""Heads for sequence: every head is computed once, and the trade is undone exactly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import ring_attention as ra
from ring_attention import comm
from ring_attention.comm import Team
from ring_attention.ulysses import HeadExchange, Split
from tests.harness import RankPools


@given(kv=st.integers(1, 9), groups=st.integers(1, 5), size=st.integers(1, 8))
def test_heads_are_dealt_evenly_and_with_the_keys_they_read(kv: int, groups: int, size: int) -> None:
    split = Split.of(kv * groups, kv, size)
    heads = [h for a, b in split.queries for h in range(a, b)]
    assert heads == list(range(kv * groups))
    counts = [b - a for a, b in split.queries]
    assert max(counts) - min(counts) <= 1
    for rank, ((a, b), (first, last)) in enumerate(zip(split.queries, split.keys, strict=True)):
        assert sorted({h // groups for h in range(a, b)}) == list(range(first, last))
        index, local = split.key_index(rank), [h // groups - first for h in range(a, b)]
        if index is None and b > a:  # grouping by itself has to give the same
            assert [h * (last - first) // (b - a) for h in range(b - a)] == local
        elif index is not None:
            assert index.tolist() == local


def traded(rank: int, world: int, name: str, length: int) -> None:
    team, layout = Team(comm.group_names(dist.group.WORLD)), getattr(ra, name)(length, world)
    exchange = HeadExchange(team, [layout.held(r) for r in range(world)])
    split = Split.of(6, 2, world)
    whole = torch.randn(2, 6, length, 3, generator=torch.Generator().manual_seed(0))
    mine = layout.shard(whole, rank, 2)
    by_heads = exchange.to_heads(mine, split.queries)
    assert torch.equal(by_heads, whole[:, slice(*split.queries[rank])])
    assert torch.equal(exchange.to_sequence(by_heads, split.queries, 6), mine)
    keys = layout.shard(whole[:, :2], rank, 2)
    back = exchange.to_sequence(exchange.to_heads(keys, split.keys), split.keys, 2)
    times = torch.tensor([sum(a <= h < b for a, b in split.keys) for h in range(2)])
    assert torch.allclose(back, keys * times[:, None, None])  # heads that several ranks had are added up


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["Contiguous", "ZigZag", "Striped"])
def test_the_trade_is_undone(ranks: RankPools, world: int, name: str) -> None:
    for length in (2, 13):
        ranks(world).run(traded, name, length)
