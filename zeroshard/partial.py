"""Partial: a 0-dim answer whose parts are still with the ranks. Any use of it adds them up, many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .comm import Channel, tag_of


class Partial(torch.Tensor):
    """A scalar of which each rank has a part. Every use resolves it, together with all other partials of that call."""

    local: torch.Tensor
    combine: Callable[[torch.Tensor], torch.Tensor]
    channel: Channel
    value: torch.Tensor | None
    source: tuple[Any, Any]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: torch.Tensor, combine: Any, dtype: torch.dtype, channel: Channel, source: Any) -> Partial:
        self = torch.Tensor._make_wrapper_subclass(cls, (), dtype=dtype, device=local.device)
        self.local, self.combine, self.channel, self.value = local, combine, channel, None
        self.source = source  # (function, arguments) that gave it
        return self

    def resolved(self) -> torch.Tensor:
        resolve([self])
        assert self.value is not None
        return self.value

    def tolist(self) -> Any:
        return self.resolved().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.resolved(), spec)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.resolved().numpy(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self.resolved())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.resolved().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        flat, tree = tree_flatten((args, kwargs or {}))
        resolve([leaf for leaf in flat if isinstance(leaf, Partial)])
        args, kwargs = tree_unflatten([leaf.value if isinstance(leaf, Partial) else leaf for leaf in flat], tree)
        return func(*args, **kwargs)


def resolve(partials: Sequence[Partial]) -> None:
    """One collective per shard group for all of them. Parts travel as fp64 and are combined in rank order."""
    channels: dict[Channel, dict[int, Partial]] = {}
    for partial in partials:
        if partial.value is None:
            channels.setdefault(partial.channel, {})[id(partial)] = partial
    for channel, waiting in channels.items():
        todo = list(waiting.values())
        if channel.mirror is not None:
            channel.mirror.asks(todo)
        parts = torch.stack(channel.exchange_all(_label(todo), torch.stack([p.local.double() for p in todo])))
        for index, partial in enumerate(todo):
            partial.value = partial.combine(parts[:, index]).to(partial.dtype)


def _label(partials: Sequence[Partial]) -> str:
    """What is asked, of all of them: a rank that asks alone never takes another question's parts for an answer."""
    asked = [f"{str(func).split('.')[1]} of {args[0].spec.name}" for func, args in (p.source for p in partials)]
    others = f" and {len(asked) - 1} more [{tag_of(' '.join(asked)):x}]" if len(asked) > 1 else ""
    return f"{asked[0]}{others}"
