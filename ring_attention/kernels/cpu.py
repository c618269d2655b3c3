"""The kernel on CPUs: torch's own fused attention, called on pieces that need no mask.

The fused operation knows full blocks and causal ones whose diagonal starts in the corner. Every band is cut into those
two and the causal one turned around (queries and keys in reverse order), so nothing is computed that nobody sees. Only
small pieces and dense blocks carry a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention.plan import Block, banded, part

SMALL_PAIRS = 1 << 14  # up to this many pairs one call with a mask beats several without
NARROW = 192  # a band of fewer keys goes through in stretches with a mask


class CpuKernel:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        self._backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def cut(self, block: Block) -> Iterable[Block]:
        if block.dense or block.queries * block.keys <= SMALL_PAIRS:
            return (block,)
        return _cut(part(block, (0, block.queries), (0, block.keys)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, table: Tensor | None) -> tuple[Tensor, Tensor]:
        if _turned(block):
            q, k, v = (x.flip(2) for x in (q, k, v))
            out, lse = self.forward(q, k, v, _straight(block), None)
            return out.flip(2), lse.flip(2)
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
        if _turned(block):
            dout, q, k, v, out, lse = (x.flip(2) for x in (dout, q, k, v, out, lse))
            grads = self.backward(dout, q, k, v, out, lse, _straight(block), None)
            return grads[0].flip(2), grads[1].flip(2), grads[2].flip(2)
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


def _turned(block: Block) -> bool:
    return block.high == 0 and block.low is None and block.queries == block.keys and not block.dense


def _straight(block: Block) -> Block:
    """The block with queries and keys in reverse order."""
    return Block(block.rows, block.q0, block.q1, block.k0, block.k1, low=0)


def _bias(block: Block, table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as the operation wants it: added to the scores, in the query's dtype."""
    if table is not None:
        return torch.zeros(table.shape, dtype=dtype).masked_fill_(~table, -torch.inf)
    if (block.low is None and block.high is None) or _causal(block):
        return None
    return _band_bias(block.queries, block.keys, block.low, block.high, dtype)


@lru_cache(maxsize=32)
def _band_bias(queries: int, keys: int, low: int | None, high: int | None, dtype: torch.dtype) -> Tensor:
    """Kept, because all inner stretches of a window have the same one."""
    inside = banded(Block(slice(None), 0, queries, 0, keys, low, high))
    return torch.zeros(inside.shape, dtype=dtype).masked_fill_(~inside, -torch.inf)


def _cut(block: Block) -> Iterator[Block]:
    """A band as full blocks, causal ones and causal ones turned around."""
    L, K, low, high = block.queries, block.keys, block.low, block.high
    if low is None and high is None:
        yield block
    elif high is None:
        # keys that all queries see, then the diagonal from the corner
        assert low is not None
        yield from _whole(block, (0, L), (0, -low))
        yield part(block, (0, L), (-low, K))
    elif low is None:
        # the diagonal ends in the lower corner of a square; what is above and right of it is full
        yield from _whole(block, (0, high), (0, L - high))
        yield part(block, (high, L), (0, min(K, L - high)))
        yield from _whole(block, (0, L), (L - high, K))
    else:
        width = high - low + 1
        rows = width if width >= NARROW else NARROW
        for start in range(0, L, rows):
            yield from _window(block, start, min(start + rows, L))


def _whole(block: Block, queries: tuple[int, int], keys: tuple[int, int]) -> Iterator[Block]:
    if queries[1] > queries[0] and keys[1] > keys[0]:
        yield part(block, queries, keys)


def _window(block: Block, start: int, stop: int) -> Iterator[Block]:
    """A stretch of a two-sided band: left of the first query's last key only `high` binds, right of it only `low`."""
    low, high = block.low, block.high
    assert low is not None and high is not None
    first, last = max(0, start - high), min(block.keys, stop - low)
    middle = min(max(start - low, first), last)
    if high - low + 1 < NARROW:
        yield part(block, (start, stop), (first, last))
        return
    for keys in ((first, middle), (middle, last)):
        if keys[1] > keys[0]:
            yield from _cut(_trimmed(part(block, (start, stop), keys)))


def _trimmed(block: Block) -> Block:
    """Without the queries at either end that see nothing."""
    first = 0 if block.low is None else max(0, block.low)
    last = block.queries if block.high is None else min(block.queries, block.keys + block.high)
    return part(block, (first, last), (0, block.keys))
