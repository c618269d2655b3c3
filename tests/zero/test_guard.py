"""Ranks that ask for different things: the same DivergenceError on all, in seconds, naming ranks and modules."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.harness import RankPools
from tests.models import Net, sgd
from zeroshard.guard import deadlocked, describe


def state(label: str, *waits: int, posted: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"label": label, "since": 0.0, "channel": 0, "waits": [[peer, 4] for peer in waits], "posted": [label, *posted]}


def test_two_that_wait_for_each_other_in_different_places_are_deadlocked() -> None:
    states = {0: state("gather a", 1), 1: state("gather b", 0)}
    assert deadlocked(states) == states
    text = describe(states)
    assert "rank 0 in 'gather a'" in text and "rank 1 in 'gather b'" in text


def test_one_that_waits_for_a_rank_that_computes_is_not() -> None:
    assert deadlocked({0: state("gather a", 1)}) == {}


def test_a_message_on_its_way_is_no_deadlock() -> None:
    assert deadlocked({0: state("gather a", 1), 1: state("gather b", 0, posted=("gather a",))}) == {}


def test_a_chain_ends_with_who_can_go_on() -> None:
    """0 waits for 1, which waits for 2, which has posted nothing but computes."""
    assert deadlocked({0: state("a", 1), 1: state("b", 2)}) == {}
    ring = {0: state("a", 1), 1: state("b", 2), 2: state("c", 0)}
    assert deadlocked(ring) == ring


# ------------------------------------------------------------------------------------------ divergences

KINDS = ("another module", "one forward more", "only one reads", "only one saves gradients", "backward on one", "order")
KINDS += ("one norm more",)


def diverge(rank: int, world: int, kind: str, stage: int) -> tuple[str, str, float]:
    torch.manual_seed(0)
    model = Net(depth=3)
    model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
    x = torch.ones(2, 7)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    start = time.monotonic()
    try:
        if kind == "another module":
            model.blocks[rank](x)
        elif kind == "one forward more" and rank == 0:
            model(x)
        elif kind == "only one reads" and rank == 0:
            zeroshard.full_state_dict(model)
        elif kind == "only one saves gradients" and rank == world - 1:
            zeroshard.full_gradients(model)
            model.weight_norm = sum(p.norm() for p in model.parameters()).item()
        elif kind == "backward on one" and rank == 0:
            model(x).sum().backward()
        elif kind == "one norm more" and rank == 0:
            print(next(model.parameters()).norm())
        elif kind == "order":
            for index in (0, 1) if rank else (1, 0):
                model.blocks[index](x)
        for _ in range(3):
            with torch.no_grad():
                _ = model(x) if kind != "one norm more" else None
            sum(p.norm() for p in model.parameters()).item()
    except zeroshard.ShardError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing was raised", time.monotonic() - start


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_is_told_on_every_rank(ranks: RankPools, kind: str) -> None:
    results = ranks(2).run(diverge, kind, 3, dirty=True)
    for name, text, seconds in results:
        assert name == "DivergenceError", results
        assert seconds < 10 and text == results[0][1]
        assert "rank 0" in text and "rank 1" in text
        assert any(word in text for word in ("blocks", "Net", "backward", "norm", "state_dict", "gradients")), text


def test_three_ranks_of_which_one_goes_astray(ranks: RankPools) -> None:
    results = ranks(3).run(diverge, "one forward more", 3, dirty=True)
    assert [name for name, _, _ in results] == ["DivergenceError"] * 3
    assert len({text for _, text, _ in results}) == 1


def different_calls(rank: int, world: int, what: str) -> str:
    torch.manual_seed(0)
    model = Net(depth=2 + (what == "model" and rank))
    options: dict[str, Any] = {"stage": 3}
    options |= {
        "stage": {"stage": 2 + rank},
        "reduce": {"reduce": ("mean", "sum")[rank]},
        "units": {"units": (None, ["blocks.*", "head"])[rank]},
        "precision": {"precision": (None, zeroshard.Precision(compute=torch.bfloat16))[rank]},
        "model": {},
    }[what]
    try:
        zeroshard.shard(model, sgd(model.parameters()), **options)
    except zeroshard.DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["stage", "reduce", "units", "precision", "model"])
def test_shard_called_differently(ranks: RankPools, what: str) -> None:
    first, second = ranks(2).run(different_calls, what)
    assert first == second and "ranks 0 and 1" in first
    assert (what if what not in ("units", "model") else "parameters") in first


def slow(rank: int, world: int) -> float:
    """A rank that only computes for long is no divergence."""
    model = Net(depth=2)
    model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=3)
    for _ in range(2):
        if rank:
            time.sleep(2.5)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(sum(p.norm() for p in model.parameters()))


def test_a_slow_rank_is_waited_for(ranks: RankPools) -> None:
    first, second = ranks(2).run(slow)
    assert first == second


def stalls(rank: int, world: int) -> tuple[str, str]:
    model = nn.Linear(4, 4)
    model, _ = zeroshard.shard(model, None, stage=3)
    if rank:
        time.sleep(9)
        return "", ""
    try:
        with torch.no_grad():
            model(torch.ones(1, 4))
    except zeroshard.ShardError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def test_a_rank_that_never_comes_is_named_when_the_group_times_out(ranks: RankPools) -> None:
    (name, text), _ = ranks(2).run(stalls, group_timeout=3, dirty=True)
    assert name == "StallError" and "rank 1" in text and "gather Linear" in text, text
