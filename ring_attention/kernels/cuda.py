"""The kernel on NVIDIA GPUs: flash attention with its window, which takes any band in one call; flex attention for the
masks that come as a table."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ring_attention.kernels.flex import FlexKernel
from ring_attention.plan import Block

MAX_HEAD_DIM = 256


class CudaKernel:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._dense = FlexKernel(scale)
        self._forward = torch.ops.aten._flash_attention_forward
        self._backward = torch.ops.aten._flash_attention_backward

    @staticmethod
    def takes(dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in (torch.float16, torch.bfloat16) and head_dim <= MAX_HEAD_DIM

    def cut(self, block: Block) -> Iterable[Block]:
        return self._dense.cut(block) if block.dense else (block,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, table: Tensor | None) -> tuple[Tensor, Tensor]:
        if table is not None:
            return self._dense.forward(q, k, v, block, table)
        dim, width = q.shape[-1], v.shape[-1]
        q, k, v = (_seq_major(x, max(dim, width)) for x in (q, k, v))
        out, lse, *_ = self._forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=self.scale, **_window(block)
        )
        return out.transpose(1, 2)[..., :width], lse

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
        if table is not None:
            return self._dense.backward(dout, q, k, v, out, lse, block, table)
        dim, width = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = (_seq_major(x, max(dim, width)) for x in (dout, q, k, v, out))
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = self._backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, False,
            no_dropout, no_dropout[:0], scale=self.scale, **_window(block),
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq[..., :dim], dk[..., :dim], dv[..., :width]


def _seq_major(x: Tensor, width: int) -> Tensor:
    """[B, H, S, D] -> [B, S, H, width], filled up with zeros and a multiple of 8 wide, as the operation wants it."""
    width = -(-width // 8) * 8
    return torch.nn.functional.pad(x.transpose(1, 2), (0, width - x.shape[-1])).contiguous()


def _window(block: Block) -> dict[str, int | None]:
    """The band as a window. The operation lines up the last query with the last key, a block the first ones."""
    shift = block.keys - block.queries
    return {
        "window_size_left": -1 if block.high is None else block.high + shift,
        "window_size_right": -1 if block.low is None else -block.low - shift,
    }
