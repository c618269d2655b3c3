"""What travels: twice the parameters a step at stages 1 and 2, three times at stage 3, nothing inside no_sync below 2."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.harness import Collectives, RankPools
from tests.models import CASES, sgd, trainable
from tests.zero.runs import collect

CONTROL = 2048  # bytes a step may send besides: which gradients arrived, norms


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)))


def per_step(rank: int, item: tuple[int, bool, bool]) -> dict[str, Any]:
    stage, low, clip = item
    torch.manual_seed(0)
    precision = zeroshard.Precision(compute=torch.bfloat16) if low else None
    model = wide()
    model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage, precision=precision)
    for _ in range(2):
        before = zeroshard.stats(model)
        model(torch.randn(3, 64)).float().pow(2).mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = zeroshard.stats(model)
    counted = ("bytes_sent", "gathers", "reductions")
    return {name: getattr(after, name) - getattr(before, name) for name in counted}


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_of_a_step(ranks: RankPools, world: int) -> None:
    numel = sum(p.numel() for p in wide().parameters())
    items = [(stage, low, clip) for stage in (0, 1, 2, 3) for low in (False, True) for clip in (False, True)]
    for (stage, low, clip), of_ranks in zip(items, collect(ranks(world), per_step, items), strict=True):
        times = {0: 2, 1: 2, 2: 2, 3: 3}[stage]
        due = times * numel * 4 * (world - 1) / world
        if low:
            due /= 2  # weights and gradients travel in bf16
        for got in of_ranks:
            limit = 1.01 * due + CONTROL
            if low and stage == 0:
                limit *= 1.5  # the reduced gradient comes back in fp32
            # At stage 3 the first block is not gathered for backward: its input needs no gradient, one of its weights does.
            assert 0.9 * due < got["bytes_sent"] <= limit, (stage, low, clip, got, due)
            assert got["reductions"] == 4
            assert got["gathers"] == {0: 4 if low else 0, 1: 4, 2: 4, 3: 8}[stage] or (low and stage == 0), (stage, low, got)


def inside_no_sync(rank: int, stage: int) -> dict[str, Any]:
    model = wide()
    model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = zeroshard.stats(model)
    with Collectives() as seen, model.no_sync():
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
    inside = zeroshard.stats(model)
    model(torch.ones(2, 64)).sum().backward()
    after = zeroshard.stats(model)
    return {
        "sent inside": inside.bytes_sent - before.bytes_sent,
        "calls inside": seen.count(),
        "reductions inside": inside.reductions - before.reductions,
        "reductions after": after.reductions - inside.reductions,
    }


def test_no_sync_sends_nothing_below_stage_2(ranks: RankPools) -> None:
    for stage, of_ranks in zip((0, 1, 2, 3), collect(ranks(2), inside_no_sync, (0, 1, 2, 3)), strict=True):
        for got in of_ranks:
            if stage < 2:
                assert got["sent inside"] == got["calls inside"] == got["reductions inside"] == 0, (stage, got)
            assert got["reductions after"] == 4, (stage, got)


def frozen_traffic(rank: int, stage: int) -> int:
    case = CASES["lora"]
    model = case.build()
    model, optimizer = zeroshard.shard(model, sgd(trainable(model)), stage=stage)
    for step in range(2):
        before = zeroshard.stats(model).bytes_sent
        case.loss(model, case.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zeroshard.stats(model).bytes_sent - before


def test_frozen_weights_are_not_reduced(ranks: RankPools) -> None:
    """At stage 2 only adapters travel, padded to 64 bytes each, and a few marks."""
    model = CASES["lora"].build()
    adapters = sum(-(-p.numel() // 16) * 64 + 64 for p in trainable(model))
    (of_ranks,) = collect(ranks(2), frozen_traffic, [2])
    assert max(of_ranks) <= 2 * adapters / 2 + 1024


def small_parameters(rank: int, world: int) -> list[int]:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vectors = nn.ParameterList(nn.Parameter(torch.ones(100)) for _ in range(50))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for vector in self.vectors:
                x = x * vector
            return x

    model = nn.Sequential(*(Many() for _ in range(6)))
    model, _ = zeroshard.shard(model, None, stage=3)
    with torch.no_grad():
        before = zeroshard.stats(model).gathers
        model(torch.ones(2, 100))
        return [zeroshard.stats(model).gathers - before]


def test_small_parameters_are_gathered_together(ranks: RankPools) -> None:
    assert ranks(2).run(small_parameters) == [[6], [6]]


def tied_gathers(rank: int, world: int) -> int:
    model = CASES["tied_functional"].build()
    model, _ = zeroshard.shard(model, None, stage=3, units=["block"])
    case = CASES["tied_functional"]
    with torch.no_grad(), contextlib.nullcontext():
        before = zeroshard.stats(model).gathers
        model(*case.batch(0, 0).inputs)
        return zeroshard.stats(model).gathers - before


def test_a_tied_pair_is_gathered_once(ranks: RankPools) -> None:
    assert ranks(2).run(tied_gathers) == [2, 2]  # the root with the pair, and the block


def alone(rank: int, world: int) -> int:
    model = wide()
    model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=3)
    with Collectives() as seen:
        model(torch.ones(2, 64)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return seen.count() + zeroshard.stats(model).bytes_sent


def test_one_rank_sends_nothing(ranks: RankPools) -> None:
    assert ranks(1).run(alone) == [0]


class Recomputed(nn.Module):
    """A checkpoint inside forward, as models of transformers have it: the module's hooks do not run in backward."""

    seen: list[torch.dtype]

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.frozen, self.adapter = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        self.seen.append(self.adapter.weight.dtype)
        return self.frozen(x).tanh() + self.adapter(x.to(self.adapter.weight.dtype)) + F.linear(x, self.frozen.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.compute, x, use_reentrant=False)


def recomputing(rank: int, low: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Recomputed() for _ in range(4)))
    plain = copy.deepcopy(model)
    Recomputed.seen = []
    precision = zeroshard.Precision(compute=torch.bfloat16) if low else None
    model, optimizer = zeroshard.shard(model, sgd(trainable(model)), stage=3, precision=precision)
    before, x = zeroshard.stats(model).gathers, torch.randn(3, 16)
    model(x).float().pow(2).mean().backward()
    gathers = zeroshard.stats(model).gathers - before
    dtypes = set(Recomputed.seen)
    plain(x).pow(2).mean().backward()
    wrong = [
        name
        for name, gradient in zeroshard.full_gradients(model).items()
        if (want := plain.get_parameter(name).grad) is not None and not torch.equal(gradient, want)
    ]
    del optimizer
    return {"gathers": gathers, "dtypes": dtypes, "wrong": wrong, "resident": zeroshard.stats(model).resident_bytes["gathered"]}


def test_a_checkpoint_inside_forward_gathers_once(ranks: RankPools) -> None:
    """In forward and in backward each block's two units are gathered once; its weights are of one dtype in both."""
    for low, of_ranks in zip((False, True), collect(ranks(2), recomputing, (False, True)), strict=True):
        for got in of_ranks:
            assert got["gathers"] == 4 * 2 * 2, got
            assert got["dtypes"] == {torch.bfloat16 if low else torch.float32}
            assert low or not got["wrong"], got
            assert got["resident"] == 0
