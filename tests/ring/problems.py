"""Attention problems for the tests: global inputs made from a seed, the dense answer in fp64, and the ring's answer.

B batch, Hq/Hkv heads, S query length, Sk key length, D/Dv head dims. Everything is global unless it says local.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ring_attention as ra
from ring_attention.layouts import Layout


@dataclass(frozen=True)
class Problem:
    """Everything that decides the answer, plain enough to be printed by hypothesis and sent to ranks."""

    S: int = 12
    Sk: int | None = None
    B: int = 1
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (8, 8)
    mask: dict[str, Any] = field(default_factory=lambda: {"causal": True})
    layout: str = "ZigZag"
    key_layout: str | None = None
    strategy: str = "ring"
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    memory: str = ""  # which of q, k, v, dout, by first letters, have their columns together in memory, not their rows
    seed: int = 0

    @property
    def key_len(self) -> int:
        return self.S if self.Sk is None else self.Sk

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        (hq, hkv), (d, dv) = self.heads, self.dims
        shapes = {
            "q": (self.B, hq, self.S, d),
            "k": (self.B, hkv, self.key_len, d),
            "v": (self.B, hkv, self.key_len, dv),
            "dout": (self.B, hq, self.S, dv),
            "sinks": (hq,),
        }
        return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(self.dtype) for n, s in shapes.items()}

    def mask_of(self) -> ra.Mask:
        return ra.Mask(**{name: torch.tensor(x) if name in ("documents", "prefix") else x for name, x in self.mask.items()})

    def layouts(self, world: int) -> tuple[Layout, Layout]:
        made = [
            ra.Balanced(self.mask_of(), length, world) if name == "Balanced" else getattr(ra, name)(length, world)
            for name, length in ((self.layout, self.S), (self.key_layout or self.layout, self.key_len))
        ]
        return made[0], made[1]

    def visible(self) -> Tensor:
        """Who sees whom, from the words of the contract: [B, H or 1, S, Sk]."""
        i, j = torch.arange(self.S)[:, None], torch.arange(self.key_len)[None, :]
        allow = torch.ones(self.S, self.key_len, dtype=torch.bool)
        if self.mask.get("causal"):
            allow &= j <= i
        if self.mask.get("window"):
            left, right = self.mask["window"]
            allow &= (True if left is None else i - left <= j) & (torch.tensor(True) if right is None else j <= i + right)
        allow = allow.expand(self.B, 1, *allow.shape).clone()
        if self.mask.get("prefix") is not None:
            allow |= j < torch.tensor(self.mask["prefix"]).view(-1, 1, 1, 1)
        if self.mask.get("documents") is not None:
            ids = torch.tensor(self.mask["documents"]).expand(self.B, self.S)
            allow &= ((ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None])[:, None]
        if self.mask.get("mask_mod") is not None:
            b, h = torch.arange(self.B)[:, None, None, None], torch.arange(self.heads[0])[None, :, None, None]
            allow = allow & self.mask["mask_mod"](b, h, i, j)
        return allow

    def dense(self) -> dict[str, Tensor]:
        """Plain attention over whole sequences in fp64: out and the gradient of every input."""
        x = {n: t.double().requires_grad_(n != "dout") for n, t in self.tensors().items()}
        groups, allow = self.heads[0] // self.heads[1], self.visible()
        k, v = x["k"].repeat_interleave(groups, 1), x["v"].repeat_interleave(groups, 1)
        scores = x["q"] @ k.transpose(-1, -2) * (self.dims[0] ** -0.5 if self.scale is None else self.scale)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        weights = torch.where(allow, scores, -torch.inf)
        top = weights.detach().amax(-1, keepdim=True) if self.key_len else torch.zeros(1)
        sink = x["sinks"].view(1, -1, 1, 1)
        top = torch.maximum(top, sink.detach()) if self.sinks else top.clamp(min=-1e30)
        weights = (weights - top).exp()
        total = weights.sum(-1, keepdim=True) + ((sink - top).exp() if self.sinks else 0.0)
        alone = ~allow.any(-1, keepdim=True)
        out = (weights / total.masked_fill(alone, 1.0)).masked_fill(alone, 0.0) @ v
        out.backward(x["dout"])
        found = {"out": out.detach(), **{f"d{n}": x[n].grad for n in ("q", "k", "v", "sinks")}}
        return {n: torch.zeros_like(x[n[1:]]) if g is None else g for n, g in found.items()}

    def ring(self, group: Any = None, needs: str = "qkvs", **changes: Any) -> dict[str, Tensor | None]:
        """This rank's part through `ring_attention`; `changes` replace arguments of the call."""
        group = dist.group.WORLD if group is None else group
        rank, world = place(group)
        layout, key_layout = self.layouts(world)
        x = self.tensors()
        local = {n: layout.shard(x[n], rank, 2) for n in ("q", "dout")}
        local |= {n: key_layout.shard(x[n], rank, 2) for n in ("k", "v")} | {"sinks": x["sinks"]}
        for name in [name for name in ("q", "k", "v", "dout") if name[0] in self.memory]:
            local[name] = local[name].transpose(2, 3).contiguous().transpose(2, 3)
        for name in ("q", "k", "v", "sinks"):
            local[name].requires_grad_(name[0] in needs and (name != "sinks" or self.sinks))
        call = {
            "group": group, "layout": layout, "mask": self.mask_of(), "scale": self.scale, "softcap": self.softcap,
            "sinks": local["sinks"] if self.sinks else None, "strategy": self.strategy,
            "key_layout": key_layout if self.Sk is not None or self.key_layout else None,
        }  # fmt: skip
        out = ra.ring_attention(local["q"], local["k"], local["v"], **(call | changes))
        out.backward(local["dout"].to(out.dtype))
        return {"out": out.detach(), **{f"d{n}": local[n].grad for n in ("q", "k", "v", "sinks")}}

    def whole(self, parts: list[dict[str, Tensor | None]]) -> dict[str, Tensor]:
        """All ranks' answers put together; gradients of sinks are parts of a sum."""
        layout, key_layout = self.layouts(len(parts))
        found = {n: layout.unshard([p[n] for p in parts], 2) for n in ("out", "dq")}
        found |= {n: key_layout.unshard([p[n] for p in parts], 2) for n in ("dk", "dv")}
        if self.sinks:
            found["dsinks"] = sum(p["dsinks"].double() for p in parts)
        return found

    def with_(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)


def place(group: Any) -> tuple[int, int]:
    """(rank, size), row-major in a mesh."""
    if isinstance(group, dist.ProcessGroup):
        return dist.get_rank(group), dist.get_world_size(group)
    members = group.mesh.flatten().tolist()
    return members.index(dist.get_rank()), len(members)


def check(problem: Problem, parts: list[dict[str, Tensor | None]], tolerance: float | None = None) -> None:
    """out, dq, dk, dv, dsinks one by one, to `tolerance` of the largest value of each."""
    __tracebackhide__ = True
    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: 2e-5}[problem.dtype]
    want, got = problem.dense(), problem.whole(parts)
    for name, x in got.items():
        assert x.shape == want[name].shape, name
        if x.numel():
            error = (x.double() - want[name]).abs().max() / want[name].abs().max().clamp(min=0.1)
            assert error <= tolerance, f"{name} is off by {error:.1e} ({problem})"
