"""Ranks that disagree, or that die: every other rank raises within seconds, and says who and what."""

from __future__ import annotations

import json
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ring_attention as ra
from ring_attention import ring
from tests.harness import RankPools
from tests.ring.problems import Problem

SECONDS = 10.0


def caught(action: Callable[[], Any]) -> tuple[str, str, float]:
    """(class, text, seconds) of what an action raises."""
    began = time.monotonic()
    try:
        action()
    except ra.RingError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def call(rank: int, problem: Problem, **changes: Any) -> torch.Tensor:
    layout, _ = problem.layouts(dist.get_world_size())
    x = problem.tensors()
    q, k, v = (layout.shard(x[n], rank, 2).requires_grad_() for n in "qkv")
    return ra.ring_attention(q, k, v, **({"group": dist.group.WORLD, "layout": layout, "mask": problem.mask_of()} | changes))


DISAGREEMENTS: dict[str, tuple[Problem, Problem, str]] = {
    "seq_len": (Problem(S=12), Problem(S=14), "seq_len of layout: 12 on rank.* 14 on rank 1"),
    "batch": (Problem(B=1), Problem(B=2), "shape"),
    "heads": (Problem(heads=(4, 2)), Problem(heads=(4, 4)), "heads"),
    "head_dim": (Problem(dims=(8, 8)), Problem(dims=(4, 8)), "head dims"),
    "dtype": (Problem(), Problem(dtype=torch.bfloat16), "dtype: torch.float64 on rank.* torch.bfloat16 on rank 1"),
    "causal": (Problem(), Problem(mask={}), "mask: causal=True"),
    "window": (Problem(mask={"window": (3, 0)}), Problem(mask={"window": (4, 0)}), "window"),
    "documents": (
        Problem(mask={"documents": [0] * 5 + [1] * 7}),
        Problem(mask={"documents": [0] * 6 + [1] * 6}),
        "mask.documents",
    ),
    "prefix": (Problem(mask={"prefix": [3]}), Problem(mask={"prefix": [4]}), "mask.prefix"),
    "layout": (Problem(layout="Striped"), Problem(layout="Contiguous"), "layout: Striped on rank.* Contiguous on rank 1"),
    "scale": (Problem(), Problem(scale=0.3), "scale"),
    "softcap": (Problem(softcap=2.0), Problem(softcap=3.0), "softcap"),
    "strategy": (Problem(strategy="ring"), Problem(strategy="gather"), "strategy"),
}


