"""Models and loops drawn by hypothesis, and the plain loop they are compared with.

    Part     one thing a model is made of; the awkward ones of practice are among them
    Action   one line of a training loop
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models import Block

WIDTH = 5

PARTS = (
    "linear",
    "block",
    "list of blocks",
    "norm",
    "frozen",
    "bias only frozen",
    "tied to the first",
    "scale",  # a 0-dim parameter
    "nothing",  # an empty parameter
    "again",  # the part before, a second time
    "unused",
    "sometimes",  # used in every other step
    "functional",  # its weight is read, its forward never called
    "method",  # a module used through another method than forward
    "half",  # a bf16 parameter in an fp32 model
)


class Functional(nn.Linear):
    def apply_to(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(x), self.weight * 0.5, self.bias)


class Model(nn.Module):
    """`parts` in a row, in groups of their own where `nested`; residual, so that no order of them kills the signal."""

    def __init__(self, parts: tuple[str, ...], nested: bool):
        super().__init__()
        self.kinds = parts
        made = [self._made(kind) for kind in parts]
        if nested:
            self.groups = nn.ModuleList(nn.ModuleList(made[i : i + 2]) for i in range(0, len(made), 2))
        else:
            self.groups = nn.ModuleList(made)
        self.nested = nested
        self.head = nn.Linear(WIDTH, 2)
        first = next((m for m in made if isinstance(m, nn.Linear)), self.head)
        for kind, module in zip(parts, made, strict=True):
            if kind == "tied to the first" and first.weight.shape == module.weight.shape:
                module.weight = first.weight

    @staticmethod
    def _made(kind: str) -> nn.Module:
        if kind in ("block", "list of blocks"):
            return Block(WIDTH, 6) if kind == "block" else nn.Sequential(Block(WIDTH, 3), Block(WIDTH, 3))
        if kind == "norm":
            return nn.LayerNorm(WIDTH)
        if kind in ("scale", "nothing", "half"):
            holder = nn.Module()
            value = {"scale": torch.tensor(0.7), "nothing": torch.zeros(0, 3), "half": torch.full((WIDTH,), 0.5).bfloat16()}
            holder.register_parameter("value", nn.Parameter(value[kind]))
            return holder
        if kind == "again":
            return nn.Identity()
        linear = Functional(WIDTH, WIDTH)
        if kind == "frozen":
            linear.requires_grad_(False)
        if kind == "bias only frozen":
            linear.bias.requires_grad_(False)
        return linear

    def members(self) -> list[nn.Module]:
        return [m for group in self.groups for m in group] if self.nested else list(self.groups)

    def forward(self, x: Tensor, step: int) -> Tensor:  # [B, WIDTH] -> [B, 2]
        before: nn.Module = nn.Identity()
        for kind, module in zip(self.kinds, self.members(), strict=True):
            if kind == "unused" or (kind == "sometimes" and step % 2):
                continue
            if kind == "again":
                x = x + before(x)
            elif kind == "scale":
                x = x * module.value
            elif kind == "nothing":
                x = x + module.value.sum()
            elif kind == "half":
                x = x + module.value.to(x.dtype)
            elif kind == "functional":
                x = x + F.linear(x, module.weight)
            elif kind == "method":
                x = x + module.apply_to(x)
            else:
                x = x + module(x)
                before = module
        return self.head(torch.tanh(x))


ACTIONS = (
    "backward",
    "backward in no_sync",
    "two losses",
    "one graph twice",
    "eval",
    "scale the gradients",
    "clip values",
    "step",
    "step",
    "zero",
    "zero the model",
    "zero in place",
)


@dataclasses.dataclass(frozen=True)
class Drawn:
    parts: tuple[str, ...]
    nested: bool
    actions: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Inside no_sync sums are made in another order."""
        return "backward in no_sync" not in self.actions

    def model(self) -> Model:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(self.parts))
            model = Model(self.parts, self.nested)
        return model if self.exact else model.double()

    def data(self, step: int, rank: int) -> Tensor:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        return x if self.exact else x.double()


drawn = st.builds(
    Drawn,
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map(tuple),
    st.booleans(),
    st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=9).map(lambda actions: ("backward", *actions, "step")),
)


def losses(model: nn.Module, x: Tensor, step: int, action: str) -> list[Tensor]:
    out = model(x, step)
    first = out.pow(2).mean()
    if action == "two losses":
        return [first, model(x * 0.5, step).abs().mean()]
    return [first, out.abs().mean()] if action == "one graph twice" else [first]


def edit(model: nn.Module, optimizer: torch.optim.Optimizer, action: str) -> None:
    """What a loop does between backwards; the same on sharded and plain models."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if action == "scale the gradients":
        for grad in grads:
            grad.mul_(0.5)
    elif action == "clip values":
        if grads:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
    elif action == "step":
        optimizer.step()
    elif action == "zero":
        optimizer.zero_grad()
    elif action == "zero the model":
        model.zero_grad()
    elif action == "zero in place":
        optimizer.zero_grad(set_to_none=False)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_run(problem: Drawn, world: int) -> dict[str, Any]:
    """One process: fresh gradients of each rank, averaged in rank order, added to what is there."""
    model = problem.model()
    optimizer = make_optimizer(model)
    evals = []
    for number, action in enumerate(problem.actions):
        if action == "eval":
            evals.append(_evaluated(model, problem, number))
        elif action in ("step", "zero", "zero the model", "zero in place", "scale the gradients", "clip values"):
            edit(model, optimizer, action)
        else:
            kept = [p.grad for p in model.parameters()]
            count = len(losses(copy.deepcopy(model), problem.data(number, 0), number, action))
            rounds = 1 if action != "one graph twice" else count
            for index in range(rounds):
                _averaged_backward(model, problem, number, action, world, index if rounds > 1 else None, kept)
                kept = [p.grad for p in model.parameters()]
    return _result(model, evals)


def _averaged_backward(
    model: nn.Module, problem: Drawn, number: int, action: str, world: int, only: int | None, kept: list[Any]
) -> None:
    parts = []
    for rank in range(world):
        for p in model.parameters():
            p.grad = None
        terms = losses(model, problem.data(number, rank), number, action)
        (sum(terms) if only is None else terms[only]).backward()
        parts.append([p.grad for p in model.parameters()])
    for p, before, *grads in zip(model.parameters(), kept, *parts, strict=True):
        present = [grad for grad in grads if grad is not None]
        if not present:
            p.grad = before
            continue
        total = present[0].clone().float() if present[0].dtype == torch.bfloat16 else present[0].clone()
        for grad in present[1:]:
            total += grad
        total = (total / world).to(p.dtype)
        p.grad = total if before is None else before + total


def _evaluated(model: nn.Module, problem: Drawn, number: int) -> Tensor:
    model.eval()
    with torch.no_grad():
        out = model(problem.data(number, 0), number)
    model.train()
    return out


def _result(model: nn.Module, evals: list[Tensor]) -> dict[str, Any]:
    return {"evals": evals, "parameters": {n: p.detach().clone() for n, p in model.named_parameters()}}
