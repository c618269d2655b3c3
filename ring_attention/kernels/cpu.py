"""The kernel on CPUs: torch's own fused attention, called on pieces that need no mask.

The fused operation knows full blocks and causal ones whose diagonal starts in the corner, and takes a mask for the
rest. It works on 512 keys at a time, so that a short causal block costs as much as a full one. So a band is halved until
its parts are full or small; a window is cut into stretches of queries, each with just the keys it sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention.plan import Block, banded, trimmed

SMALL_PAIRS = 1 << 16  # up to this many pairs are one call, whatever the mask
UNIT = 128  # sizes that are multiples of this run fastest
NATIVE = 2048  # from here on the operation's own causal form is as good
STRETCH = 128  # queries of a window that share a mask: fewer make the operation slow, more compute what nobody sees
WIDE = 1024  # a window of this many keys takes twice as long stretches
STRAIGHT = 1  # a window wider than this part of its queries is halved like any other band


class CpuKernel:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        self._backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def cut(self, block: Block) -> Iterable[Block]:
        return (block,) if block.dense else _cut(trimmed(block, (0, block.queries), (0, block.keys)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, table: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, width = *_one_width(q, k, v), v.shape[-1]
        out, lse = self._forward(q, k, v, 0.0, _causal(block), attn_mask=_bias(block, table, q.dtype), scale=self.scale)
        if table is not None:
            lse = lse.masked_fill(~table.any(-1), -torch.inf)  # the operation gives 0 for a row without keys
        return out[..., :width], lse

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
        dim, width = q.shape[-1], v.shape[-1]
        q, k, v = _one_width(q, k, v)
        if v.shape[-1] > width:
            dout, out = (F.pad(x, (0, v.shape[-1] - width)) for x in (dout, out))
        dq, dk, dv = self._backward(
            dout, q, k, v, out, lse, 0.0, _causal(block), attn_mask=_bias(block, table, q.dtype), scale=self.scale
        )
        return dq[..., :dim], dk[..., :dim], dv[..., :width]


def _one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Head dims made equal with zeros, which add nothing to any product; the scale is always given."""
    dim, width = q.shape[-1], v.shape[-1]
    if dim < width:
        return F.pad(q, (0, width - dim)), F.pad(k, (0, width - dim)), v
    return q, k, (v if dim == width else F.pad(v, (0, dim - width)))


def _causal(block: Block) -> bool:
    return block.low == 0 and block.high is None and not block.dense


def _bias(block: Block, table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as the operation wants it: added to the scores, in the query's dtype."""
    if table is not None:
        return torch.zeros(table.shape, dtype=dtype).masked_fill_(~table, -torch.inf)
    if (block.low is None and block.high is None) or _causal(block):
        return None
    return _band_bias(block.queries, block.keys, block.low, block.high, dtype)


@lru_cache(maxsize=32)
def _band_bias(queries: int, keys: int, low: int | None, high: int | None, dtype: torch.dtype) -> Tensor:
    """Kept, because the stretches of a window have the same one, and so have those of all documents."""
    inside = banded(Block(slice(None), 0, queries, 0, keys, low, high))
    return torch.zeros(inside.shape, dtype=dtype).masked_fill_(~inside, -torch.inf)


def _cut(block: Block) -> Iterator[Block]:
    """A band as blocks that are full, natively causal, or so small that a mask costs little."""
    L, K, low, high = block.queries, block.keys, block.low, block.high
    if L * K <= SMALL_PAIRS or (low is None and high is None) or (_causal(block) and K >= NATIVE):
        yield block
    elif low is not None and high is not None and high - low < STRAIGHT * L:
        rows = STRETCH if high - low + 1 < WIDE else 2 * STRETCH
        for start in range(0, L, rows):
            yield trimmed(block, (start, min(start + rows, L)), (0, K))
    elif L >= K:
        middle = _half(L)
        for queries in ((0, middle), (middle, L)):
            yield from _cut(trimmed(block, queries, (0, K)))
    else:
        middle = _half(K)
        for keys in ((0, middle), (middle, K)):
            yield from _cut(trimmed(block, (0, L), keys))


def _half(length: int) -> int:
    """About half, a multiple of what the operation works on at a time."""
    return -(-length // 2 // UNIT) * UNIT if length > UNIT else -(-length // 2)
