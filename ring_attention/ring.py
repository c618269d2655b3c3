"""The ring: ONE loop for every layout, mask and kernel, forward and backward.

    post the next transfer -> compute the block in use -> wait -> swap

A rank starts with its own keys and values. In step t it works on those of the rank t places before it, while the ones
of step t + 1 travel, and what travels is just the range of keys that somebody needs. In the backward pass the keys
come the same way, and their gradients go straight back to the rank that owns them, which adds them up in fp32.

Heads know nothing of each other, so a few of them go round the ring at a time: a *portion*. Blocks are that much smaller.

B batch, Hq/Hkv heads, S local queries, K local keys, D/Dv head dims of queries and values.
Memory: outputs, gradients, and of one portion the block in use, the block arriving, and in backward the gradients of
the one and those on their way home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ring_attention import comm, lse
from ring_attention.comm import Carrier, Ring
from ring_attention.kernels import BlockKernel
from ring_attention.plan import Block, Plan, Step
from ring_attention.sums import Place, Portioned, Sum, by_rows, major, merge


@dataclass(frozen=True)
class Rounds:
    """Everything the loop needs besides tensors.

    team: who carries messages between the ranks of the ring, None for a ring of one.
    ahead: how many transfers are posted before they are needed; all of them for "gather".
    table: mask of a `mask_mod`, booleans [B or 1, H or 1, S, whole key length], or None.
    heads: how many key/value heads go round at a time; None is all of them.
    """

    team: Carrier | None
    plan: Plan
    kernel: BlockKernel
    ahead: int = 1
    table: Tensor | None = None
    heads: int | None = None


def forward(rounds: Rounds, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, K, D], v [B, Hkv, K, Dv] -> out [B, Hq, S, Dv], lse [B, Hq, S], both wide."""
    q, k, v = by_rows(q, k, v)
    portions = _portions(rounds, q, k)
    asking = [portion.queries for portion in portions]
    out = Portioned((*q.shape[:3], v.shape[-1]), q, asking, major=major(q))
    norm = Portioned(q.shape[:3], q, asking, empty=-torch.inf)
    for portion, out_sum, norm_sum in zip(portions, out.sums, norm.sums, strict=True):
        mine, theirs = q[:, portion.queries], (k[:, portion.keys], v[:, portion.keys])
        for step, keys, values in _steps(rounds, *theirs):
            for call in calls(rounds, step, mine, portion.queries):
                (query,), (key, value) = call.cut((mine,), (keys, values))
                part, part_norm = rounds.kernel.forward(query, key, value, call.block, call.table)
                merge(out_sum, norm_sum, call.queries, part, part_norm)
                del part
            del keys, values  # before the next block is received
    return out.value(), norm.value()


