"""One call of the op: what this rank was asked for (`Asked`), and, once all ranks agree, how it is done (`Setting`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ring_attention import comm, kernels, layouts, masks, plan, strategies
from ring_attention.comm import Call, Team
from ring_attention.errors import UsageError
from ring_attention.kernels import Scores
from ring_attention.layouts import Layout
from ring_attention.masks import Mask
from ring_attention.plan import MaskTensors
from ring_attention.ring import Rounds
from ring_attention.strategies import Choice, Sizes
from ring_attention.ulysses import HeadExchange, Split

log = logging.getLogger(__name__)

Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Request:
    """What goes into the op as text, a line a field."""

    groups: str
    layout: str
    key_layout: str
    mask: str
    strategy: str
    mask_mod: str

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Request:
        return Request(*text.split("\n"))


def request_text(
    *, groups: str, layout: str, key_layout: str, mask: str, strategy: str, mask_mod: str = masks.mod_name(None)
) -> str:
    """What `Request.parse` reads. A plain function, since `torch.compile` traces it."""
    return "\n".join((groups, layout, key_layout, mask, strategy, mask_mod))


@dataclass
class Asked:
    """What this rank was asked for, checked against itself."""

    request: Request
    tensors: MaskTensors
    table: Tensor | None
    sizes: Sizes
    scores: Scores
    teams: list[Team]
    described: dict[str, str]
    problem: str | None
    lengths: tuple[int, int, int]  # of queries and keys, and how many heads the kernel computes at a time
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(
        cls, inputs: Triple, sinks: Tensor | None, tensors: MaskTensors, table: Tensor | None,
        text: str, scale: float | None, softcap: float | None,
    ) -> Asked:  # fmt: skip
        request, (query, key, value) = Request.parse(text), inputs
        teams = [Team(name) for name in request.groups.split("|")]
        problem = input_problem(query, key, value, sinks, softcap) or _request_problem(request, tensors, teams, query)
        if problem is None and table is not None and request.strategy in ("ulysses", "hybrid"):
            problem = f"strategy {request.strategy!r} cannot carry a mask_mod; use 'ring', 'gather' or 'auto'"
        sizes = Sizes.of(query, key, value)
        described = {
            "shape (batch, heads, key/value heads, head dims)": str(
                [sizes.batch, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.value_dim]
            ),
            "dtype": str(query.dtype),
            "device": query.device.type,
            **_described_layout("layout", request.layout),
            **_described_layout("key_layout", request.key_layout),
            "mask": request.mask,
            "mask.documents": tensors.key[0],
            "mask.prefix": tensors.key[1],
            "mask.mask_mod": request.mask_mod,
            "strategy": request.strategy,
            "scale": str(scale),
            "softcap": str(softcap),
            "sinks": str(sinks is not None),
        }
        scores = Scores(max(sizes.head_dim, 1) ** -0.5 if scale is None else scale, softcap)
        together = torch.get_num_threads() if query.device.type == "cpu" else 1
        lengths = strategies.dim(query, 2), strategies.dim(key, 2), together
        return cls(request, tensors, table, sizes, scores, teams, described, problem, lengths, query.device, query.dtype)

    def call(self, name: str) -> Call:
        return Call({"call": name, **self.described}, self.lengths, self.problem)

    def settle(self, told: list[tuple[int, ...]]) -> Setting:
        """The same on all ranks, since all know what all were told: what raises here raises everywhere."""
        layout = _resolved("query", self.request.layout, [lengths[0] for lengths in told])
        key_layout = _resolved("key", self.request.key_layout, [lengths[1] for lengths in told])
        mask = masks.parse(self.request.mask, self.tensors.documents, self.tensors.prefix)
        _check_documents(mask, layout, key_layout)
        choice = self._choice(layout)
        ring, heads = (None, None) if len(self.teams) == 1 else (self.teams[0], self.teams[1])
        if len(self.teams) == 1:
            ring, heads = (None, self.teams[0]) if choice.strategy == "ulysses" else (self.teams[0], None)
        return Setting(self, layout, key_layout, ring, heads, choice, max(lengths[2] for lengths in told))

    def _choice(self, layout: Layout) -> Choice:
        if self.request.strategy != "auto":
            return Choice(self.request.strategy, "asked for")
        if len(self.teams) == 2:
            return Choice("hybrid", "the mesh has two axes")
        if self.table is not None:
            return Choice("ring", "a mask_mod")
        return chosen(self.sizes, layout.spec, self.request.mask, self.tensors, self.device)


@lru_cache(maxsize=64)
def chosen(sizes: Sizes, layout: str, mask: str, tensors: MaskTensors, device: torch.device) -> Choice:
    """`strategies.choose`, kept: it looks at the work of every position."""
    rule = masks.parse(mask, tensors.documents, tensors.prefix)
    choice = strategies.choose(sizes, layouts.parse(layout), rule, device)
    log.debug("strategy %s for %s, %s: %s", choice.strategy, layout.partition(":")[0], rule.summary(), choice.why)
    return choice


@lru_cache(maxsize=64)
def portion(sizes: Sizes, layout: str, mask: str, tensors: MaskTensors, device: torch.device, together: int) -> int:
    """`strategies.portion`, kept."""
    rule = masks.parse(mask, tensors.documents, tensors.prefix)
    return strategies.portion(sizes, layouts.parse(layout), rule, device, together)


class Setting:
    """How one call is done: the rounds of the ring, and the exchange of heads around it where there is one."""

    def __init__(
        self, asked: Asked, layout: Layout, key_layout: Layout, ring: Team | None, heads: Team | None, choice: Choice,
        together: int,
    ) -> None:  # fmt: skip
        self._sizes, self._heads, width = asked.sizes, heads, 1 if heads is None else heads.size
        place = comm.place(asked.teams)
        if heads is not None:
            self._split = Split.of(asked.sizes.heads, asked.sizes.kv_heads, width)
            first = place - heads.rank
            self._queries = HeadExchange(heads, [layout.held(first + rank) for rank in range(width)])
            self._keys = HeadExchange(heads, [key_layout.held(first + rank) for rank in range(width)])
            self._key_index = self._split.key_index(heads.rank)
        ours, theirs = layouts.merged(layout, width), layouts.merged(key_layout, width)
        steps = plan.cached(ours.spec, theirs.spec, asked.request.mask, asked.tensors, place // width, asked.table is not None)
        kernel = kernels.choose(asked.device, asked.dtype, asked.scores, max(asked.sizes.head_dim, asked.sizes.value_dim))
        if ours.world_size == 1 or choice.strategy == "gather":
            self.rounds = Rounds(ring, steps, kernel, ours.world_size, asked.table)
        else:
            at_a_time = portion(asked.sizes, theirs.spec, asked.request.mask, asked.tensors, asked.device, together)
            self.rounds = Rounds(ring, steps, kernel, 1, asked.table, at_a_time)

    def my_heads(self, x: Tensor) -> Tensor:
        """The part of a tensor [Hq] that belongs to the heads computed here."""
        return x if self._heads is None else x[slice(*self._split.queries[self._heads.rank])]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Triple:
        if self._heads is None:
            return query, key, value
        (q,) = self.queries_to_heads(query)
        k, v = (self._keys.to_heads(x, self._split.keys) for x in (key, value))
        if self._key_index is not None:
            k, v = (x.index_select(1, self._key_index.to(x.device)) for x in (k, v))
        return q, k, v

    def queries_to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._heads is None:
            return tensors
        return tuple(self._queries.to_heads(x, self._split.queries) for x in tensors)

    def to_sequence(self, out: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        if self._heads is None:
            return out, norm
        ranges, num = self._split.queries, self._sizes.heads
        return self._queries.to_sequence(out, ranges, num), self._queries.to_sequence(norm, ranges, num)

    def grads_to_sequence(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Triple:
        if self._heads is None:
            return dq, dk, dv
        if self._key_index is not None:
            first, last = self._split.keys[self._heads.rank]
            index = self._key_index.to(dk.device)
            dk, dv = (x.new_zeros((x.shape[0], last - first, *x.shape[2:])).index_add_(1, index, x) for x in (dk, dv))
        dq = self._queries.to_sequence(dq, self._split.queries, self._sizes.heads)
        dk, dv = (self._keys.to_sequence(x, self._split.keys, self._sizes.kv_heads) for x in (dk, dv))
        return dq, dk, dv


# ------------------------------------------------------------------------------------------------ checks
def input_problem(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, softcap: float | None) -> str | None:
    """What is wrong with the tensors of one call, if something is."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        return f"query, key and value must be [B, H, S, D]; shapes are {shapes}"
    if len({query.dtype, key.dtype, value.dtype}) > 1 or not query.dtype.is_floating_point:
        return f"query, key and value must have one floating dtype; got {query.dtype}, {key.dtype} and {value.dtype}"
    if len({query.device, key.device, value.device}) > 1:
        return f"query, key and value are on {query.device}, {key.device} and {value.device}"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return f"batch sizes differ; shapes are {shapes}"
    if key.shape[1] != value.shape[1] or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        return f"the number of key/value heads must divide that of query heads; shapes are {shapes}"
    if key.shape[2] != value.shape[2] or query.shape[3] != key.shape[3]:
        return f"key and value must have one length, query and key one head dim; shapes are {shapes}"
    if sinks is not None and (tuple(sinks.shape) != (query.shape[1],) or not sinks.dtype.is_floating_point):
        return f"sinks must be floating [{query.shape[1]}], one for each query head; got {sinks.dtype} {list(sinks.shape)}"
    if softcap is not None and not softcap > 0:
        return f"softcap must be positive, got {softcap}"
    return None


