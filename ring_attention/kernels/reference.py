"""The kernel in plain tensor operations: every mask, softcap, device and dtype. The others are held to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ring_attention.lse import wide
from ring_attention.plan import Block, banded, part

SCORE_PAIRS = 1 << 18  # scores per head held at a time


class ReferenceKernel:
    def __init__(self, scale: float, softcap: float | None = None) -> None:
        self.scale, self.softcap = scale, softcap

    def cut(self, block: Block) -> Iterable[Block]:
        """Query stretches short enough to hold their scores."""
        rows = max(1, SCORE_PAIRS // block.keys)
        for start in range(0, block.queries, rows):
            yield part(block, (start, min(start + rows, block.queries)), (0, block.keys))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, table: Tensor | None) -> tuple[Tensor, Tensor]:
        scores, _ = self._scores(q, k, block, table)
        lse = torch.logsumexp(scores, -1)  # [B, Hkv, G, L]
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        out = weights @ v.to(scores.dtype)[:, :, None]
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        table: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, slope = self._scores(q, k, block, table)
        dtype, heads = scores.dtype, (k.shape[1], -1)
        dout, out, grouped = (x.to(dtype).unflatten(1, heads) for x in (dout, out, q))
        weights = torch.exp(scores - lse.unflatten(1, heads)[..., None])
        dv = (weights.transpose(-1, -2) @ dout).sum(2)
        dweights = dout @ v.to(dtype)[:, :, None].transpose(-1, -2)
        dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True)) * self.scale
        if slope is not None:
            dscores = dscores * slope
        dq = dscores @ k.to(dtype)[:, :, None]
        dk = (dscores.transpose(-1, -2) @ grouped).sum(2)
        return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, block: Block, table: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Masked scores [B, Hkv, G, L, K] and the derivative of the softcap."""
        dtype = wide(q.dtype)
        grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))
        scores = grouped @ k.to(dtype)[:, :, None].transpose(-1, -2) * self.scale
        slope = None
        if self.softcap is not None:
            capped = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, 1 - capped.square()
        if table is not None:
            table = table.expand(-1, q.shape[1], -1, -1).unflatten(1, (k.shape[1], -1))
            scores = scores.masked_fill(~table.to(scores.device), -torch.inf)
        elif block.low is not None or block.high is not None:
            scores = scores.masked_fill(~banded(block).to(scores.device), -torch.inf)
        return scores, slope
