"""Sharded gradients answer for the whole, on every rank the same, or raise: no call is wrong without a word."""

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.harness import RankPools
from tests.zero.operations import READS, SHAPE, WRITES, difference, verdict, wrong_ones
from tests.zero.runs import collect


def problem(stage: int) -> tuple[nn.Linear, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """(model, optimizer, its weight's gradient on plain torch, another tensor of that shape)."""
    torch.manual_seed(1)
    model = nn.Linear(7, 5)
    x, other = torch.randn(4, 7), torch.randn(SHAPE)
    model(x).pow(2).mean().backward()
    grad = model.weight.grad
    model.zero_grad()
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model.x = x
    return model, optimizer, grad, other


def verdicts(rank: int, item: tuple[int, bool]) -> dict[str, str]:
    stage, grad_mode = item
    model, optimizer, grad, other = problem(stage)
    found = {}
    for name, operation in {**READS, **WRITES}.items():
        optimizer.zero_grad()
        model(model.x).pow(2).mean().backward()
        with torch.set_grad_enabled(grad_mode):
            found[name] = verdict(
                operation, model.weight.grad, other, grad, lambda: zeroshard.full_gradients(model)["weight"]
            )
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_every_call_on_a_gradient_is_right_or_refused(ranks: RankPools, stage: int) -> None:
    items = [(stage, False), (stage, True)]
    for item, of_ranks in zip(items, collect(ranks(2), verdicts, items), strict=True):
        assert of_ranks[0].keys() == of_ranks[1].keys()
        wrong = wrong_ones(of_ranks)
        assert not wrong, f"{item}: {len(wrong)} wrong\n" + "\n".join(f"{name}: {text}" for name, text in wrong.items())
        must_answer = ["norm(2)", "norm(inf)", "sum", "mean", "isfinite all", "mul_", "copy_", "zero_", "clamp_", "+="]
        must_answer += ["_foreach_norm", "_foreach_mul_", "get_total_norm", "abs max", "div_ own norm", "nan mask set"]
        assert [name for name in must_answer if of_ranks[0][name] == "refused"] == []


def partials(rank: int, world: int) -> list[Any]:
    model, *_ = problem(3)
    model(model.x).pow(2).mean().backward()
    sent = zeroshard.stats(model).bytes_sent
    norms = [p.grad.norm() for p in model.parameters()]
    before_use = zeroshard.stats(model).bytes_sent - sent
    total = torch.stack(norms).norm()
    after_use = zeroshard.stats(model).bytes_sent - sent
    again = float(norms[0])
    return [before_use, after_use, zeroshard.stats(model).bytes_sent - sent, float(total), again]


def test_parts_of_norms_travel_together_when_they_are_used(ranks: RankPools) -> None:
    """Two numbers of 8 bytes to the other rank, once, at the first use of either."""
    (first, second) = ranks(2).run(partials)
    assert first[:3] == [0, 16, 16] and first[3:] == second[3:]


def spread(rank: int, world: int) -> dict[str, Any]:
    """A gradient whose last element alone is not finite: one rank holds it."""
    model, *_ = problem(3)
    model(model.x).pow(2).mean().backward()
    g = model.weight.grad
    if g.spec.numel and g.spec.start + g.spec.numel == g.numel():
        g.piece[-1] = float("nan")
    found = {
        "isnan": bool(g.isnan().any()),
        "finite": bool(torch.isfinite(g).all()),
        "norm": float(g.norm()),
        "max": float(g.max()),
        "sum": float(g.sum()),
        "branch": 1 if not torch.isfinite(g.norm()) else 0,
    }
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        found["clip"] = "non-finite" in str(error)
    return found


def test_one_rank_s_nan_is_everybody_s(ranks: RankPools) -> None:
    for found in ranks(3).run(spread):
        assert found["isnan"] and not found["finite"] and found["branch"] and found["clip"]
        assert all(found[name] != found[name] for name in ("norm", "max", "sum"))


def tiny(rank: int, world: int) -> list[str]:
    """Parameters of 0, 1 and 2 elements over three ranks: most ranks hold nothing of them."""
    wrong = []
    for shape in [(), (1,), (0, 4), (2,)]:
        model = nn.Module()
        model.value = nn.Parameter(torch.full(shape, 3.0))
        model.forward = lambda x, model=model: (x * model.value).sum()
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        model(torch.tensor(2.0)).backward()
        plain = torch.full(shape, 2.0)
        names = ["norm(2)", "sum", "mean", "all", "any", "count_nonzero", "isfinite all"]
        for name in names + (["norm(inf)", "abs max", "min"] if plain.numel() else []):
            text = verdict(READS[name], model.value.grad, plain, plain, lambda m=model: zeroshard.full_gradients(m)["value"])
            if text:
                wrong.append(f"{shape} {name}: {text}")
        optimizer.step()
        text = difference(zeroshard.full_state_dict(model).get("value"), torch.full(shape, 3.0 - 0.2))
        wrong += [f"{shape} step: {text}"] if text else []
    return wrong


def test_less_elements_than_ranks(ranks: RankPools) -> None:
    assert ranks(3).run(tiny) == [[], [], []]
