"""Plans against the mask itself: every visible pair is in one block, nothing else is, and few blocks do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ring_attention as ra
from ring_attention import plan
from ring_attention.plan import Block, Plan
from tests.ring.drawn import problems
from tests.ring.problems import Problem


def covered(made: Plan, distance: int, problem: Problem) -> torch.Tensor:
    """How often each pair of (this rank's queries, the source's keys) is in a block: [B, S_local, K_local]"""
    i, j = made.layout.positions(made.rank), made.key_layout.positions((made.rank - distance) % made.layout.world_size)
    counts = torch.zeros(problem.B, len(i), len(j), dtype=torch.long)
    for step in (s for s in made.steps if s.distance == distance):
        for b in step.blocks:
            inside = plan.banded(b)
            assert b.dense or int(inside.sum()) == b.pairs
            if b.dense:
                allows = made.mask.allows(i[b.q0 : b.q1], j[b.k0 : b.k1])
                inside = allows if len(allows) == 1 else allows[b.rows]
            counts[b.rows, b.q0 : b.q1, b.k0 : b.k1] += inside
    return counts


@settings(deadline=None, max_examples=150, derandomize=True)
@given(problem=problems(), world=st.integers(1, 4), dense=st.booleans())
def test_blocks_cover_the_mask_exactly(problem: Problem, world: int, dense: bool) -> None:
    layout, _ = problem.layouts(world)
    for rank in range(world):
        made = plan.make(layout, layout, problem.mask_of(), rank, dense=dense)
        for distance in range(world):
            i, j = layout.positions(rank), layout.positions((rank - distance) % world)
            want = problem.visible()[:, 0, i][:, :, j].long()
            assert torch.equal(covered(made, distance, problem), want)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(problem=problems(), world=st.integers(2, 4))
def test_what_one_sends_another_receives(problem: Problem, world: int) -> None:
    layout, _ = problem.layouts(world)
    plans = [plan.make(layout, layout, problem.mask_of(), rank) for rank in range(world)]
    sent = {(p.rank, s.target, s.distance): s.sent for p in plans for s in p.steps if s.sends and s.distance}
    received = {(s.source, p.rank, s.distance): s.keys for p in plans for s in p.steps if s.receives and s.distance}
    assert sent == received


@pytest.mark.parametrize("name", ["Contiguous", "ZigZag", "Striped"])
@pytest.mark.parametrize("seq_len", [64, 61])
def test_causal_takes_one_block_a_step(name: str, seq_len: int) -> None:
    layout = getattr(ra, name)(seq_len, 4)
    for rank in range(4):
        assert all(len(step.blocks) <= 1 for step in plan.make(layout, layout, ra.Mask(causal=True), rank).steps)


def test_steps_that_nobody_needs_are_not_there() -> None:
    layout = ra.Contiguous(64, 4)
    window = plan.make(layout, layout, ra.Mask(causal=True, window=(7, 0)), 2)
    assert [step.distance for step in window.steps] == [0, 1]
    assert window.steps[1].keys == (9, 16) and window.steps[1].sent == (9, 16)  # just what the window reaches
    apart = plan.make(layout, layout, ra.Mask(documents=torch.arange(64) // 16), 2)
    assert [step.distance for step in apart.steps] == [0]


def test_ids_that_alternate_become_dense_blocks_of_bounded_size() -> None:
    layout = ra.Contiguous(4096, 1)
    made = plan.make(layout, layout, ra.Mask(documents=torch.arange(4096) % 7), 0)
    found = made.steps[0].blocks
    assert all(b.dense and b.queries * b.keys <= plan.DENSE_PAIRS for b in found) and len(found) <= 32


@settings(deadline=None, max_examples=200, derandomize=True)
@given(data=st.data())
def test_parts_of_a_block_see_what_the_block_sees(data: st.DataObject) -> None:
    L, K = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    end = st.none() | st.integers(-12, 12)
    block = Block(slice(None), 5, 5 + L, 7, 7 + K, data.draw(end), data.draw(end))
    qa, ka = data.draw(st.integers(0, L - 1)), data.draw(st.integers(0, K - 1))
    queries, keys = (qa, data.draw(st.integers(qa + 1, L))), (ka, data.draw(st.integers(ka + 1, K)))
    inside = plan.banded(block)[slice(*queries), slice(*keys)]
    assert torch.equal(plan.banded(plan.part(block, queries, keys)), inside)
    small = plan.trimmed(block, queries, keys)
    assert int(plan.banded(small).sum()) == int(inside.sum())
    if inside.any(1).any():
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        assert (small.q0 - 5, small.q1 - 5) == (qa + rows[0], qa + rows[-1] + 1)
        assert (small.k0 - 7, small.k1 - 7) == (ka + columns[0], ka + columns[-1] + 1)
