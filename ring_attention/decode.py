"""Decoding: queries that all ranks hold alike, over keys of which each rank holds a part.

Each rank attends over its own keys. The partial results, not the keys, travel: all of them to every rank, which merges
them in rank order by their log-sum-exp (lse.py), so that all ranks have the same bits. Exact, no gradients.

B batch, Hq/Hkv heads, L queries, K keys of this rank, D/Dv head dims of queries and values, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_attention import comm, kernels, lse, setting
from ring_attention.comm import Call, Team
from ring_attention.inside import Sharding
from ring_attention.kernels import Scores
from ring_attention.masks import Mask, Window
from ring_attention.plan import Block
from ring_attention.sums import by_rows

Triple = tuple[Tensor, Tensor, Tensor]


def decode(
    teams: Sequence[Team], query: Tensor, key: Tensor, value: Tensor,
    scale: float | None = None, sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """All queries see all keys of all ranks; checked against what the other ranks were asked for. [B, Hq, L, Dv]"""
    problem = setting.input_problem(query, key, value, sinks, softcap)
    if problem is None and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        problem = "decoding has no gradient: call it under torch.no_grad()"
    told = {
        "call": "decode", "query": f"{query.dtype} {list(query.shape)}", "key/value heads": str(list(key.shape[1:2])),
        "value head dim": str(list(value.shape[3:])), "scale": str(scale), "softcap": str(softcap),
        "sinks": str(sinks is not None),
    }  # fmt: skip
    comm.agree(teams, Call(told, (key.shape[2] if key.dim() == 4 else 0,), problem))
    return attend(teams, query, key, value, None, scale, sinks, softcap)


def attend(
    teams: Sequence[Team], query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None,
    scale: float | None, sinks: Tensor | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """query [B, Hq, L, D], the same on all ranks, key [B, Hkv, K, D], value [B, Hkv, K, Dv] -> [B, Hq, L, Dv].

    visible: which of this rank's keys each query sees, booleans [B or 1, L, K]; None is all of them.
    """
    out, norm = partial(query, key, value, visible, Scores(query.shape[-1] ** -0.5 if scale is None else scale, softcap))
    parts = comm.gather(teams, torch.cat([out, norm[..., None]], -1)[None], [1] * comm.total(teams))  # [W, B, Hq, L, Dv + 1]
    out, norm = torch.zeros_like(out), torch.full_like(norm, -torch.inf)
    for part in parts:
        lse.merge_(out, norm, part[..., :-1], part[..., -1])
    if sinks is not None:
        lse.add_sinks_(out, norm, sinks)
    return out.to(query.dtype)


def partial(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention over this rank's keys alone: out [B, Hq, L, Dv], lse [B, Hq, L], both wide."""
    wide = lse.wide(query.dtype)
    query, key, value = by_rows(query, key, value)
    if key.shape[2] == 0:
        shape = *query.shape[:3], value.shape[-1]
        return query.new_zeros(shape, dtype=wide), query.new_full(shape[:3], -torch.inf, dtype=wide)
    kernel = kernels.choose(query.device, query.dtype, scores, max(query.shape[-1], value.shape[-1]))
    block = Block(slice(None), 0, query.shape[2], 0, key.shape[2], dense=visible is not None)
    out, norm = kernel.forward(query, key, value, block, None if visible is None else visible[:, None])
    return out.to(wide), norm


class Cached(Sharding):
    """One forward over new tokens, the same on all ranks, whose keys before them are spread over the ranks.

    Args:
        positions: global positions of the keys that this rank holds, new ones included, ascending. int64 [K]
        first: global position of the first new token; `num_new` of them follow each other.
        padding: which positions of the whole sequence are padding, booleans [B, first + num_new], or None.
    """

    def __init__(
        self, before: Sharding, positions: Tensor, first: int, num_new: int, padding: Tensor | None
    ) -> None:  # fmt: skip
        super().__init__(before.groups, before.layout, before.strategy, seq_len=first + num_new)
        self.positions, self.padding = positions, padding
        self.queries = torch.arange(first, first + num_new)
        self._seen: dict[tuple[bool, Window | None, int | None, int], tuple[slice, Tensor | None]] = {}

    def over_cache(
        self, inputs: Triple, rule: tuple[bool, Window | None, int | None],
        scale: float | None, sinks: Tensor | None, softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """Attention of a layer whose keys are the last ones of `positions`. rule: causal, window, chunk size."""
        query, key, value = inputs
        if torch.is_grad_enabled() and query.requires_grad:
            self.refuse("a forward with a sharded key/value cache has no gradient: run it under torch.no_grad()")
        wanted = (*rule, key.shape[2])
        if wanted not in self._seen:
            self._seen[wanted] = self._visible(*wanted)
        keys, visible = self._seen[wanted]
        if visible is not None:
            visible = visible.to(key.device)
        return attend(self.teams, query, key[:, :, keys], value[:, :, keys], visible, scale, sinks, softcap)

    def _visible(self, causal: bool, window: Window | None, chunk: int | None, num_keys: int) -> tuple[slice, Tensor | None]:
        """Which keys are of use, and a table over them where a query does not see them all."""
        i, j, mask = self.queries, self.positions[len(self.positions) - num_keys :], Mask(causal, window)
        low, high = mask.limits(i.numpy(), j.numpy())
        keys = slice(int(low.min()), int(high.max()))
        if len(i) == 1 and self.padding is None and chunk is None:
            return keys, None
        j = j[keys]
        table = mask.allows(i, j)
        start = torch.zeros(1, 1, dtype=torch.int64)
        if self.padding is not None:
            table = table & ~self.padding[:, None, j]
            start = (~self.padding).int().argmax(1)[:, None]  # the first token of each row
        if chunk is not None:
            table = table & (((i - start) // chunk)[:, :, None] == ((j - start) // chunk)[:, None])
        return keys, table
