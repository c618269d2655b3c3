"""Ranks that use different parts of a model in the same step: below stage 3 the result is the unsharded one, never a hang."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.harness import assert_equal
from tests.models import Block

PATTERNS = [((0, 1, 2, 3), ()), ((3,), (0,)), ((2, 3), (1,)), ((), (0, 1, 2, 3)), ((0,), (0,))]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Block(), nn.Linear(7, 5)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        x = self.stem(x)
        for index in used:
            x = self.experts[index](x)
        return self.head(x)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Experts()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def losses(model: nn.Module, step: int, rank: int, parts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    batches = [torch.randn(4, 7, generator=generator) for _ in range(parts)]
    return [model(x, PATTERNS[(step + part) % 5][rank]).pow(2).mean() for part, x in enumerate(batches)]


def reference(parts: int) -> dict[str, Tensor]:
    model, optimizer = make()
    for step in range(6):
        for rank in range(2):
            for loss in losses(model, step, rank, parts):
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(rank: int, world: int, stage: int, parts: int, defer: bool) -> None:
    model, optimizer = zeroshard.shard(*make(), stage=stage, units=["stem", "experts.*", "head"])
    for step in range(6):
        for part, loss in enumerate(losses(model, step, rank, parts)):
            with model.no_sync() if defer and part < parts - 1 else contextlib.nullcontext():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(zeroshard.full_state_dict(model), reference(parts), atol=2e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_any_pattern(ranks, stage: int) -> None:
    for parts, defer in ((1, False), (2, False), (2, True)):
        ranks(2).run(train, stage, parts, defer)
