"""The user's optimizer steps pieces, or whole parameters at their owners: always what the plain loop does."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import zeroshard
from tests.harness import RankPools, assert_equal
from tests.zero.runs import collect, parameters

WIDTH = 12


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        blocks = [nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, WIDTH)) for _ in range(2)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - x.roll(1, 1)).pow(2).mean()


class Lamb(optim.Optimizer):
    """Needs whole tensors: the step of each is scaled by its norm."""

    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["m"] = state["m"].mul(0.9).add(p.grad, alpha=0.1) if "m" in state else p.grad * 0.1
                    p.sub_(state["m"] * (group["lr"] * p.norm() / (state["m"].norm() + 1e-6)))


class Lion(optim.Optimizer):
    """Element-wise, and unknown to the engine."""

    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.sub_((0.9 * m + 0.1 * p.grad).sign(), alpha=group["lr"])
                    m.lerp_(p.grad, 0.01)


class Blockwise(optim.Optimizer):
    """An 8-bit-like state: one scale for each 8 elements in a row."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                flat = nn.functional.pad(p.grad.flatten(), (0, -p.numel() % 8)).view(-1, 8)
                scale = flat.abs().amax(1, keepdim=True) + 1e-12
                self.state[p]["scale"] = scale
                rounded = (flat / scale * 127).round() / 127 * scale
                p.sub_(rounded.flatten()[: p.numel()].view_as(p), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": functools.partial(optim.SGD, lr=0.1),
    "SGD momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": functools.partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": functools.partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": optim.Adam,
    "Adam amsgrad": functools.partial(optim.Adam, lr=0.01, amsgrad=True),
    "Adam fused": functools.partial(optim.Adam, lr=0.01, fused=True),
    "AdamW": functools.partial(optim.AdamW, lr=0.01),
    "AdamW tensor lr": functools.partial(optim.AdamW, lr=torch.tensor(0.01), foreach=False),
    "NAdam": functools.partial(optim.NAdam, lr=0.01),
    "RAdam": functools.partial(optim.RAdam, lr=0.01),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.05),
    "Adadelta": optim.Adadelta,
    "Adamax": functools.partial(optim.Adamax, lr=0.01),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Rprop": functools.partial(optim.Rprop, lr=0.01),
    "ASGD": functools.partial(optim.ASGD, lr=0.05, t0=1),
    "Adafactor": functools.partial(optim.Adafactor, lr=0.01),
    "Lamb": Lamb,
    "Lion": Lion,
    "Blockwise": Blockwise,
}
WHOLE = {"Adafactor": 1e-6, "Lamb": 1e-6, "Blockwise": 1e-6}


def averaged_gradients(model: nn.Module, step: int, world: int) -> None:
    grads = []
    for rank in range(world):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for p, *parts in zip(model.parameters(), *grads, strict=True):
        p.grad = functools.reduce(torch.add, parts) / world


def plain(make: Callable[[Any], optim.Optimizer], world: int, steps: int = 4) -> dict[str, Tensor]:
    model = build()
    optimizer = make(model.parameters())
    for step in range(steps):
        averaged_gradients(model, step, world)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stepped(rank: int, item: tuple[str, int]) -> dict[str, Any]:
    name, stage = item
    model = build()
    model, optimizer = zeroshard.shard(model, OPTIMIZERS[name](model.parameters()), stage=stage)
    for step in range(4):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": parameters(model), "state": zeroshard.stats(model).resident_bytes["optimizer"]}


@pytest.mark.parametrize("world", [2, 3])
def test_every_optimizer_is_the_plain_one(ranks: RankPools, world: int) -> None:
    """Element-wise ones to the bit; those stepping whole parameters to rounding, their state spread over the ranks."""
    items = [(name, stage) for name in OPTIMIZERS for stage in ((0, 1, 3) if world == 2 else (3,))]
    for (name, stage), of_ranks in zip(items, collect(ranks(world), stepped, items, timeout=120), strict=True):
        want = plain(OPTIMIZERS[name], world)
        for got in of_ranks:
            try:
                assert_equal(got["parameters"], want, rtol=WHOLE.get(name, 1e-7 if "fused" in name else 0.0))
            except AssertionError as error:
                raise AssertionError(f"{name} at stage {stage}:\n{error}") from None
        if stage == 3:
            whole = zeroshard.estimate(build(), stage=0, world_size=1, optimizer=OPTIMIZERS[name])["optimizer"]
            largest = 4 * 20 * WIDTH
            # Every rank counts the steps of every parameter it has a part of: 10 parameters, up to 3 small tensors each.
            assert max(got["state"] for got in of_ranks) <= whole / world + largest + 10 * 3 * 8 + 256, name


REFUSED = {
    "LBFGS": lambda params: optim.LBFGS(params),
    "SparseAdam": lambda params: optim.SparseAdam(list(params)),
}


def refused(rank: int, world: int, name: str, stage: int) -> str:
    model = build()
    try:
        zeroshard.shard(model, REFUSED[name](model.parameters()), stage=stage)
    except zeroshard.ShardError as error:
        return str(error)
    return "taken"


def test_optimizers_that_cannot_be_right_are_refused_by_name(ranks: RankPools) -> None:
    for name in REFUSED:
        for text in ranks(2).run(refused, name, 3):
            assert name in text, text


