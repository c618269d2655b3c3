"""`model.generate` of an attached transformers model inside `with cp:`.

Every rank is given the whole prompt. The first forward runs over this rank's part of it, as in training, and leaves the
keys and values of that part in a `ShardedCache`: 1/W of them on each rank. Later forwards run over the new tokens on all
ranks alike; the keys of the token at position p stay on rank p mod W, and attention merges partial results (decode.py).
Logits are those of one rank everywhere, and random numbers come from rank 0's generator: all ranks choose the same token.

B batch, S length of the prompt, W ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs
from transformers.generation.configuration_utils import GenerationMode

from ring_attention import batch as batches
from ring_attention import comm, masks
from ring_attention.comm import Call, Team
from ring_attention.decode import Cached
from ring_attention.errors import UsageError
from ring_attention.inside import Inside

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "dummy")
UNSUPPORTED = ("output_attentions", "output_hidden_states", "prefill_chunk_size", "cache_implementation", "max_time")
OUTSIDE = "a sharded key/value cache holds this rank's part only: use it in `with cp:`, with generate of the attached model"


class ShardedLayer(DynamicLayer):
    """Keys and values [B, Hkv, K, D] that this rank holds of one layer, ascending by position."""

    is_croppable = False

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window  # how many of the newest positions, of all ranks, a query sees


class ShardedCache(Cache):
    """The key/value cache of a generation inside `with cp:`: each position on exactly one rank.

    seq_len: number of positions of all ranks. positions: those this rank holds, ascending, int64 [K]; a layer with a
    sliding window keeps the last of them.
    """

    def __init__(self, config: Any) -> None:
        kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        unknown = [kind for kind in kinds if kind not in LAYER_TYPES]
        if unknown:
            raise UsageError(f"layers of type {unknown[0]} keep more than keys and values; their cache cannot be sharded")
        super().__init__(layers=[ShardedLayer(option.get("sliding_window")) for option in options])
        self.seq_len = 0
        self.positions = torch.empty(0, dtype=torch.int64)
        self._kept: Tensor | None = None  # during a forward: which of its tokens stay on this rank
        self._arriving = self.positions  # and at which positions
        self._until = 0  # and what `seq_len` is after it
        self._hidden: Tensor | None = None  # and which of those are padding, [B, kept]

    @contextlib.contextmanager
    def receiving(self, kept: Tensor, positions: Tensor, seq_len: int, padding: Tensor | None) -> Iterator[None]:
        """Open during a forward. After one that failed some layers may lack its keys: the cache is of no use then."""
        self._check(self._kept is None, "a forward with this key/value cache failed: begin a new generation")
        self._kept, self._arriving, self._until = kept, positions, seq_len
        self._hidden = None if padding is None else padding[:, positions]
        yield
        self.positions, self.seq_len = torch.cat([self.positions, positions]), seq_len
        self._kept = self._hidden = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keeps this rank's part. Answers with what attention reads: the given ones at first, all kept ones later."""
        self._check(self._kept is not None, OUTSIDE)
        assert self._kept is not None
        layer, kept = cast(ShardedLayer, self.layers[layer_idx]), self._kept.to(key_states.device)
        new = [x.index_select(2, kept) for x in (key_states, value_states)]
        if self._hidden is not None and self._hidden.any():
            new = [x.masked_fill(self._hidden.to(x.device)[:, None, :, None], 0) for x in new]  # NaN times 0 would be NaN
        whole = layer.update(*new)
        if layer.window is not None:
            held = torch.cat([self.positions, self._arriving])
            out_of_sight = int((held[len(held) - whole[0].shape[2] :] <= self._until - layer.window).sum())
            if out_of_sight:
                layer.keys, layer.values = (x[:, :, out_of_sight:].clone() for x in whole)
        return (key_states, value_states) if self.seq_len == 0 else whole

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seq_len

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.seq_len + query_length, 0

    def _check(self, good: bool, problem: str) -> None:
        if not good:
            raise UsageError(problem)


