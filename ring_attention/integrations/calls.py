"""What an attached model is called with: the one place where its own `forward` and `generate` are gone around.

Both stand in the model's `__dict__` from `attach` to `detach`, wrapped the way accelerate wraps `forward` for autocast:
names, types, signatures and hooks of the model stay what they were. Outside `with cp:` they only hand on.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ring_attention import comm, layouts
from ring_attention.errors import UsageError
from ring_attention.inside import Inside, Sharding, current

OURS = "_ring_attention"  # on the functions put in place, so that they are known again
OTHER_INPUTS = re.compile("pixel|image|video|audio|input_features")  # placed into the text by the local token ids


def refuse_untold_positions(model: Any) -> None:
    """Raises UsageError for a model that takes no `position_ids`."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UsageError(
            f"{type(model).__name__}.forward takes no position_ids: each rank would count its own tokens from 0, and "
            "their positions in the whole sequence could not be told"
        )


def watch(model: Any) -> None:
    """Puts both functions in place; doing it again changes nothing."""
    names = list(inspect.signature(model.forward).parameters)
    _wrap(model, "forward", functools.partial(_forward, names, _counting(model)))
    if hasattr(model, "generate"):
        _wrap(model, "generate", _generate)


def unwatch(model: nn.Module) -> None:
    """Takes them away again. One that somebody has wrapped since stays, and only hands on."""
    for name in ("forward", "generate"):
        function = getattr(model.__dict__.get(name), "__func__", None)
        if hasattr(function, OURS):
            before = getattr(function, OURS)
            model.__dict__.pop(name)
            model.__dict__ |= {} if before is None else {name: before}


def _wrap(model: Any, name: str, around: Callable[..., Any]) -> None:
    whole, before = getattr(model, name), model.__dict__.get(name)
    if any(hasattr(function, OURS) for function in _layers(whole)):
        return

    @functools.wraps(whole.__func__ if inspect.ismethod(whole) else whole)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(type(self), name) if before is None else getattr(before, "__func__", None)
        return around(self, before if own is None else types.MethodType(own, self), args, kwargs)  # a copy calls its own

    setattr(wrapper, OURS, before)
    setattr(model, name, types.MethodType(wrapper, model))


def _layers(function: Any) -> list[Any]:
    found = [getattr(function, "__func__", function)]
    while hasattr(found[-1], "__wrapped__"):
        found.append(found[-1].__wrapped__)
    return found


# ------------------------------------------------------------------------------------------------ the two functions
def _generate(model: Any, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inside = current()
    if inside is None:
        return whole(*args, **kwargs)
    from ring_attention.integrations import generation

    return generation.generate(model, inside, whole, args, kwargs)


def _forward(
    names: list[str], counting: str | None, model: Any, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    inside = current()
    if inside is None:
        return whole(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
    if cache is not None:
        return _with_cache(inside, whole, given, cache)
    sharding = inside.sharding
    if comm.total(sharding.teams) == 1:
        return whole(**given)
    for name, x in given.items():
        if x is not None and OTHER_INPUTS.search(name):
            sharding.refuse(
                f"{name}: what is not text is placed among the tokens of the whole sequence, of which a rank has a part; "
                "embed it first and pass inputs_embeds"
            )
    if given.get("position_ids") is None:
        sharding.refuse(
            f"{type(model).__name__} got no position_ids inside `with cp` and would count its own tokens from 0 on every "
            "rank; pass those of cp.shard(batch)"
        )
    if counting is not None and sharding.counted:
        given["position_ids"] = _counted(counting, sharding, given["position_ids"])
    return whole(**given)


def _with_cache(inside: Inside, whole: Callable[..., Any], given: dict[str, Any], cache: Any) -> Any:
    from ring_attention.integrations import generation

    if not isinstance(cache, generation.ShardedCache):
        inside.sharding.refuse(
            f"a key/value cache ({type(cache).__name__}) inside `with cp` would hold each rank's own tokens only; "
            "generate of the attached model keeps one that is sharded"
        )
    return generation.forward(inside, whole, given, cache)


# ------------------------------------------------------------------------------------------------ positions
def _counting(model: nn.Module) -> str | None:
    """By what a model that is given no positions counts them, if not one by one: "padding" or "tokens"."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return "tokens"
        if isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters:
            return "padding"
    return None


def _counted(counting: str, sharding: Sharding, positions: Tensor) -> Tensor:
    """The positions of this rank's tokens as the model counts them, where cp.shard has counted one by one."""
    if counting == "tokens":
        sharding.refuse(
            "this model counts positions from its padding token on; pass the position_ids of the whole sequence in the "
            "batch to cp.shard, for instance those of its create_position_ids_from_input_ids"
        )
    if sharding.documents is None or sharding.documents.dim() == 1:
        return positions
    real = (sharding.documents >= 0).long()
    layout = layouts.parse(sharding.layout, sharding.seq_len)
    return layout.shard(real.cumsum(1) * real - 1, comm.place(sharding.teams), 1).to(positions.device, torch.int64)
