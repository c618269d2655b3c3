"""transformers: an attention implementation of its own name, and the mask function that goes with it.

While `with cp:` is open the mask function answers with a `ShardedMask`, an object that layers pass on untouched and
that carries all attention needs. Activation checkpointing keeps it with the layer's other arguments, so recomputation works
wherever backward runs. Outside `with cp:` both functions hand over to the implementation the model had before.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ring_attention.decode import Cached
from ring_attention.errors import UsageError
from ring_attention.inside import Sharding, current
from ring_attention.integrations import calls
from ring_attention.masks import Window

PREFIX = "ring_attention_"
CARRY_STATE = re.compile(
    r"Mamba|SSMix|Ssm|GatedDelta|DeltaNet|DeltaAttention|LinearAttention|LightningAttention|Recurrent|R[gG]L[rR][uU]|R[wW][kK][vV]"
    r"|RetNet|Retention|Hyena|LSTM|GRU|RNN|ShortConv"
)
STATE_LAYER_TYPES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm")


@dataclass(frozen=True)
class ShardedMask:
    """Who sees whom in the layers of one forward, over the whole sequence."""

    sharding: Sharding
    causal: bool
    window: Window | None


@dataclass(frozen=True)
class CachedMask:
    """The same over a sharded key/value cache."""

    sharding: Cached
    causal: bool
    window: Window | None
    chunk: int | None


@dataclass
class Attachment:
    """A model whose attention goes through here, and the implementations its configs named before."""

    model: weakref.ReferenceType[nn.Module]
    before: dict[str, str]
    names: dict[str, str]

    def swapped(self) -> str | None:
        """The implementation that somebody selected since, if so."""
        model = self.model()
        if model is None:
            return None
        found = _configs(model)
        return next((found[path]._attn_implementation for path, name in self.names.items()
                     if found[path]._attn_implementation != name), None)  # fmt: skip


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a wrapper such as DistributedDataParallel."""
    inner = getattr(model, "module", None)
    if hasattr(model, "set_attn_implementation") or not isinstance(inner, nn.Module):
        return model
    return unwrapped(inner)


def attach(model: nn.Module) -> Attachment:
    """Selects the implementation in all text configs of the model.

    Raises:
        UsageError: not a transformers model, one that computes attention by itself, takes no `position_ids`, or has
            layers that carry state along the sequence; named.
    """
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        raise UsageError(f"{type(model).__name__} is no transformers model; for other modules `with cp:` is enough")
    _refuse_state(model)
    calls.refuse_untold_positions(model)
    configs = _configs(model)
    # a model that is attached already, by another context, goes back to what it had before that
    before = {path: (config._attn_implementation or "eager").removeprefix(PREFIX) for path, config in configs.items()}
    names = {path: _register("eager" if old == "eager" else "sdpa") for path, old in before.items()}
    _select(model, names)
    left = [path or "the model" for path, config in _configs(model).items() if config._attn_implementation != names[path]]
    if left:
        _select(model, before)
        raise UsageError(f"{type(model).__name__} does not take its attention from the registry ({', '.join(left)})")
    calls.watch(model)
    return Attachment(weakref.ref(model), before, names)


def detach(attachment: Attachment) -> None:
    model = attachment.model()
    if model is None:
        return
    calls.unwatch(model)
    if attachment.swapped() is None:
        _select(model, attachment.before)


