"""The kernel for any mask and for softcaps on NVIDIA GPUs: flex attention, which skips blocks that nobody sees.

Flex attention answers for a block what it knows of it, out_b and lse_b. Gradients of the merged result follow from its
own backward, given the right cotangents. With w = exp(lse_b - lse), the part of the row's weight that is in the block:

    cotangent of out_b = w dout        cotangent of lse_b = w (<dout, out_b> - <dout, out>)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from ring_attention.plan import Block

Flex = Callable[..., tuple[Tensor, Any]]


class FlexKernel:
    """`flex` stands in for the compiled operation where there is no GPU."""

    def __init__(self, scale: float, softcap: float | None = None, flex: Flex | None = None) -> None:
        self.scale, self.softcap = scale, softcap
        self._flex = flex

    def cut(self, block: Block) -> Iterable[Block]:
        return (block,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, table: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = self._attend(q, k, v, block, table)
        if table is not None:
            alone = ~table.any(-1)
            out, lse = out.masked_fill(alone[..., None], 0.0), lse.masked_fill(alone, -torch.inf)
        return out, lse

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
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out_b, lse_b = self._attend(leaves[0], leaves[1], leaves[2], block, table)
        weight = torch.exp(lse_b.detach() - lse)  # [B, H, L]
        if table is not None:
            weight = weight.masked_fill(~table.any(-1), 0.0)
        wide = dout.to(lse.dtype)
        beyond = (wide * (out_b.detach().to(lse.dtype) - out.to(lse.dtype))).sum(-1)
        given = [(wide * weight[..., None]).to(out_b.dtype), (weight * beyond).to(lse_b.dtype)]
        dq, dk, dv = torch.autograd.grad([out_b, lse_b], leaves, given)
        return dq, dk, dv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, table: Tensor | None) -> tuple[Tensor, Tensor]:
        visible, batch, heads = _visible(block, table, q.device)
        mask = None
        if visible is not None:
            mask = create_block_mask(visible, batch, heads, q.shape[2], k.shape[2], device=q.device)
        out, aux = (self._flex or _compiled())(
            q, k, v, score_mod=_capped(self.softcap), block_mask=mask, scale=self.scale, enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse


@lru_cache(maxsize=1)
def _compiled() -> Flex:
    """Without the compiler the operation would hold all scores."""
    return torch.compile(flex_attention)


@lru_cache(maxsize=8)
def _capped(softcap: float | None) -> Callable[..., Tensor] | None:
    """Kept, since another function would be compiled again."""
    if softcap is None:
        return None
    return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)


def _visible(block: Block, table: Tensor | None, device: torch.device) -> tuple[Callable[..., Tensor] | None, int, int]:
    """Who sees whom in a block, by index, and for how many rows of the batch and how many heads that differs."""
    if table is not None:
        several = [int(size > 1) for size in table.shape[:2]]
        return lambda b, h, i, j: table[b * several[0], h * several[1], i, j], table.shape[0], table.shape[1]
    if block.low is None and block.high is None:
        return None, 1, 1
    # tensors, because numbers would be compiled into the function
    low = torch.tensor(-block.keys if block.low is None else block.low, device=device)
    high = torch.tensor(block.queries if block.high is None else block.high, device=device)
    return lambda b, h, i, j: (i - j >= low) & (i - j <= high), 1, 1
