"""The kernel on CPUs: torch's own fused attention, called on pieces that need no mask.

The fused operation knows full blocks and causal ones whose diagonal starts in the corner, and takes a mask for the
rest. It works on 512 keys at a time, so that a short causal block costs as much as a full one. So a band is cut into
rectangles that are full, and triangles, which are cut again:

    triangle of 4 s     one rectangle of 2 s x 2 s, two of s x s, and four small triangles of s that need a mask

Pieces of one size that follow each other along the diagonal are one call: the operation takes them as a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention.plan import Block, banded, trimmed

SMALL_PAIRS = 1 << 16  # up to this many pairs are one call, whatever the mask
BASE = 128  # small triangles have this many queries, or up to twice as many
ALIGN = 16  # sizes that are multiples of this run fastest
NATIVE = 2048  # from here on the operation's own causal form is as good
STRETCH = 128  # queries of a narrow window that share a mask: fewer make the operation slow, more compute what nobody sees
NARROW = 256  # a window of up to this many keys is cut into stretches
TOGETHER = 2048  # queries of the pieces that are one call: what it answers takes memory


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
    return block.low == 0 and block.high is None and not block.dense and block.keys >= NATIVE


def _bias(block: Block, table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as the operation wants it: added to the scores, in the query's dtype."""
    if table is not None:
        return torch.zeros(table.shape, dtype=dtype).masked_fill_(~table, -torch.inf)
    if (block.low is None and block.high is None) or _causal(block):
        return None
    return _band_bias(block.queries, block.keys, block.low, block.high, dtype)


@lru_cache(maxsize=16)
def _band_bias(queries: int, keys: int, low: int | None, high: int | None, dtype: torch.dtype) -> Tensor:
    """Kept, because pieces of one size have the same one."""
    inside = banded(Block(slice(None), 0, queries, 0, keys, low, high))
    return torch.zeros(inside.shape, dtype=dtype).masked_fill_(~inside, -torch.inf)


# ------------------------------------------------------------------------------------------------ cutting bands
@dataclass(frozen=True)
class Piece:
    """Queries q0:q1 x keys k0:k1 and the band in them, `count` times, each `stride` further along the diagonal."""

    q0: int
    q1: int
    k0: int
    k1: int
    count: int = 1
    stride: int = 0
    low: int | None = None
    high: int | None = None

    def within(self, block: Block) -> Block:
        return Block(
            block.rows, block.q0 + self.q0, block.q0 + self.q1, block.k0 + self.k0, block.k0 + self.k1,
            self.low, self.high, count=self.count, stride=self.stride,
        )  # fmt: skip

    def mirrored(self, L: int, K: int) -> Piece:
        """Seen from the other end of L queries and K keys: what was the lower end of a band is the upper one."""
        on = (self.count - 1) * self.stride
        q0, q1, k0, k1 = L - self.q1 - on, L - self.q0 - on, K - self.k1 - on, K - self.k0 - on
        high = None if self.low is None else (q1 - q0) - (k1 - k0) - self.low
        return Piece(q0, q1, k0, k1, self.count, self.stride, high=high)


def _cut(block: Block) -> Iterator[Block]:
    """A band as blocks that are full, natively causal, or so small that a mask costs little."""
    L, K, low, high = block.queries, block.keys, block.low, block.high
    if L * K <= SMALL_PAIRS or (low is None and high is None):
        yield block
    elif low is not None and high is not None:
        yield from _window(block, low, high)
    elif low is not None:
        for piece in _slope(L, K, -low, NATIVE):
            yield piece.within(block)
    elif high is not None:
        for piece in _slope(L, K, high - L + K, L + K):
            yield piece.mirrored(L, K).within(block)


def _slope(L: int, K: int, ahead: int, native: int) -> Iterator[Piece]:
    """Query m sees the keys up to m + ahead."""
    size = min(L, K - ahead)
    if ahead:
        yield Piece(0, L, 0, ahead)
    if size < L:
        yield Piece(size, L, ahead, K)
    if size >= native:
        yield Piece(0, size, ahead, ahead + size, low=0)
    else:
        yield from _triangles(0, ahead, size, 1)


def _triangles(q0: int, k0: int, size: int, count: int) -> Iterator[Piece]:
    """`count` triangles one after the other along the diagonal; query m of each sees the keys up to m."""
    base, halvings = size, 0
    while size * size > SMALL_PAIRS and base >= 2 * BASE:
        base, halvings = base // 2, halvings + 1
    if halvings:
        base -= base % ALIGN
    whole = base << halvings
    assert whole == size or count == 1, "triangles that leave something when halved do not follow each other"
    if whole < size:
        yield Piece(q0 + whole, q0 + size, k0, k0 + size, low=-whole)
    number = count << halvings
    yield from _spread(Piece(q0, q0 + base, k0, k0 + base, number, base, low=0))
    while number > count:
        yield from _spread(Piece(q0 + base, q0 + 2 * base, k0, k0 + base, number // 2, 2 * base))
        base, number = 2 * base, number // 2


def _spread(piece: Piece) -> Iterator[Piece]:
    """As many at a time as there is memory for."""
    most = max(1, TOGETHER // (piece.q1 - piece.q0))
    for first in range(0, piece.count, most):
        on, count = first * piece.stride, min(most, piece.count - first)
        yield replace(piece, q0=piece.q0 + on, q1=piece.q1 + on, k0=piece.k0 + on, k1=piece.k1 + on, count=count)


def _window(block: Block, low: int, high: int) -> Iterator[Block]:
    """Query m sees the keys m - high to m - low: first up to where it leaves the first key behind, then the window in
    full, then from where it has reached the last key on."""
    L, K = block.queries, block.keys
    leaves, reaches = min(L, max(0, high)), min(L, max(0, K + low))
    first, then = sorted((leaves, reaches))
    if (first, then) == (0, L) and leaves == 0:
        yield from _parallelogram(block, 1 - low)
        return
    for start, stop in ((0, first), (first, then), (then, L)):
        if stop > start:
            yield from _cut(trimmed(block, (start, stop), (0, K)))


def _parallelogram(block: Block, width: int) -> Iterator[Block]:
    """Query m sees the keys m to m + width - 1."""
    L, K, last = block.queries, block.keys, width - 1
    if last <= NARROW:
        yield from _stretches(block)
        return
    size = min(L, BASE)
    while 2 * size <= min(last, L):
        size *= 2
    count = L // size
    for piece in _triangles(0, last, size, count):
        yield piece.within(block)
    for piece in _triangles(0, 0, size, count):
        yield piece.mirrored(count * size, count * size).within(block)
    if last > size:
        for piece in _spread(Piece(0, size, size, last, count, size)):
            yield piece.within(block)
    if count * size < L:
        yield from _cut(trimmed(block, (count * size, L), (0, K)))


def _stretches(block: Block) -> Iterator[Block]:
    """Stretches of queries with all the keys that they see. Those that share no keys are one call."""
    L, last = block.queries, block.keys - block.queries
    number, apart = L // STRETCH, 1 + -(-last // STRETCH)
    for first in range(min(number, apart)):
        part = trimmed(block, (first * STRETCH, (first + 1) * STRETCH), (0, block.keys))
        count = len(range(first, number, apart))
        for piece in _spread(Piece(0, STRETCH, 0, part.keys, count, apart * STRETCH, part.low, part.high)):
            yield piece.within(part)
    if L % STRETCH:
        yield trimmed(block, (number * STRETCH, L), (0, block.keys))
