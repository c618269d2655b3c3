"""Kernels: attention of one block, forward and backward, with the log-sum-exp that lets blocks be merged.

B batch, Hq query heads, Hkv key/value heads (Hkv divides Hq, repeat-interleave order), L queries, K keys of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ring_attention.kernels.cpu import CpuKernel
from ring_attention.kernels.cuda import CudaKernel
from ring_attention.kernels.flex import FlexKernel
from ring_attention.kernels.reference import ReferenceKernel
from ring_attention.plan import Block


class BlockKernel(Protocol):
    def cut(self, block: Block) -> Iterable[Block]:
        """The block as blocks that this kernel computes in one call each."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, table: Tensor | None) -> tuple[Tensor, Tensor]:
        """q [B, Hq, L, D], k [B, Hkv, K, D], v [B, Hkv, K, Dv] -> out [B, Hq, L, Dv], lse [B, Hq, L].

        `table` is the mask of a dense block, booleans that broadcast to [B, Hq, L, K]. lse is a natural logarithm with
        the scale included, fp64 for fp64 and fp32 otherwise, -inf for rows that see no key.
        """

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
        """dq, dk, dv of this block, given `out` and `lse` of the whole row. Rows that see nobody come with lse 0."""


@dataclass(frozen=True)
class Scores:
    """How a score is made: softcap * tanh(scale * <q, k> / softcap), or scale * <q, k> without a softcap."""

    scale: float
    softcap: float | None = None


def choose(device: torch.device, dtype: torch.dtype, scores: Scores, head_dim: int) -> BlockKernel:
    """The fastest kernel that computes these scores on this device."""
    if scores.softcap is None and device.type == "cpu":
        return CpuKernel(scores.scale)
    if device.type == "cuda" and CudaKernel.takes(dtype, head_dim):
        return CudaKernel(scores.scale) if scores.softcap is None else FlexKernel(scores.scale, scores.softcap)
    return ReferenceKernel(scores.scale, scores.softcap)
