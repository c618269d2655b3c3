"""The ring: ONE loop for every layout, mask and kernel, forward and backward.

    post the next transfer -> compute the block in use -> wait -> swap

A rank starts with its own keys and values. In step t it works on those of the rank t places before it, while the ones
of step t + 1 travel, and what travels is just the range of keys that somebody needs. In the backward pass the keys
come the same way, and their gradients go straight back to the rank that owns them, which adds them up in fp32.

B batch, Hq/Hkv heads, S local queries, K local keys, D/Dv head dims of queries and values.
Memory: outputs, gradients, the block in use, the block arriving (and in backward its gradients on their way home).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ring_attention import comm, lse
from ring_attention.comm import Ring, Team
from ring_attention.kernels import BlockKernel
from ring_attention.plan import Block, Plan, Step

Index = tuple[slice, slice, slice]


@dataclass(frozen=True)
class Rounds:
    """Everything the loop needs besides tensors.

    team: the ranks of the ring, None for a ring of one.
    ahead: how many transfers are posted before they are needed; all of them for "gather".
    table: mask of a `mask_mod`, booleans [B or 1, H or 1, S, whole key length], or None.
    """

    team: Team | None
    plan: Plan
    kernel: BlockKernel
    ahead: int = 1
    table: Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def major(x: Tensor) -> str:
    """Which of heads and tokens is the outer dim of a tensor [B, H, S, D] in memory; models make "seq"."""
    return "seq" if x.stride(1) < x.stride(2) else "head"


def new_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, major: str) -> Tensor:
    """[B, H, S, ...] with the given order in memory."""
    if major == "head":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty((shape[0], shape[2], shape[1], *shape[3:]), dtype=dtype, device=device).transpose(1, 2)


def laid_out(x: Tensor, major: str) -> Tensor:
    """`x` [B, H, S, ...] in the given order in memory, itself if it has that already."""
    return x.contiguous() if major == "head" else x.transpose(1, 2).contiguous().transpose(1, 2)


def forward(rounds: Rounds, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, K, D], v [B, Hkv, K, Dv] -> out [B, Hq, S, Dv], lse [B, Hq, S], both wide."""
    total = Merged(q, v.shape[-1])
    for step, keys, values in _steps(rounds, k, v):
        for call in calls(rounds, step, q):
            (query,), (key, value) = call.cut((q,), (keys, values))
            total.add(call.queries, *rounds.kernel.forward(query, key, value, call.block, call.table))
        del keys, values  # before the next block is received
    return total.out.value(), total.norm.value()


def backward(
    rounds: Rounds, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Wide dq, dk, dv; `out` and `norm` are those of `forward`, merged over all keys.

    `needs`: whether keys and values want a gradient; those that do not stay 0 and nothing travels for them.
    """
    dq = Sum(q.shape, wide(q.dtype), q.device)
    own = Sum(k.shape, wide(k.dtype), k.device), Sum(v.shape, wide(v.dtype), v.device)
    home, norm = Homeward(rounds.team, own, needs), lse.finite(norm)
    for step, keys, values in _steps(rounds, k, v):
        at_home = step.distance == 0
        theirs = own if at_home else tuple(Sum(x.shape, wide(x.dtype), x.device) for x in (keys, values))
        for call in calls(rounds, step, q):
            (douts, query, outs, norms), (key, value) = call.cut((dout, q, out, norm), (keys, values))
            grads = rounds.kernel.backward(douts, query, key, value, outs, norms, call.block, call.table)
            dq.add(call.queries, grads[0])
            for total, grad in zip(theirs, grads[1:], strict=True):
                total.add(call.keys(0 if at_home else step.keys[0]), grad)
        del keys, values
        if not at_home:
            home.send(step, theirs)
    home.arrive()
    return dq.value(), own[0].value(), own[1].value()


class Sum:
    """A wide sum of parts [B, H, S, ...]. Where a part is the first it is written, not added, and a first part that
    covers everything becomes the sum itself: no zeros are written to be read again."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, empty: float = 0.0, major: str = "seq"
    ) -> None:
        self.shape, self.dtype, self.device, self.empty, self.major = tuple(shape), dtype, device, empty, major
        self._sum: Tensor | None = None
        self._written = np.zeros((shape[0], shape[2]), dtype=bool)  # [B, S]

    def take(self, at: Index, part: Tensor) -> bool:
        """Writes a part where nothing has been written; False if it has to be added to what is there."""
        rows, _, tokens = at
        written = self._written[rows, tokens]
        if self._sum is None and tuple(part.shape) == self.shape:
            self._sum = part.to(self.dtype)
        elif not written.any():
            self._storage()[at] = part
        else:
            self._blank(at)
            return False
        written[...] = True
        return True

    def add(self, at: Index, part: Tensor) -> None:
        if not self.take(at, part):
            self._storage()[at] += part

    def at(self, index: Index) -> Tensor:
        return self._storage()[index]

    def value(self) -> Tensor:
        self._blank((slice(None), slice(None), slice(None)))
        return self._storage()

    def _storage(self) -> Tensor:
        if self._sum is None:
            self._sum = new_empty(self.shape, self.dtype, self.device, self.major)
        return self._sum

    def _blank(self, at: Index) -> None:
        """Puts `empty` where nothing has been written."""
        rows, _, tokens = at
        written = self._written[rows, tokens]
        if not written.all():
            hole = torch.from_numpy(~written).to(self.device)[:, None]
            target = self._storage()[at]
            target.masked_fill_(hole[..., None] if target.dim() == 4 else hole, self.empty)
            written[...] = True