def _request_problem(request: Request, tensors: MaskTensors, teams: list[Team], query: Tensor) -> str | None:
    size = comm.total(teams)
    for spec in (request.layout, request.key_layout):
        if int(spec.split(":")[2]) != size:
            return f"the layout is for world_size {spec.split(':')[2]}, the group has {size} ranks"
    batch = masks.parse(request.mask, tensors.documents, tensors.prefix).batch
    if batch not in (1, query.shape[0]):
        return f"the mask's documents or prefix are for a batch of {batch}, the query's batch is {query.shape[0]}"
    return strategies.check(request.strategy, len(teams))


def _described_layout(name: str, spec: str) -> dict[str, str]:
    kind, seq_len, _, *spans = spec.split(":")
    return {name: ":".join([kind, *spans]), f"seq_len of {name}": seq_len}


def _resolved(what: str, spec: str, lengths: list[int]) -> Layout:
    layout = layouts.parse(spec, sum(lengths)) if layouts.is_pending(spec) else layouts.parse(spec)
    want = [layout.size(rank) for rank in range(layout.world_size)]
    if lengths != want:
        raise UsageError(
            f"the local {what} lengths of the ranks are {lengths}; the layout, with seq_len {layout.seq_len}, "
            f"gives them {want} positions"
        )
    return layout


def _check_documents(mask: Mask, layout: Layout, key_layout: Layout) -> None:
    if mask.documents is None:
        return
    length = mask.documents.shape[-1]
    if length != layout.seq_len or length != key_layout.seq_len:
        raise UsageError(
            f"documents have length {length}; they are ids of the whole sequence, whose seq_len is {layout.seq_len} "
            f"for queries and {key_layout.seq_len} for keys"
        )