# ------------------------------------------------------------------------------------------------ the two functions
def sharded_attention(
    fallback: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query [B, H, S, D], key and value [B, Hkv, S, D] -> [B, S, H, Dv]"""
    if isinstance(attention_mask, ShardedMask):
        return _attend(attention_mask, query, key, value, options), None
    if isinstance(attention_mask, CachedMask):
        return _attend_cached(attention_mask, query, key, value, options), None
    inside = current()
    if inside is None:
        return _plain(fallback, module)(module, query, key, value, attention_mask, **options)
    causal = options.get("is_causal")
    if attention_mask is not None or (getattr(module, "is_causal", False) if causal is None else causal):
        inside.sharding.refuse(
            f"{type(module).__name__} got an attention_mask of its own ({type(attention_mask).__name__}) inside "
            "`with cp`; tell padding and documents through cp.shard(batch)"
        )
    inside.paused = True  # a tower that is not split, such as vision
    try:
        return _plain(fallback, module)(module, query, key, value, attention_mask, **options)
    finally:
        inside.paused = False


def sharded_mask(fallback: str, **options: Any) -> Any:
    """The mask function of transformers: a `ShardedMask` inside `with cp`, otherwise what the fallback makes."""
    from transformers import AttentionMaskInterface

    inside = current()
    if inside is None:
        return AttentionMaskInterface()[fallback](**options)
    sharding = inside.sharding
    if isinstance(sharding, Cached):
        rule = Rule.read(options["mask_function"], sharding)
        return CachedMask(sharding, rule.causal, rule.window, rule.chunk)
    if options["kv_length"] != options["q_length"]:
        sharding.refuse(
            f"a key/value cache of {options['kv_length']} tokens for {options['q_length']} queries inside `with cp`: "
            "only generate of the attached model keeps one that is sharded"
        )
    padding = options.get("attention_mask")
    if padding is not None and sharding.documents is None and not bool(padding.all()):
        sharding.refuse("attention_mask tells padding that cp.shard(batch) has not seen; shard the mask with the batch")
    rule = Rule.read(options["mask_function"], sharding)
    return ShardedMask(rule.narrowed(sharding), rule.causal, rule.window)


def _attend(mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """[B, S, H, Dv]"""
    rule = mask.sharding.mask(mask.causal, mask.window)
    return mask.sharding.attend(query, key, value, rule, *_scores(mask.sharding, options)).transpose(1, 2).contiguous()


def _attend_cached(mask: CachedMask, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """[B, S, H, Dv]"""
    rule = mask.causal, mask.window, mask.chunk
    return mask.sharding.over_cache((query, key, value), rule, *_scores(mask.sharding, options)).transpose(1, 2).contiguous()


def _scores(sharding: Sharding, options: dict[str, Any]) -> tuple[float | None, Tensor | None, float | None]:
    """scale, sinks, softcap of one layer's call; refuses what else it may ask for."""
    if options.get("dropout"):
        sharding.refuse(f"attention dropout {options['dropout']} over a split sequence is not exact; set it to 0")
    for name in ("output_attentions", "head_mask", "position_bias", "attn_bias", "attention_bias"):
        if options.get(name) is not None and options[name] is not False:
            sharding.refuse(f"{name} cannot be carried over a split sequence")
    return options.get("scaling"), options.get("s_aux"), options.get("softcap")


# ------------------------------------------------------------------------------------------------ reading a mask
@dataclass
class Rule:
    """What a mask function of transformers is made of, over global positions instead of the local ones it would see."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None

    @classmethod
    def read(cls, function: Callable[..., Any], sharding: Sharding) -> Rule:
        """Refuses, by its name, a part that is not known here."""
        rule = cls()
        rule._add(function, sharding)
        return rule

    @property
    def window(self) -> Window | None:
        return None if self.left is None and self.right is None else (self.left, self.right)

    def _add(self, function: Callable[..., Any], sharding: Sharding) -> None:
        name = function.__qualname__.split(".")[0]
        held = dict(zip(function.__code__.co_freevars, [c.cell_contents for c in function.__closure__ or ()], strict=True))
        match name:
            case "causal_mask_function":
                self.causal = True
            case "sliding_window_overlay":
                self.left = held["sliding_window"] - 1
            case "sliding_window_bidirectional_overlay":
                self.left = self.right = held["sliding_window"]
            case "chunked_overlay":
                self.chunk = held["chunk_size"]
            case "and_masks":
                for part in held["mask_functions"]:
                    self._add(part, sharding)
            case "remap_positions_for_packed_sequence":
                self._add(held["mask_function"], sharding)
            case "bidirectional_mask_function" | "packed_sequence_mask_function" | "padding_mask_function":
                pass  # nothing to see, or what cp.shard has read off the whole batch
            case _:
                sharding.refuse(f"the mask function {function.__qualname__} cannot be carried over a split sequence")

    def narrowed(self, sharding: Sharding) -> Sharding:
        """Chunked attention is documents inside documents: they start anew every `chunk` tokens."""
        if self.chunk is None:
            return sharding
        return sharding.chunked(self.chunk)


# ------------------------------------------------------------------------------------------------ models
def _register(fallback: str) -> str:
    """Makes the pair of functions known under a name; doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = PREFIX + fallback
    AttentionInterface.register(name, partial(sharded_attention, fallback))
    AttentionMaskInterface.register(name, partial(sharded_mask, fallback))
    return name


def _plain(fallback: str, module: nn.Module) -> Callable[..., Any]:
    """The attention a model has without this package; each modeling file has an eager one of its own."""
    from transformers import AttentionInterface

    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return own if fallback == "eager" and own is not None else AttentionInterface()[fallback]


def _configs(model: nn.Module) -> dict[str, Any]:
    """The configs whose attention runs over text, by their name in the model's config; "" is the config itself."""
    config: Any = model.config
    found = {"": config}
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None and not re.search("vision|audio|image", name):
            found[name] = getattr(config, name)
    return found


def _select(model: Any, names: dict[str, str]) -> None:
    model.set_attn_implementation(names if len(names) > 1 else names[""])


def _refuse_state(model: nn.Module) -> None:
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    found = [name for name, kind in kinds.items() if CARRY_STATE.search(kind) and "Norm" not in kind]
    for name in found:
        if not any(other.startswith(f"{name}.") or (not name and other) for other in found):  # the innermost one
            raise UsageError(
                f"{name or 'the model'} ({kinds[name]}) carries state along the sequence; parts of a sequence on "
                "different ranks would each start anew. Models with such layers cannot be split along the sequence"
            )
    whole: Any = model.config
    config = whole.get_text_config()
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind in STATE_LAYER_TYPES:
            raise UsageError(f"layer {index} ({kind}) carries state along the sequence and cannot be split over ranks")
    if getattr(whole, "is_encoder_decoder", False):
        raise UsageError(f"{type(model).__name__} is an encoder-decoder model; only decoders and encoders can be attached")