# ------------------------------------------------------------------------------------------------ generate
def generate(model: Any, inside: Inside, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`whole` is the model's own generate; it is given a cache that is sharded."""
    sharding, name = inside.sharding, "cache" if "cache" in kwargs else "past_key_values"
    cache = kwargs.pop(name, None)
    options = {name: x for name, x in kwargs.items() if name != "generation_config"}
    config, _ = model._prepare_generation_config(kwargs.get("generation_config", args[1] if len(args) > 1 else None), **options)
    problem = _problem(model, config, cache, kwargs)
    comm.agree(sharding.teams, Call({"call": "generate", "generation_config": str(config.to_diff_dict())}, problem=problem))
    kwargs |= {"cache": ShardedCache(model.config) if cache is None else cache, "use_cache": True}
    with same_random_numbers(sharding.teams, model.device):
        return whole(*args, **kwargs)


def _problem(model: Any, config: Any, cache: Any, kwargs: dict[str, Any]) -> str | None:
    if kwargs.get("custom_generate") is not None or not model._supports_default_dynamic_cache():
        return f"generate of {type(model).__name__} inside `with cp` goes its own way about the cache, which cannot be sharded"
    if cache is not None and not isinstance(cache, ShardedCache):
        return (
            f"generate inside `with cp` keeps the key/value cache sharded over the ranks, got a {type(cache).__name__}; "
            "leave it out, or pass the cache that an earlier generate inside `with cp` returned"
        )
    if kwargs.get("use_cache") is False:
        return "generate inside `with cp` needs the key/value cache: leave out use_cache=False"
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode not in MODES:
        known = ", ".join(mode.value for mode in MODES)
        return f"generation mode {mode.value} inside `with cp`: only {known} keep a sharded cache"
    asked = [name for name in UNSUPPORTED if getattr(config, name, None)]
    return f"generate with {asked[0]} inside `with cp` cannot be carried over a split sequence" if asked else None


@contextlib.contextmanager
def same_random_numbers(teams: Sequence[Team], device: torch.device) -> Iterator[None]:
    """All ranks draw what rank 0 draws. One that came with numbers of its own goes on with those afterwards."""
    kept = []
    for generator in [torch.default_generator, *_generators(device)]:
        own = generator.get_state()
        shared = comm.everyones(teams, own)[0]
        if not torch.equal(own, shared):
            kept.append((generator, own))
            generator.set_state(shared)
    try:
        yield
    finally:
        for generator, own in kept:
            generator.set_state(own)


def _generators(device: torch.device) -> list[torch.Generator]:
    return [] if device.type != "cuda" else [torch.cuda.default_generators[device.index or 0]]


# ------------------------------------------------------------------------------------------------ forward
def forward(inside: Inside, whole: Callable[..., Any], given: dict[str, Any], cache: ShardedCache) -> Any:
    """One forward of a generation; `whole` is the model's own. Its logits are those of the last token, on every rank."""
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    mask, sharding = given.get("attention_mask"), inside.sharding
    problem = None
    if tokens is None or (mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2)):
        problem = "generate inside `with cp` needs input_ids or inputs_embeds, and an attention_mask [B, S] if there is padding"
    elif mask is not None and bool((mask[:, -1] == 0).any()):
        problem = "generate inside `with cp` needs prompts padded on the left: the last column of attention_mask holds padding"
    told = {
        "call": "a forward of generate", "tokens in the cache": str(cache.seq_len),
        "tokens (every rank is given the whole prompt, not its part)": _digest(tokens),
        "attention_mask": _digest(mask), "position_ids": _digest(given.get("position_ids")),
    }  # fmt: skip
    comm.agree(sharding.teams, Call(told, problem=problem))
    assert tokens is not None
    padding = None if mask is None else (mask == 0).cpu()
    padding = None if padding is None or not bool(padding.any()) else padding
    step = _prefill if cache.seq_len == 0 else _decode
    return step(inside, whole, given, cache, tokens.shape[1], padding)


def _prefill(
    inside: Inside, whole: Callable[..., Any], given: dict[str, Any],
    cache: ShardedCache, seq_len: int, padding: Tensor | None,
) -> Any:  # fmt: skip
    """This rank's part of the prompt. A prompt too short for every rank to have a token is padded on the left."""
    sharding = inside.sharding
    teams = sharding.teams
    ranks, rank = comm.total(teams), comm.place(teams)
    extra = max(0, 2 * ranks - seq_len)
    batch, shape = {}, batches.whole_shape(given)
    for name, x in given.items():
        dim = batches.sequence_dim(name, x, shape)
        batch[name] = x if dim is None or not extra else torch.cat([x.narrow(dim, 0, 1).expand(*_wide(x, dim, extra)), x], dim)
    documents = None
    if padding is not None or extra:
        hidden = torch.zeros(shape, dtype=torch.bool) if padding is None else padding
        documents = -torch.nn.functional.pad(hidden, (extra, 0), value=True).long()
    layout, placed = inside.holder.placed(documents, seq_len + extra)
    mine = layout.positions(rank) - extra
    kept = (mine >= 0).nonzero()[:, 0]
    batch["cache"] = cache
    with inside.using(placed), cache.receiving(kept, mine[kept], seq_len, padding):
        out = whole(**batches.shard(batch, layout, rank))
    last = next(r for r in range(ranks) if layout.positions(r)[-1:].tolist() == [layout.seq_len - 1])
    out.logits = comm.broadcast(teams, out.logits[:, -1:].contiguous(), last)
    return out


def _decode(
    inside: Inside, whole: Callable[..., Any], given: dict[str, Any],
    cache: ShardedCache, num_new: int, padding: Tensor | None,
) -> Any:  # fmt: skip
    """New tokens, on all ranks alike."""
    sharding, first = inside.sharding, cache.seq_len
    teams = sharding.teams
    new = torch.arange(first, first + num_new)
    kept = (new % comm.total(teams) == comm.place(teams)).nonzero()[:, 0]
    cached = Cached(sharding, torch.cat([cache.positions, new[kept]]), first, num_new, padding)
    with inside.using(cached), cache.receiving(kept, new[kept], first + num_new, padding):
        out = whole(**given)
    out.logits = comm.broadcast(teams, out.logits[:, -1:].contiguous(), 0)
    return out


def _wide(x: Tensor, dim: int, size: int) -> list[int]:
    return [size if at == dim else length for at, length in enumerate(x.shape)]


def _digest(x: Any) -> str:
    """Shape and a checksum of the values."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return masks.digest((x.double() if x.is_floating_point() else x.long()).detach().cpu())

