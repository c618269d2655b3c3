"""Layouts partition the sequence, go back and forth through their text, and even out work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ring_attention as ra
from ring_attention import layouts
from ring_attention.layouts import Layout

NAMES = ["Contiguous", "ZigZag", "Striped", "Balanced"]
sizes = st.tuples(st.integers(0, 70), st.integers(1, 6))


def layout(name: str, seq_len: int, world: int) -> Layout:
    return ra.Balanced(ra.Mask(causal=True), seq_len, world) if name == "Balanced" else getattr(ra, name)(seq_len, world)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(size=sizes)
def test_every_position_is_held_once_in_ascending_order(name: str, size: tuple[int, int]) -> None:
    made = layout(name, *size)
    held = [made.positions(rank) for rank in range(size[1])]
    assert all((part.diff() > 0).all() and part.dtype == torch.int64 for part in held)
    assert torch.cat(held).sort().values.tolist() == list(range(size[0]))
    assert [made.size(rank) for rank in range(size[1])] == [len(part) for part in held]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(size=sizes)
def test_the_spec_says_it_all(name: str, size: tuple[int, int]) -> None:
    made = layout(name, *size)
    again = layouts.parse(made.spec)
    assert [again.positions(r).tolist() for r in range(size[1])] == [made.positions(r).tolist() for r in range(size[1])]
    assert again == made and hash(again) == hash(made)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shard_and_unshard_are_inverse(name: str, dim: int) -> None:
    x, made = torch.randn(11, 11, 11), layout(name, 11, 3)
    parts = [made.shard(x, rank, dim) for rank in range(3)]
    assert torch.equal(made.unshard(parts, dim), x)
    assert torch.equal(parts[1], x.index_select(dim, made.positions(1)))


def test_the_named_layouts() -> None:
    assert ra.Contiguous(7, 3).positions(0).tolist() == [0, 1, 2]
    assert ra.ZigZag(8, 2).positions(1).tolist() == [2, 3, 4, 5]
    assert ra.ZigZag(8, 2).positions(0).tolist() == [0, 1, 6, 7]
    assert ra.Striped(7, 3).positions(1).tolist() == [1, 4]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_balanced_evens_out_packed_documents(world: int) -> None:
    lengths = [700, 90, 60, 50, 30, 20, 40, 10]
    ids = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))
    mask = ra.Mask(causal=True, documents=ids)
    made, work = ra.Balanced(mask, 1000, world), mask.row_work(1000)
    loads = np.array([work[made.held(rank)].sum() for rank in range(world)])
    tokens = np.array([made.size(rank) for rank in range(world)])
    assert loads.max() <= 1.05 * loads.mean()
    assert tokens.max() <= 1.1 * tokens.mean()  # memory is even too


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": (16, 0)}, {}])
def test_balanced_keeps_spans_long_where_that_is_even(world: int, options: dict) -> None:
    made = ra.Balanced(ra.Mask(**options), 4096, world)
    assert max(len(made.spans(rank)) for rank in range(world)) <= 4


def test_merged_layouts_hold_what_neighbours_hold() -> None:
    made = layouts.merged(ra.ZigZag(16, 4), 2)
    assert made.world_size == 2
    assert made.positions(0).tolist() == sorted([*ra.ZigZag(16, 4).positions(0), *ra.ZigZag(16, 4).positions(1)])


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="seq_len >= 0"):
        ra.ZigZag(-1, 2)
    with pytest.raises(ra.RingError, match="rank 2 is not one of the layout's 2 ranks"):
        ra.ZigZag(4, 2).positions(2)
    with pytest.raises(ra.UsageError, match="dim 0 has length 5, the layout has seq_len 4"):
        ra.ZigZag(4, 2).shard(torch.zeros(5), 0, 0)
    with pytest.raises(ra.UsageError, match=r"parts have lengths \[4, 0\].*\[2, 2\]"):
        ra.ZigZag(4, 2).unshard([torch.zeros(4), torch.zeros(0)], 0)
    with pytest.raises(ra.UsageError, match="unknown layout 'spiral'"):
        layouts.named("spiral", ra.Mask(), 4, 2)