class Merged:
    """Outputs and their log-sum-exp, merged block by block."""

    def __init__(self, query: Tensor, width: int) -> None:
        shape, dtype, device = query.shape[:3], wide(query.dtype), query.device
        self.out = Sum((*shape, width), dtype, device, major=major(query))
        self.norm = Sum(shape, dtype, device, -torch.inf)

    def add(self, at: Index, out: Tensor, norm: Tensor) -> None:
        first = self.out.take(at, out), self.norm.take(at, norm)
        if not all(first):
            lse.merge_(self.out.at(at), self.norm.at(at), out, norm)


class Homeward:
    """Gradients of other ranks' keys on their way home, one step behind the computation."""

    def __init__(self, team: Team | None, own: tuple[Sum, Sum], needs: tuple[bool, bool]) -> None:
        self._wanted = [side for side in (0, 1) if needs[side]]
        self._own = own
        self._ring = Ring(team, comm.GRADIENTS)
        self._due: list[Step] = []

    def send(self, step: Step, theirs: tuple[Sum, ...]) -> None:
        """Sends what this rank found for the step's source; receives what the step's target found for this rank."""
        self.arrive()
        if not self._wanted:
            return
        outgoing, incoming = [], []
        for side in self._wanted:
            mine = self._own[side]
            if step.receives:
                outgoing.append((theirs[side].value().transpose(1, 2).contiguous(), step.source))
            if step.sends:
                shape = (mine.shape[0], step.sent[1] - step.sent[0], mine.shape[1], mine.shape[3])
                incoming.append((torch.empty(shape, dtype=mine.dtype, device=mine.device), step.target))
        self._ring.post(outgoing, incoming)
        self._due.append(step)

    def arrive(self) -> None:
        """Waits for what is due and adds it to the own gradients."""
        while self._due:
            step, arrived = self._due.pop(), self._ring.wait()
            for side, part in zip(self._wanted, arrived, strict=False):
                self._own[side].add((slice(None), slice(None), slice(*step.sent)), part.transpose(1, 2))


# ------------------------------------------------------------------------------------------------ steps and calls
def _steps(rounds: Rounds, k: Tensor, v: Tensor) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """Each step with the keys and values to work on, `step.keys` of its source; the next ones travel meanwhile."""
    steps, ring, posted = rounds.plan.steps, Ring(rounds.team, comm.KEYS), 0
    for index, step in enumerate(steps):
        keys, values = k, v
        if step.distance:
            while posted <= index:
                _post(ring, steps[posted], k, v)
                posted += 1
            arrived = ring.wait()
            keys, values = arrived if step.receives else (k[:, :, :0], v[:, :, :0])
            del arrived
        while posted <= min(index + rounds.ahead, len(steps) - 1):
            _post(ring, steps[posted], k, v)
            posted += 1
        yield step, keys, values
        del keys, values


def _post(ring: Ring, step: Step, k: Tensor, v: Tensor) -> None:
    if not step.distance:
        return
    sends, receives = [], []
    for x in (k, v):
        if step.sends:
            sends.append((x[:, :, slice(*step.sent)].contiguous(), step.target))
        if step.receives:
            shape = (*x.shape[:2], step.keys[1] - step.keys[0], x.shape[3])
            receives.append((x.new_empty(shape), step.source))
    ring.post(sends, receives)


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel: a block it takes, its mask if dense, and where padding stands that must not be read."""

    block: Block
    origin: int  # index of the first key that is held
    table: Tensor | None = None
    query_padding: Tensor | None = None
    key_padding: Tensor | None = None

    @property
    def queries(self) -> Index:
        return (self.block.rows, slice(None), slice(self.block.q0, self.block.q1))

    def keys(self, origin: int) -> Index:
        return (self.block.rows, slice(None), slice(self.block.k0 - origin, self.block.k1 - origin))

    def cut(self, by_query: tuple[Tensor, ...], by_key: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors' parts in this block, with zeros for padding in dense blocks: 0 times NaN would be NaN."""
        return (
            [_blanked(x[self.queries], self.query_padding) for x in by_query],
            [_blanked(x[self.keys(self.origin)], self.key_padding) for x in by_key],
        )


def calls(rounds: Rounds, step: Step, q: Tensor) -> Iterator[KernelCall]:
    """The kernel's calls of one step, for local queries `q` [B, Hq, S, D]."""
    if not q.numel():
        return
    plan, origin = rounds.plan, step.keys[0] if step.distance else 0
    for whole in step.blocks:
        for block in rounds.kernel.cut(whole):
            if not block.dense:
                yield KernelCall(block, origin)
                continue
            i = torch.from_numpy(plan.layout.held(plan.rank)[block.q0 : block.q1])
            j = torch.from_numpy(plan.key_layout.held(step.source)[block.k0 : block.k1])
            table = _rows(plan.mask.allows(i, j), block)[:, None]
            if rounds.table is not None:
                table = table & _rows(rounds.table[:, :, block.q0 : block.q1], block)[..., j]
            padding = plan.mask.padding
            parts = (None, None) if padding is None else [_rows(padding, block)[:, at].to(q.device) for at in (i, j)]
            yield KernelCall(block, origin, table.to(q.device), *parts)


def _rows(x: Tensor, block: Block) -> Tensor:
    return x if len(x) == 1 else x[block.rows]


def _blanked(x: Tensor, padding: Tensor | None) -> Tensor:
    if padding is None:
        return x
    return x.masked_fill(padding[:, None, :, None] if x.dim() == 4 else padding[:, None, :], 0)
