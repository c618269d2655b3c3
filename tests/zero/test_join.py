"""Ranks that run out of work at different times: the same as one process that averages over the ranks that still have some."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from tests.harness import assert_equal
from tests.models import Net


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int, parts: int) -> list[torch.Tensor]:
    return [model(inputs(10 * step + part, rank)).pow(2).mean() / parts for part in range(parts)]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def reference(counts: tuple[int, ...], clip: float | None, parts: int, after: int) -> dict[str, torch.Tensor]:
    """One process; `after` joint steps of all ranks follow."""
    model, optimizer = make()
    for step in range(max(counts) + after):
        working = [rank for rank, count in enumerate(counts) if step < count or step >= max(counts)]
        for rank in working:
            for loss in loss_of(model, step, rank, parts):
                (loss / len(working)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_unevenly(rank: int, world: int, stage: int, counts: tuple[int, ...], clip: float | None, parts: int) -> None:
    model, optimizer = zeroshard.shard(*make(), stage=stage)

    def step(index: int) -> None:
        for loss in loss_of(model, index, rank, parts):
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    with zeroshard.join(model):
        for index in range(counts[rank]):
            step(index)
    step(max(counts))
    assert_equal(zeroshard.full_state_dict(model), reference(counts, clip, parts, 1), atol=2e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training(ranks, stage: int) -> None:
    for counts, clip, parts in (((3, 1), None, 1), ((0, 2), 0.01, 1), ((2, 4), 0.01, 2)):
        ranks(2).run(train_unevenly, stage, counts, clip, parts)


def test_training_on_three_ranks(ranks) -> None:
    ranks(3).run(train_unevenly, 3, (2, 4, 1), 0.01, 1)


def generate_unevenly(rank: int, world: int, stage: int) -> None:
    model, _ = zeroshard.shard(*make(), stage=stage)
    plain, _ = make()
    with zeroshard.join(model), torch.no_grad():
        for index in range(2 + 3 * rank):
            assert_equal(model(inputs(index, rank)), plain(inputs(index, rank)), atol=1e-6)


def test_generation(ranks) -> None:
    for stage in (1, 3):
        ranks(2).run(generate_unevenly, stage)


def steps_with_a_closure(rank: int, world: int) -> str:
    model, optimizer = zeroshard.shard(*make(), stage=2)
    with pytest.raises(zeroshard.ShardError, match="closure"), zeroshard.join(model):
        optimizer.step(lambda: model(inputs(0, rank)).sum())
    return "refused"


def test_closures_are_refused(ranks) -> None:
    assert ranks(2).run(steps_with_a_closure, dirty=True) == ["refused"] * 2


def other_learning_rate(rank: int, world: int) -> str:
    model, optimizer = zeroshard.shard(*make(), stage=1)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    with pytest.raises(zeroshard.DivergenceError) as error:
        loss_of(model, 0, rank, 1)[0].backward()
    return str(error.value)


def test_settings_that_differ_are_named_before_the_step(ranks) -> None:
    for told in ranks(2).run(other_learning_rate, dirty=True):
        assert "lr=0.1 and 0.2" in told and "ranks 0 and 1" in told
