"""What the tests of checkpoints share: pairs of model and optimizer, and a checkpoint's whole content by other means."""

from __future__ import annotations

import copy
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zeroshard
from tests.models import CASES, adamw, sgd, trainable


class Codes(torch.optim.Optimizer):
    """Momentum in uint8 codes with one scale per 4 elements: two states, neither shaped like the parameter; and a count."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                grad = nn.functional.pad(p.grad.flatten(), (0, -p.numel() % 4)).view(-1, 4)
                if "codes" in state:
                    grad = grad + 0.9 * (state["codes"].float() - 127) / 127 * state["scale"]
                state["count"] = state.get("count", 0) + 1
                state["scale"] = grad.abs().amax(1, keepdim=True).clamp_min(1e-12)
                state["codes"] = (grad / state["scale"] * 127 + 127).round().to(torch.uint8)
                p.sub_(grad.flatten()[: p.numel()].view_as(p), alpha=group["lr"])


def two_kinds(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in trainable(model) if p.dim() == 2]
    others = [p for p in trainable(model) if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: adamw(trainable(model)),
    "sgd": lambda model: sgd(trainable(model)),
    "nadam": lambda model: torch.optim.NAdam(trainable(model)),
    "asgd": lambda model: torch.optim.ASGD(trainable(model), lr=0.01),
    "amsgrad": lambda model: torch.optim.Adam(trainable(model), lr=0.01, amsgrad=True),
    "adafactor": lambda model: torch.optim.Adafactor(trainable(model)),
    "codes": lambda model: Codes(trainable(model)),
    "list": two_kinds,
}


def pair(
    case: str, optimizer: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, Any]:
    """A sharded model with its optimizer."""
    model = CASES[case].build(seed, dtype)
    return zeroshard.shard(model, OPTIMIZERS[optimizer](model), **options)


def steps(model: nn.Module, optimizer: Any, case: str, which: range, rank: int, dtype: torch.dtype = torch.float32) -> None:
    for step in which:
        CASES[case].loss(model, CASES[case].batch(step, rank, dtype=dtype)).backward()
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
            each.zero_grad()


def content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything in a checkpoint, read by torch's own tool."""
    target = pathlib.Path(f"{path}.pt")
    dcp_to_torch_save(path, target)
    return torch.load(target, weights_only=False)


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Without what may differ between two checkpoints of the same values: which rank's extra, lists of names."""
    state = copy.copy(state)
    state.pop("zeroshard", None)
    groups = state.get("optim", {}).get("param_groups", [])
    options = [{k: v for k, v in group.items() if isinstance(v, (int, float)) or k == "betas"} for group in groups]
    return {**state, "optim": {"state": state.get("optim", {}).get("state", {}), "options": options}}


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def files_in(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    return sorted(file for file in pathlib.Path(path).rglob("*") if file.is_file())