def disagree(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        ours, theirs, _ = DISAGREEMENTS[name]
        problem = theirs if rank == 1 else ours
        settings = {"scale": problem.scale, "softcap": problem.softcap, "strategy": problem.strategy}
        found[name] = caught(lambda problem=problem, settings=settings: call(rank, problem, **settings))
    call(rank, Problem())  # after all that the group is as good as before
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_names_what_differs(ranks: RankPools, world: int) -> None:
    for found in ranks(world).run(disagree, list(DISAGREEMENTS)):
        for name, (kind, text, seconds) in found.items():
            assert kind == "DivergenceError", (name, kind)
            assert re.search(DISAGREEMENTS[name][2], text), (name, text)
            assert seconds < SECONDS


def other_calls(rank: int, world: int) -> list[tuple[str, str, float]]:
    cp, labels = ra.ContextParallel(dist.group.WORLD), torch.zeros(1, 4, dtype=torch.long)
    x = torch.randn(1, 4, 8, requires_grad=True)
    others = [
        lambda: cp.unshard(x),
        lambda: cp.cross_entropy(x, labels),
        lambda: cp.num_tokens(labels),
        lambda: call(rank, Problem(S=4 * world)),
    ]
    return [caught(others[(at + (rank == world - 1)) % 4]) for at in range(4)]


def test_different_calls_meet(ranks: RankPools) -> None:
    for found in ranks(3).run(other_calls):
        assert [kind for kind, _, _ in found] == ["DivergenceError"] * 4
        assert all("call: " in text and "rank 2" in text for _, text, _ in found)


def backward_order(rank: int, world: int, how: str) -> tuple[str, str, float]:
    """Two layers of the same shape: only the number of the call tells them apart."""
    outs = [call(rank, Problem()), call(rank, Problem())]
    order = outs[::-1] if rank == 1 else outs
    if how == "unshard":
        cp = ra.ContextParallel(dist.group.WORLD)
        outs = [cp.unshard(torch.randn(1, 4, 8, requires_grad=True)) for _ in range(2)]
        order = outs[::-1] if rank == 1 else outs
    if how == "forward":
        return caught(lambda: call(rank, Problem()) if rank == 1 else outs[0].sum().backward())
    return caught(lambda: [out.sum().backward() for out in order])


@pytest.mark.parametrize("how", ["attention", "unshard", "forward"])
def test_backward_in_another_order(ranks: RankPools, how: str) -> None:
    for kind, text, seconds in ranks(2).run(backward_order, how):
        assert (kind == "DivergenceError" and "order of calls" in text) or "call:" in text, text
        assert seconds < SECONDS


def frozen_elsewhere(rank: int, world: int) -> tuple[str, str, float]:
    layout, x = Problem().layouts(world)[0], Problem().tensors()
    q, k, v = (layout.shard(x[n], rank, 2).requires_grad_(n == "q" or rank == 0) for n in "qkv")
    out = ra.ring_attention(q, k, v, group=dist.group.WORLD, layout=layout, mask=ra.Mask(causal=True))
    return caught(lambda: out.sum().backward())


def test_inputs_frozen_on_one_rank_only(ranks: RankPools) -> None:
    for kind, text, _ in ranks(2).run(frozen_elsewhere):
        assert kind == "DivergenceError" and "need gradients" in text


def one_bad_rank(rank: int, world: int) -> list[tuple[str, str, float]]:
    """Rank 1 alone makes a mistake that it can see by itself."""
    x, bad = Problem(S=4 * world).tensors(), rank == 1
    layout = ra.ZigZag(4 * world, world)
    q, k, v = (layout.shard(x[n], rank, 2) for n in "qkv")
    good = {"group": dist.group.WORLD, "layout": layout, "mask": ra.Mask(causal=True)}
    longer = torch.cat([q, q[:, :, :1]], 2)
    return [
        caught(lambda: ra.ring_attention(longer if bad else q, k, v, **good)),
        caught(lambda: ra.ring_attention(q, k[:, :, :, :4] if bad else k, v, **good)),
        caught(lambda: ra.ring_attention(q, k.float() if bad else k, v, **good)),
        caught(lambda: ra.ring_attention(q, k, v, **(good | {"strategy": "rnig" if bad else "ring"}))),
        caught(
            lambda: ra.ring_attention(
                q, k, v, **(good | {"mask": ra.Mask(documents=torch.zeros(3 if bad else 4 * world).long())})
            )
        ),
        caught(lambda: ra.ring_attention(q[0] if bad else q, k, v, **good)),
        caught(lambda: ra.ring_attention(q, k, v, sinks=torch.zeros(3) if bad else torch.zeros(2), **good)),
    ]


def test_one_rank_with_a_problem_stops_all(ranks: RankPools) -> None:
    for found in ranks(3).run(one_bad_rank):
        kinds = [kind for kind, _, _ in found]
        assert all(kind in ("UsageError", "DivergenceError") for kind in kinds), kinds
        assert all("rank 1" in text or "rank" in text for _, text, _ in found)
        assert all(seconds < SECONDS for _, _, seconds in found)


def die(rank: int, world: int, folder: str, when: str, strategy: str) -> None:
    """The last rank dies; the others leave what they raise in a file, since the run as a whole fails."""
    problem = Problem(S=64 * world, heads=(4, 4))
    out = call(rank, problem, strategy=strategy)
    dist.barrier()
    if rank == world - 1:
        if when == "before":
            os._exit(7)
        ring.calls = lambda *_: os._exit(7)  # it has agreed to the call and sent its keys, and is gone
    found = caught(lambda: out.sum().backward() if when == "backward" else call(rank, problem, strategy=strategy))
    pathlib.Path(folder, str(rank)).write_text(json.dumps(found))


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("when", ["before", "middle", "backward"])
def test_all_others_raise_when_a_rank_dies(ranks: RankPools, tmp_path: pathlib.Path, when: str, strategy: str) -> None:
    with pytest.raises(AssertionError, match="rank 3 died"):
        ranks(4).run(die, str(tmp_path), when, strategy, dirty=True)
    answers = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert all(kind == "PeerError" and seconds < SECONDS for kind, _, seconds in answers), answers
    assert any("rank 3 died" in text for _, text, _ in answers), answers
