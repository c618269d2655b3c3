"""Calls of torch's that a plain model allows at any moment: each gives what one process gives, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.harness import RankPools, assert_equal
from tests.zero.runs import collect, parameters
from zeroshard import DivergenceError, Precision, ShardError

WIDTH, ROWS, STEPS = 7, 4, 3
Refused = (ShardError, DivergenceError)


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Shrunk(nn.Linear):
    """Through an alias that counts versions up with the weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.detach().mul_(0.9)
        return super().forward(x)


class Replaced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.detach() * 0.9
        return super().forward(x)


class Hidden(nn.Linear):
    """Through `.data`, which counts nothing up."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class Shared(nn.Module):
    """One block under three names, first outside of the containers that hold it too."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(WIDTH, WIDTH)
        self.first, self.row, self.named = block, nn.Sequential(block, Clamped(WIDTH, WIDTH)), nn.ModuleDict({"same": block})

    def forward(self, x: Tensor) -> Tensor:
        return self.named["same"](self.row(torch.tanh(self.first(x))))


def around(kind: type[nn.Linear]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


Loss = Callable[[nn.Module, Tensor], Tensor]


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def mapped(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(model)(x.view(-1, 2, WIDTH)).square().mean()


def slopes(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vjp(model, x)[1](torch.ones_like(x))[0].square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "clamped": (functools.partial(around, Clamped), plain_loss),
    "shrunk": (functools.partial(around, Shrunk), plain_loss),
    "replaced": (functools.partial(around, Replaced), plain_loss),
    "hidden": (functools.partial(around, Hidden), plain_loss),
    "shared": (Shared, plain_loss),
    "mapped": (functools.partial(around, nn.Linear), mapped),
    "slopes": (functools.partial(around, nn.Linear), slopes),
}
REFUSED = {("hidden", 3): "1.weight", ("slopes", 3): "torch.func"}


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = make().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(rank: int, item: tuple[str, int]) -> Any:
    name, stage = item
    make, loss = CASES[name]
    model, optimizer = zeroshard.shard(*build(make), stage=stage)
    try:
        for step in range(STEPS):
            loss(model, rows(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except ShardError as error:
        return str(error)
    return parameters(model)


def alone(name: str, world: int) -> dict[str, Tensor]:
    make, loss = CASES[name]
    model, optimizer = build(make)
    for step in range(STEPS):
        loss(model, torch.cat([rows(step, rank) for rank in range(world)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_forward_does_to_its_weights(ranks: RankPools, world: int) -> None:
    items = [(name, stage) for name in CASES for stage in (0, 1, 2, 3)]
    for item, of_ranks in zip(items, collect(ranks(world), trained, items), strict=True):
        for got in of_ranks:
            if item in REFUSED:
                assert isinstance(got, str) and REFUSED[item] in got, (item, got)
            else:
                assert not isinstance(got, str), (item, got)
                assert_equal(got, alone(item[0], world), rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------ refused by name


def to_float_and_back(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model.float().double()
    plain_loss(model, rows(0, rank)).backward()
    optimizer.step()


def own_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(plain_loss(model, rows(0, rank)), params), strict=True):
        param.grad = grad
    optimizer.step()


def step_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    others = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    for param in others:
        param.register_post_accumulate_grad_hook(lambda p: others[p].step() and None)
    plain_loss(model, rows(0, rank)).backward()


def another_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_loss(model, rows(0, rank)).backward()
    other.step()


UNUSUAL = {
    to_float_and_back: "before zeroshard.shard",
    own_gradients: "average it over the ranks",
    step_in_backward: "not given this optimizer",
    another_optimizer: "not given this optimizer",
}


def refusal(rank: int, item: tuple[Callable[..., None], int]) -> str:
    call, stage = item
    model, optimizer = zeroshard.shard(*build(functools.partial(around, nn.Linear)), stage=stage)
    with pytest.raises(Refused) as error:
        call(model, optimizer, rank)
    return str(error.value)


def test_what_would_leave_ranks_with_numbers_of_their_own_is_refused(ranks: RankPools) -> None:
    items = [(call, stage) for call in UNUSUAL for stage in (1, 2, 3)]
    for (call, stage), of_ranks in zip(items, collect(ranks(2), refusal, items), strict=True):
        for said in of_ranks:
            assert UNUSUAL[call] in said and ("weight" in said or "bias" in said), (call, stage, said)


def low(rank: int, world: int) -> list[str]:
    said = []
    for stage in (1, 3):
        model = around(Clamped)
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision=Precision(torch.bfloat16))
        with pytest.raises(ShardError) as error:
            model(rows(0, rank).float())
        said.append(str(error.value))
    with pytest.raises(ShardError) as error:
        zeroshard.shard(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), stage=1)
    return [*said, str(error.value)]


def test_writes_into_a_copy_and_rows_that_a_forward_rewrites_are_refused(ranks: RankPools) -> None:
    for *of_stages, table in ranks(2).run(low):
        assert all("1.weight" in said and "bfloat16" in said for said in of_stages)
        assert "0 has max_norm=1.0" in table