def backward(
    rounds: Rounds, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Wide dq, dk, dv; `out` and `norm` are those of `forward`, merged over all keys.

    `needs`: whether keys and values want a gradient; those that do not stay 0 and nothing travels for them.
    """
    dout, q, k, v, out = by_rows(dout, q, k, v, out)
    portions, norm = _portions(rounds, q, k), lse.finite(norm)
    dq = Portioned(q.shape, q, [portion.queries for portion in portions], major=major(q))
    dk, dv = (Portioned(x.shape, x, [portion.keys for portion in portions], major=major(x)) for x in (k, v))
    home = Homeward(rounds.team, needs)
    for portion, asked, *own in zip(portions, dq.sums, dk.sums, dv.sums, strict=True):
        mine = tuple(x[:, portion.queries] for x in (dout, q, out, norm))
        for step, keys, values in _steps(rounds, k[:, portion.keys], v[:, portion.keys]):
            found = own if step.distance == 0 else [Sum.like(x) for x in (keys, values)]
            for call in calls(rounds, step, mine[1], portion.queries):
                (douts, query, outs, norms), (key, value) = call.cut(mine, (keys, values))
                grads = rounds.kernel.backward(douts, query, key, value, outs, norms, call.block, call.table)
                asked.add(call.queries, grads[0])
                for total, grad in zip(found, grads[1:], strict=True):
                    total.add(call.keys, grad)
                del key, value, grads
            del keys, values
            if step.distance:
                home.send(step, found, own)
            del found
    home.arrive()
    return dq.value(), dk.value(), dv.value()


class Homeward:
    """Gradients of other ranks' keys on their way home, one step behind the computation."""

    def __init__(self, team: Carrier | None, needs: tuple[bool, bool]) -> None:
        self._wanted = [side for side in (0, 1) if needs[side]]
        self._ring = Ring(team, comm.GRADIENTS)
        self._due: list[tuple[Step, list[Sum]]] = []

    def send(self, step: Step, found: list[Sum], own: list[Sum]) -> None:
        """Sends what this rank found for the step's source; what the step's target found for this rank is added to `own`
        when it has arrived."""
        self.arrive()
        if not self._wanted:
            return
        outgoing, incoming = [], []
        for side in self._wanted:
            mine = own[side].shape
            if step.receives:
                outgoing.append((found[side].value().transpose(1, 2).contiguous(), step.source))
            if step.sends:
                shape = (mine[0], step.sent[1] - step.sent[0], mine[1], mine[3])
                incoming.append((torch.empty(shape, dtype=own[side].dtype, device=own[side].device), step.target))
        self._ring.post(outgoing, incoming)
        self._due.append((step, own))

    def arrive(self) -> None:
        """Waits for what is due and adds it to the own gradients."""
        while self._due:
            (step, own), arrived = self._due.pop(0), self._ring.wait()
            for side, part in zip(self._wanted, arrived, strict=False):
                own[side].add(Place(slice(None), *step.sent), part.transpose(1, 2))


# ------------------------------------------------------------------------------------------------ portions, steps, calls
@dataclass(frozen=True)
class Portion:
    """Heads that go round together: key/value heads, and the query heads that read them."""

    queries: slice
    keys: slice


def _portions(rounds: Rounds, q: Tensor, k: Tensor) -> list[Portion]:
    held = k.shape[1]
    groups, heads = q.shape[1] // max(held, 1), rounds.heads or max(held, 1)
    starts = range(0, max(held, 1), heads)
    ends = [min(start + heads, held) for start in starts]
    return [Portion(slice(a * groups, b * groups), slice(a, b)) for a, b in zip(starts, ends, strict=True)]


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
        if comm.EVENTS.handlers:
            comm.EVENTS.debug("%s %s", "begin", f"ring step {step.distance}")
        yield step, keys, values
        if comm.EVENTS.handlers:
            comm.EVENTS.debug("%s %s", "end", f"ring step {step.distance}")
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
    def queries(self) -> Place:
        block = self.block
        return Place(block.rows, block.q0, block.q1, block.count, block.stride)

    @property
    def keys(self) -> Place:
        block = self.block
        return Place(block.rows, block.k0 - self.origin, block.k1 - self.origin, block.count, block.stride)

    def cut(self, by_query: tuple[Tensor, ...], by_key: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors' parts in this block, with zeros for padding in dense blocks: 0 times NaN would be NaN."""
        return (
            [_blanked(self.queries.of(x), self.query_padding) for x in by_query],
            [_blanked(self.keys.of(x), self.key_padding) for x in by_key],
        )


def calls(rounds: Rounds, step: Step, q: Tensor, heads: slice) -> Iterator[KernelCall]:
    """The kernel's calls of one step, for local queries `q` [B, Hq, S, D] that are the `heads` of all."""
    if not q.numel():
        return
    plan, origin = rounds.plan, step.keys[0] if step.distance else 0
    for whole in step.blocks:
        for block in rounds.kernel.cut(whole):
            if not block.dense:
                rows = range(q.shape[0])[block.rows] if block.count > 1 else ()
                alone = [replace(block, rows=slice(row, row + 1)) for row in rows]  # several places, so one row at a time
                yield from (KernelCall(one, origin) for one in alone or [block])
                continue
            i = torch.from_numpy(plan.layout.held(plan.rank)[block.q0 : block.q1])
            j = torch.from_numpy(plan.key_layout.held(step.source)[block.k0 : block.k1])
            table = _rows(plan.mask.allows(i, j), block)[:, None]
            if rounds.table is not None:
                mod = rounds.table if rounds.table.shape[1] == 1 else rounds.table[:, heads]
                table = table & _rows(mod[:, :, block.q0 : block.q1], block)[..., j]
            padding = plan.mask.padding
            parts = (None, None) if padding is None else [_rows(padding, block)[:, at].to(q.device) for at in (i, j)]
            yield KernelCall(block, origin, table.to(q.device), *parts)


def _rows(x: Tensor, block: Block) -> Tensor:
    return x if len(x) == 1 else x[block.rows]


def _blanked(x: Tensor, padding: Tensor | None) -> Tensor:
    if padding is None:
        return x
    return x.masked_fill(padding[:, None, :, None] if x.dim() == 4 else padding[:, None, :], 0)
