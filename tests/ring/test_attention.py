"""`ring_attention` against dense attention, value by value, gradients one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ring_attention as ra
from tests.harness import RankPools, assert_equal
from tests.ring.problems import Problem, check

PROPERTY = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def answer(rank: int, world: int, problems: list[Problem]) -> list[dict[str, Any]]:
    return [problem.ring() for problem in problems]


def run(ranks: RankPools, world: int, *problems: Problem, tolerance: float | None = None) -> None:
    for problem, *parts in zip(problems, *ranks(world).run(answer, list(problems)), strict=True):
        check(problem, parts, tolerance)


# ------------------------------------------------------------------------------------------------ any problem
@st.composite
def masks(draw: st.DrawFn, S: int, B: int) -> dict[str, Any]:  # noqa: N803
    mask: dict[str, Any] = {"causal": draw(st.booleans())}
    end = st.none() | st.integers(0, S + 1)
    if draw(st.booleans()):
        mask["window"] = draw(st.tuples(end, end))
    if draw(st.booleans()):
        row = st.lists(st.integers(-1, 3), min_size=S, max_size=S)
        if draw(st.booleans()):
            row = row.map(sorted)
        mask["documents"] = draw(st.one_of(row, st.lists(row, min_size=B, max_size=B)))
    if draw(st.booleans()):
        mask["prefix"] = draw(st.lists(st.integers(0, S + 1), min_size=B, max_size=B))
    return mask


@st.composite
def any_problem(draw: st.DrawFn) -> Problem:
    S, B = draw(st.integers(1, 25)), draw(st.integers(1, 3))
    kv = draw(st.integers(1, 3))
    return Problem(
        S=S,
        B=B,
        heads=(kv * draw(st.integers(1, 3)), kv),
        dims=draw(st.sampled_from([(8, 8), (4, 6), (8, 3)])),
        mask=draw(masks(S, B)),
        layout=draw(st.sampled_from(["Contiguous", "ZigZag", "Striped", "Balanced"])),
        strategy=draw(st.sampled_from(["ring", "gather", "ulysses", "auto"])),
        softcap=draw(st.sampled_from([None, None, 2.0])),
        scale=draw(st.sampled_from([None, 0.5])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@PROPERTY
@given(problems=st.lists(any_problem(), min_size=8, max_size=8))
def test_any_problem_equals_dense(ranks: RankPools, world: int, problems: list[Problem]) -> None:
    run(ranks, world, *problems)
