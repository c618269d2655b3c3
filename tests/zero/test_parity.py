"""Sharding never changes the numbers: every case, stage, split and depth of prefetch against the plain loop."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import zeroshard
from tests.harness import RankPools, assert_equal
from tests.models import CASES
from tests.zero import random_models
from tests.zero.random_models import Drawn, drawn
from tests.zero.runs import Problem, check, collect, parameters

STAGES = (0, 1, 2, 3)


def loops(case: str, stage: int) -> list[Problem]:
    # The experts differ between ranks, so at stage 3 they must be gathered together.
    plain = Problem(case, stage, units=[] if case == "experts" else None)
    return [
        plain,
        dataclasses.replace(plain, optimizer="adamw", reduce="sum"),
        dataclasses.replace(plain, accumulate=2, clip=0.1),
        dataclasses.replace(plain, optimizer="adamw", accumulate=3, no_sync=True, clip=0.5),
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_stage_is_the_plain_loop(ranks: RankPools, case: str) -> None:
    """The same bits where the sums are the plain loop's; in fp64 to rounding where accumulation or a norm is not."""
    check(ranks(2), [problem for stage in STAGES for problem in loops(case, stage)])


def test_three_ranks(ranks: RankPools) -> None:
    check(ranks(3), [problem for case in CASES for problem in loops(case, 3)[1:3]])


@pytest.mark.parametrize("case", ["net", "tied", "lora", "scalars"])
def test_units_and_prefetch_change_no_bit(ranks: RankPools, case: str) -> None:
    splits = [None, [], ["*"], ["*", "*.*", "*.*.*"]]
    check(
        ranks(2),
        [
            Problem(case, stage, optimizer="adamw", units=split, prefetch=prefetch)
            for stage, prefetch in [(1, 1), (3, 0), (3, 2)]
            for split in splits
        ],
    )


def sharded_run(rank: int, item: tuple[Drawn, dict[str, Any]]) -> dict[str, Any]:
    problem, options = item
    model = problem.model()
    optimizer = random_models.make_optimizer(model)
    zeroshard.shard(model, optimizer, **options)
    evals = []
    for number, action in enumerate(problem.actions):
        if action == "eval":
            model.eval()
            with torch.no_grad():
                evals.append(model(problem.data(number, 0), number))
            model.train()
        elif action.startswith(("backward", "two", "one")):
            terms = random_models.losses(model, problem.data(number, rank), number, action)
            with model.no_sync() if "no_sync" in action else contextlib.nullcontext():
                if action == "one graph twice":
                    terms[0].backward(retain_graph=True)
                    terms[1].backward()
                else:
                    sum(terms).backward()
        else:
            random_models.edit(model, optimizer, action)
    return {"evals": evals, "parameters": parameters(model)}


OPTIONS = [
    {"stage": 0},
    {"stage": 1, "units": ["*"]},
    {"stage": 2},
    {"stage": 3, "prefetch": 2},
    {"stage": 3, "units": ["*", "*.*"], "prefetch": 0},
]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=drawn)
def test_drawn_models_and_loops(ranks: RankPools, problem: Drawn) -> None:
    """At every stage, split and prefetch the bits of the plain loop; within no_sync to rounding, in fp64."""
    items = [(problem, options) for options in OPTIONS]
    want = random_models.plain_run(problem, world=2)
    for (_, options), results in zip(items, collect(ranks(2), sharded_run, items), strict=True):
        for got in results:
            try:
                assert_equal(got, want, **({} if problem.exact else {"rtol": 1e-10, "atol": 1e-12}))
            except AssertionError as error:
                raise AssertionError(f"{problem} with {options}:\n{error}") from None