def test_every_optimizer_of_torch_is_in_these_tests() -> None:
    known = {type(make([nn.Parameter(torch.zeros(2, 2))])).__name__ for make in OPTIMIZERS.values()} | set(REFUSED)
    every = {name for name, kind in vars(optim).items() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    assert every - {"Optimizer", "Muon"} <= known  # Muon takes matrices alone: below


def muon_and_adamw(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    model = build()
    model, optimizers = zeroshard.shard(model, two_optimizers(model), stage=stage)
    for step in range(3):
        loss_of(model, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def two_optimizers(model: nn.Module) -> list[optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [optim.Muon(matrices, lr=0.01), optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.01)]


def test_muon_for_matrices_and_adamw_for_the_rest(ranks: RankPools) -> None:
    model = build()
    optimizers = two_optimizers(model)
    for step in range(3):
        averaged_gradients(model, step, 2)
        for optimizer in optimizers:
            optimizer.step()
    want = {name: p.detach() for name, p in model.named_parameters()}
    for stage in (1, 3):
        for got in ranks(2).run(muon_and_adamw, stage):
            assert_equal(got, want, rtol=1e-5)


def around(rank: int, world: int) -> dict[str, Any]:
    """Groups, schedulers, closures, hooks, state from before sharding, state between steps."""
    model = build()
    weights, biases = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    optimizer = optim.SGD([{"params": weights, "mine": 7}, {"params": biases, "lr": 0.3}, {"params": []}], lr=0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    averaged_gradients(model, 0, world)  # a step before sharding leaves momentum behind
    optimizer.step()
    scheduler.step()
    model.zero_grad()
    identities = [id(group) for group in optimizer.param_groups]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model, optimizer = zeroshard.shard(model, optimizer, stage=3)
    for step in (1, 2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        scheduler.step()
    return {
        "parameters": parameters(model),
        "groups": identities == [id(group) for group in optimizer.param_groups],
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "mine": optimizer.param_groups[0]["mine"],
        "lr": [group["lr"] for group in optimizer.param_groups],
        "calls": calls,
        "loss": isinstance(loss, Tensor),
        "own": {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()},
        "state": all(id(p) in {id(q) for q in optimizer.state} for p in model.parameters()),
    }


def test_groups_schedulers_closures_and_earlier_state(ranks: RankPools) -> None:
    model = build()
    weights, biases = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    optimizer = optim.SGD([{"params": weights}, {"params": biases, "lr": 0.3}], lr=0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        averaged_gradients(model, step, 2)
        optimizer.step()
        scheduler.step()
    for got in ranks(2).run(around):
        assert_equal(got["parameters"], {n: p.detach() for n, p in model.named_parameters()}, rtol=1e-6)
        assert got["groups"] and got["sizes"] == [5, 5, 0] and got["mine"] == 7 and got["loss"] and got["own"] and got["state"]
        assert got["lr"] == pytest.approx([0.0125, 0.0375, 0.0125])
        assert got["calls"] == ["before", "after"] * 2


def scaled(rank: int, world: int, stage: int) -> dict[str, Any]:
    model = build()
    model, optimizer = zeroshard.shard(model, optim.SGD(model.parameters(), lr=0.1), stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scales, moved = [], []
    for step in range(4):
        before = parameters(model)
        loss = loss_of(model, step, rank)
        if step == 1 and rank == world - 1:
            loss = loss * float("inf")  # one rank overflows
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(before[n], p) for n, p in parameters(model).items()))
    return {"scales": scales, "moved": moved, "skipped": zeroshard.stats(model).skipped_steps}


def test_one_rank_s_overflow_skips_the_step_of_all(ranks: RankPools) -> None:
    for stage in (1, 2, 3):
        for got in ranks(2).run(scaled, stage):
            assert got == {"scales": [8.0, 4.0, 4.0, 4.0], "moved": [True, False, True, True], "skipped": 1}, stage


def late_group(rank: int, item: int) -> str:
    model = build()
    extra = nn.Parameter(torch.ones(3))
    model, optimizer = zeroshard.shard(model, optim.SGD(list(model.parameters())[:4], lr=0.1), stage=item)
    optimizer.add_param_group({"params": list(model.parameters())[4:], "lr": 0.2})
    optimizer.add_param_group({"params": [extra]})
    start = parameters(model)
    (loss_of(model, 0, 0) + extra.sum()).backward()
    optimizer.step()
    end = parameters(model)
    return "" if all(not torch.equal(start[n], end[n]) for n in start) and extra[0] < 1 else "a parameter did not move"


def test_add_param_group(ranks: RankPools) -> None:
    for of_ranks in collect(ranks(2), late_group, [1, 3]):
        assert of_ranks == ["", ""]


def sharded_after_a_step(rank: int, world: int, kind: type[torch.optim.Optimizer]) -> None:
    """State that is one number, beside a 0-dim parameter whose state has the same shape."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(2.0)), "weight": nn.Parameter(torch.randn(3, 5))})
        return model, kind(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (model["weight"].pow(2).sum() * model["scale"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain, plain_optimizer = make()
    model, optimizer = make()
    step(plain, plain_optimizer)
    step(model, optimizer)
    zeroshard.shard(model, optimizer, stage=2)
    for _ in range(2):
        step(plain, plain_optimizer)
        step(model, optimizer)
    assert_equal(zeroshard.full_state_dict(model), dict(plain.state_dict()), atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
def test_numbers_in_the_state_are_not_cut(ranks, kind: type[torch.optim.Optimizer]) -> None:
    ranks(2).run(sharded_after_a_step, kind)
