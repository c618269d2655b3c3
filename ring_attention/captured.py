"""Attention functions that modules took by `from ... import`, before anybody could stand in their place.

While `with cp:` is open, such a name in a module reads the function anew where it stands (`scaled_dot_product_attention`),
or refuses by name (what attends to local tokens and cannot be led elsewhere). So do recurrent layers and convolutions of
torch when they run along a dim that is as long as this rank's part of the sequence. Names held elsewhere, in objects or
closures, are not found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

LATE = ("scaled_dot_product_attention", "multi_head_attention_forward")
OTHERS = {
    "torch.nn.attention.flex_attention": ("flex_attention",),
    "torch.nn.attention.varlen": ("varlen_attn",),
    "flash_attn": ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    "xformers.ops": ("memory_efficient_attention",),
}


def _recurrent(data: Tensor, *rest: Any) -> tuple[int, int]:
    """Of torch's recurrent layers: (tokens, 0). The last argument says whether the batch comes first; packed data has none."""
    packed = isinstance(rest[0], Tensor) and not rest[0].is_floating_point()
    return (int(rest[0].shape[0]) if packed else data.shape[1 if rest[-1] else 0]), 0


def _convolved(input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> tuple[int, int]:
    """(positions, how far padding makes them more). A kernel of one position looks at no other: no length at all."""
    reach = weight.shape[-1]
    return (input.shape[-1], 2 * reach) if reach > 1 else (-1, 0)


SCANS: dict[str, dict[str, Callable[..., tuple[int, int]]]] = {
    "torch._VF": dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "torch.nn.functional": {"conv1d": _convolved},
}


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """The function that stands in `torch.nn.functional` at the moment of the call."""
    return F.scaled_dot_product_attention(*args, **kwargs)


def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """The function that stands in `torch.nn.functional` at the moment of the call."""
    return F.multi_head_attention_forward(*args, **kwargs)


class Captured:
    """Names in modules that stand for something else from `open` to `close`."""

    def __init__(self) -> None:
        self._changed: list[tuple[dict[str, Any], str, Any]] = []

    def open(self, refusing: Callable[..., Callable[..., Any]], scanning: Callable[..., Callable[..., Any]]) -> None:
        """To be called before `torch.nn.functional` is changed. `refusing(name, function)` makes what stands in the place
        of a function that cannot be led elsewhere; `scanning(name, function, scanned)` of one that may run along tokens."""
        instead = {id(getattr(F, name)): globals()[name] for name in LATE}
        for module, names in OTHERS.items():
            for name in names:
                if (function := getattr(sys.modules.get(module), name, None)) is not None:
                    instead[id(function)] = refusing(f"{module}.{name}", function)
        wanted = frozenset(instead)
        typed_in = _found(sys.modules["__main__"], wanted)  # a prompt adds names without importing a module
        for held, name in [*_places(len(sys.modules), wanted), *typed_in]:
            value = held.get(name)
            if (function := instead.get(_plain_id(value))) is not None:
                self._changed.append((held, name, value))
                held[name] = function
        for module, scans in SCANS.items():
            for name, scanned in scans.items():
                function = getattr(sys.modules[module], name)
                self._changed.append((sys.modules[module].__dict__, name, function))
                setattr(sys.modules[module], name, scanning(name, function, scanned))

    def close(self, heir: Captured | None) -> None:
        """Puts the functions back, or leaves that to one that is still open."""
        if heir is not None:
            heir._changed += self._changed
        else:
            for held, name, value in reversed(self._changed):  # one opened inside another may have changed a name again
                held[name] = value
        self._changed = []


@lru_cache(maxsize=1)
def _places(num_modules: int, wanted: frozenset[int]) -> list[tuple[dict[str, Any], str]]:
    """Where modules hold one of the wanted functions; kept until another module is imported."""
    return [place for module in list(sys.modules.values()) for place in _found(module, wanted)]


def _found(module: Any, wanted: frozenset[int]) -> list[tuple[dict[str, Any], str]]:
    if not isinstance(module, ModuleType) or module is F or module.__name__ in (__name__, "torch._C._nn"):
        return []
    return [(module.__dict__, name) for name, value in list(module.__dict__.items()) if _plain_id(value) in wanted]


def _plain_id(value: Any) -> int:
    """Of the function itself where torch.compile has wrapped it."""
    return id(value.__dict__.get("_torchdynamo_orig_callable", value) if isinstance(value, FunctionType) else value)
