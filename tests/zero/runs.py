"""Sharded runs of the loop in tests/models.py, many in one call of the ranks, and their comparison with the plain loop.

    problems = [Problem("net", stage=3), Problem("tied", stage=2, accumulate=3, no_sync=True)]
    check(ranks(2), problems)
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import zeroshard
from tests.harness import Ranks, assert_equal
from tests.models import CASES, History, adamw, sgd, train, train_reference, trainable

OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One training run. `exact`: the sums are those of the reference, in its order, so the bits must be the same."""

    case: str
    stage: int
    optimizer: str = "sgd"
    accumulate: int = 1
    no_sync: bool = False
    clip: float | None = None
    reduce: str = "mean"
    units: Any = None
    prefetch: int = 1

    @property
    def exact(self) -> bool:
        return self.accumulate == 1 and self.clip is None

    @property
    def dtype(self) -> torch.dtype:
        """fp64 where sums are made in another order than the reference's: there only rounding may differ."""
        return torch.float32 if self.exact else torch.float64


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole values of the parameters alone, under `named_parameters`' names."""
    whole = zeroshard.full_state_dict(model)
    return {name: whole[name] for name, _ in model.named_parameters()}


def run_problem(rank: int, problem: Problem) -> History:
    case = CASES[problem.case]
    model = case.build(dtype=problem.dtype)
    optimizer = OPTIMIZERS[problem.optimizer](trainable(model))
    zeroshard.shard(
        model, optimizer, stage=problem.stage, reduce=problem.reduce, units=problem.units, prefetch=problem.prefetch
    )
    return train(
        model,
        optimizer,
        case,
        rank=rank,
        accumulate=problem.accumulate,
        no_sync=problem.no_sync,
        clip=problem.clip,
        dtype=problem.dtype,
        read_gradients=zeroshard.full_gradients,
        read_parameters=parameters,
    )


@functools.cache
def reference(problem: Problem, world: int) -> History:
    """Of a problem at stage 0 with the defaults of what may not matter."""
    return train_reference(
        CASES[problem.case],
        world=world,
        make_optimizer=OPTIMIZERS[problem.optimizer],
        reduce=problem.reduce,
        accumulate=problem.accumulate,
        clip=problem.clip,
        dtype=problem.dtype,
    )


def attempt_all(rank: int, world: int, attempt: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
    """`attempt(rank, item)` for each item: its result, or the traceback as text, so that all failures are seen at once."""
    results: list[Any] = []
    for item in items:
        try:
            results.append(attempt(rank, item))
        except (zeroshard.DivergenceError, zeroshard.StallError):
            raise  # what is left of the messages would confuse the next one
        except Exception:
            results.append(traceback.format_exc())
    return results


def collect(ranks: Ranks, attempt: Callable[..., Any], items: Iterable[Any], **options: Any) -> list[list[Any]]:
    """For each item the results of all ranks, in rank order. Fails with every traceback if there is one."""
    items = list(items)
    by_rank = ranks.run(attempt_all, attempt, items, **options)
    failures = [
        f"{item}, rank {rank}:\n{result}"
        for rank, results in enumerate(by_rank)
        for item, result in zip(items, results, strict=True)
        if isinstance(result, str) and result.startswith("Traceback")
    ]
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures[:6])
    return [list(results) for results in zip(*by_rank, strict=True)]


def check(ranks: Ranks, problems: Sequence[Problem], **options: Any) -> None:
    """Every problem on the ranks, compared with the reference: losses, gradients, norms, parameters, buffers."""
    wrong = []
    for problem, histories in zip(problems, collect(ranks, run_problem, problems, **options), strict=True):
        plain = dataclasses.replace(problem, stage=0, units=None, prefetch=1, no_sync=False)
        want = reference(plain, ranks.world)
        for rank, got in enumerate(histories):
            expected = dataclasses.replace(want, losses=[losses[rank] for losses in want.losses])
            if rank:
                expected.buffers = got.buffers  # each rank's own; the reference has rank 0's
            try:
                tolerance = {} if problem.exact else {"rtol": 1e-10, "atol": 1e-12}
                assert_equal(dataclasses.asdict(got), dataclasses.asdict(expected), **tolerance)
            except AssertionError as error:
                wrong.append(f"{problem}, rank {rank}:\n{error}")
    assert not wrong, f"{len(wrong)} differ\n" + "\n".join(wrong[:6])
