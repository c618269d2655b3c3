"""Sharded parameters: read, written, initialised, asked about. Right as on plain torch, or refused by name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.harness import RankPools
from tests.zero.operations import READS, SHAPE, WRITES, verdict, wrong_ones
from tests.zero.runs import collect


def linear() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return nn.Linear(7, 5), torch.randn(4, 7), torch.randn(SHAPE)


def verdicts(rank: int, item: tuple[int, str]) -> dict[str, str]:
    stage, mode = item
    model, _, other = linear()
    value = model.weight.detach().clone()
    model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    found = {}
    for name, operation in {**READS, **WRITES}.items():
        with zeroshard.gathered(model, write=True):
            model.weight.data.copy_(value)
        subject = model.weight.data if mode == "data" else model.weight
        with torch.set_grad_enabled(mode == "grad"):
            found[name] = verdict(
                operation, subject, other, value, lambda: zeroshard.full_state_dict(model)["weight"], leaf=mode == "grad"
            )
    return found


@pytest.mark.parametrize("mode", ["no_grad", "data", "grad"])
def test_every_call_on_a_parameter_is_right_or_refused(ranks: RankPools, mode: str) -> None:
    (of_ranks,) = collect(ranks(2), verdicts, [(3, mode)])
    wrong = wrong_ones(of_ranks)
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(f"{name}: {text}" for name, text in wrong.items())
    must_answer = ["norm(2)", "sum", "index", "matmul", "linear", "init normal_", "init kaiming"]
    must_answer += [] if mode == "grad" else ["mul_", "copy_", "add_", "row"]
    assert [name for name in must_answer if of_ranks[0][name] == "refused"] == []


# ------------------------------------------------------------------------------------------ in grad mode

USES: dict[str, Any] = {
    "linear": lambda w, b, x: F.linear(x, w, b).pow(2).sum(),
    "scaled": lambda w, b, x: F.linear(x, w * 0.5, b).pow(2).sum(),
    "matmul": lambda w, b, x: (x @ w.t() + b).tanh().sum(),
    "T": lambda w, b, x: (x @ w.T).exp().mean(),
    "norm": lambda w, b, x: w.norm() + b.norm(),
    "penalty": lambda w, b, x: sum((p * p).sum() for p in (w, b)),
    "abs": lambda w, b, x: w.abs().mean() + x.sum() * 0,
    "rows": lambda w, b, x: w[0].sum() * w[1:3].pow(2).sum(),
    "einsum": lambda w, b, x: torch.einsum("bi,oi->bo", x, w).pow(2).sum(),
    "stack": lambda w, b, x: torch.stack([w, w * 2]).pow(2).sum(),
    "cat": lambda w, b, x: torch.cat([w.flatten(), b]).pow(3).sum(),
    "softmax": lambda w, b, x: (w.softmax(1) * x[:1]).sum(),
    "clone": lambda w, b, x: w.clone().pow(2).sum(),
    "detached": lambda w, b, x: (w * w.detach()).sum(),
    "twice": lambda w, b, x: F.linear(x, w).sum() + F.linear(x * 2, w).pow(2).sum(),
    "normalized": lambda w, b, x: F.linear(x, F.normalize(w, dim=1)).pow(2).sum(),
    "where": lambda w, b, x: torch.where(w > 0, w, w * 0.1).sum(),
    "to": lambda w, b, x: w.double().pow(2).sum(),
    "addmm": lambda w, b, x: torch.addmm(b, x, w.t()).pow(2).sum(),
    "bilinear": lambda w, b, x: torch.linalg.multi_dot([x, w.t(), w, x.t()]).sum(),
    "half": lambda w, b, x: F.linear(x.bfloat16(), w.bfloat16()).float().sum(),
    "view": lambda w, b, x: w.view(-1).view(7, 5).sum(0).pow(2).sum(),
    "checkpoint": lambda w, b, x: checkpoint(lambda y: F.linear(y, w, b).pow(2).sum(), x, use_reentrant=False),
    "if": lambda w, b, x: (w * 2).sum() if w.sum() > -1e9 else w.sum(),
    "autograd.grad": lambda w, b, x: (w * torch.autograd.grad(F.linear(x, w).pow(2).sum(), w)[0].detach()).sum(),
}


def uses(rank: int, item: tuple[int, str]) -> dict[str, Any]:
    stage, name = item
    model, x, _ = linear()
    model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    loss = USES[name](model.weight, model.bias, x.requires_grad_())
    loss.backward()
    return {"loss": loss.detach(), "x": x.grad, **zeroshard.full_gradients(model)}


def test_weights_used_outside_their_module(ranks: RankPools) -> None:
    """Loss, the input's gradient and the parameters' gradients, at stages 2 and 3."""
    items = [(stage, name) for stage in (2, 3) for name in USES]
    wrong = []
    for (stage, name), of_ranks in zip(items, collect(ranks(2), uses, items), strict=True):
        model, x, _ = linear()
        loss = USES[name](model.weight, model.bias, x.requires_grad_())
        loss.backward()
        want = {"loss": loss.detach(), "x": x.grad, "weight": model.weight.grad, "bias": model.bias.grad}
        for got in of_ranks:
            for key, value in want.items():
                same = (value is None and got[key] is None) or (value is not None and got[key] is not None)
                if not same or (value is not None and not torch.allclose(got[key], value, rtol=1e-6, atol=1e-7)):
                    wrong.append(f"stage {stage}, {name}: {key}: {got[key]}, expected {value}")
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------ identity and what it says


def about(rank: int, world: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7))
    params = list(model.parameters())
    ids, kinds = [id(p) for p in params], [type(p) for p in params]
    hooks: list[str] = []
    params[0].register_hook(lambda g: hooks.append(f"before shard {tuple(g.shape)}"))
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(params, lr=0.1), stage=3)
    params[2].register_hook(lambda g: hooks.append(f"after shard {tuple(g.shape)}"))
    params[3].register_post_accumulate_grad_hook(lambda p: hooks.append(f"accumulated {tuple(p.grad.shape)}"))
    model(torch.ones(2, 7)).sum().backward()
    return {
        "same objects": ids == [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]],
        "isinstance": all(isinstance(p, nn.Parameter) for p in model.parameters()) and kinds[0] is nn.Parameter,
        "shapes": [tuple(p.shape) for p in model.parameters()],
        "numel": sum(p.numel() for p in model.parameters()),
        "grad shapes": [tuple(p.grad.shape) for p in model.parameters()],
        "leaf": all(p.is_leaf and p.requires_grad for p in model.parameters()),
        "hooks": hooks,
        "repr": repr(params[0]),
        "module repr": repr(model),
        "hash": len({params[0]: 1, params[1]: 2}),
        "in": any(p is params[1] for p in model.parameters()),
        "names": [name for name, _ in model.named_parameters()],
    }


def test_parameters_stay_what_they_are(ranks: RankPools) -> None:
    for got in ranks(2).run(about):
        assert got["same objects"] and got["isinstance"] and got["leaf"] and got["in"] and got["hash"] == 2
        assert got["shapes"] == got["grad shapes"] == [(5, 7), (5,), (7, 5), (7,)] and got["numel"] == 82
        assert sorted(got["hooks"]) == ["accumulated (7,)", "after shard (7, 5)", "before shard (5, 7)"]
        assert "Parameter" in got["repr"] and "(5, 7)" in got["repr"] and "in_features=7" in got["module repr"]
        assert got["names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def frozen_and_back(rank: int, world: int) -> list[Any]:
    torch.manual_seed(0)
    model, optimizer = linear()[0], None
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    seen = []
    for frozen in (True, False):
        model.weight.requires_grad_(not frozen)
        model(torch.ones(2, 7)).pow(2).mean().backward()
        seen.append({name: None if g is None else g.norm().item() for name, g in zeroshard.full_gradients(model).items()})
        optimizer.zero_grad()
    return seen


def test_freezing_and_unfreezing(ranks: RankPools) -> None:
    for frozen, free in ranks(2).run(frozen_and_back):
        assert frozen["weight"] is None and frozen["bias"] > 0 and free["weight"] > 0 and free["bias"] > 0


def assigned(rank: int, world: int) -> list[str]:
    model, _, other = linear()
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=3)
    start = zeroshard.full_state_dict(model)["weight"]
    wrong = []
    model.weight.grad = other  # a whole gradient of the user's own
    optimizer.step()
    moved = zeroshard.full_state_dict(model)["weight"]
    if not torch.allclose(moved, start - other, atol=1e-6):
        wrong.append("grad = whole tensor")
    model.weight.data = other
    if not torch.equal(zeroshard.full_state_dict(model)["weight"], other):
        wrong.append("data = whole tensor")
    for what, value in [("shape", torch.zeros(2, 2)), ("dtype", other.double())]:
        try:
            model.weight.data = value
            wrong.append(f"data of another {what} was taken")
        except zeroshard.ShardError as error:
            if "weight" not in str(error):
                wrong.append(f"the error names no parameter: {error}")
    try:
        model.weight.grad = torch.zeros(2, 2)
        wrong.append("grad of another shape was taken")
    except RuntimeError:
        pass
    return wrong


def test_assigning_data_and_grad(ranks: RankPools) -> None:
    assert ranks(2).run(assigned) == [[], []]
