"""What a sequence in parts means for attention calls that know nothing of it: `scaled_dot_product_attention` anywhere
in a model, while `with cp:` is open.

Nothing of torch is replaced. A `TorchFunctionMode` belongs to one thread, nests, and is gone when the block is left,
by its end or by an exception.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ring_attention import attention, comm, layouts
from ring_attention.comm import Call, Team
from ring_attention.masks import Mask, Window
from ring_attention.plan import MaskTensors
from ring_attention.setting import chosen
from ring_attention.strategies import Sizes


class Sharding:
    """How the sequence at hand is split: what attention needs to know besides its own arguments.

    layout: a layout's spec, whose seq_len may be pending. documents: ids of the whole sequence, or None.
    seq_len: length of the whole sequence, None before a batch was seen.
    """

    def __init__(
        self, groups: str, layout: str, strategy: str, documents: Tensor | None = None, seq_len: int | None = None
    ) -> None:
        self.groups, self.layout, self.strategy = groups, layout, strategy
        self.documents, self.seq_len = documents, seq_len
        self._masks: dict[tuple[bool, Window | None], Mask] = {}
        self._last: tuple[Sizes, Mask, torch.device] | None = None

    @property
    def teams(self) -> list[Team]:
        return [Team(name) for name in self.groups.split("|")]

    def mask(self, causal: bool, window: Window | None) -> Mask:
        if (causal, window) not in self._masks:
            self._masks[causal, window] = Mask(causal, window, self.documents)
        return self._masks[causal, window]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None = None,
        sinks: Tensor | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        self._last = Sizes.of(query, key, value), mask, query.device
        request = "\n".join((self.groups, self.layout, self.layout, mask.spec, self.strategy, "None"))
        return attention.call(query, key, value, sinks, mask, None, request, scale, softcap)

    def chunked(self, size: int) -> Sharding:
        """The same with documents cut every `size` tokens, each counted from its first one."""
        if self.documents is None and self.seq_len is None:
            self.refuse("chunked attention needs the length of the whole sequence: shard the batch with cp.shard(batch)")
        ids = torch.zeros(1, self.seq_len or 0, dtype=torch.int64) if self.documents is None else self.documents
        rows, at = torch.atleast_2d(ids), torch.arange(ids.shape[-1])
        starts = rows.diff(dim=1, prepend=rows[:, :1] - 1) != 0
        inside = at - torch.where(starts, at, 0).cummax(1).values  # tokens since the document began
        cut = (starts | (inside % size == 0)).cumsum(1).masked_fill(rows < 0, -1)
        return Sharding(self.groups, self.layout, self.strategy, cut, self.seq_len)

    def explain(self) -> str:
        """The strategy of the last attention call, and why."""
        if self.strategy != "auto":
            return f"{self.strategy}: asked for"
        if self._last is None:
            return "auto: chosen at each attention call from the work of the busiest rank and the bytes it sends"
        sizes, mask, device = self._last
        teams = self.teams
        if len(teams) == 2:
            return "hybrid: the mesh has two axes"
        if self.seq_len is None:
            return "auto: the length of the whole sequence is known to the attention call only; shard with cp.shard(batch)"
        layout = layouts.parse(self.layout, self.seq_len)
        choice = chosen(sizes, layout.spec, mask.spec, MaskTensors(mask.documents, mask.prefix), device)
        return f"{choice.strategy}: {choice.why}"

    def refuse(self, problem: str) -> None:
        """Raises on all ranks, those that see no problem included."""
        comm.agree(self.teams, Call({"call": "ring_attention"}, problem=problem))


class Holder(Protocol):
    """Who knows the sharding at hand; it changes with every batch."""

    sharding: Sharding


class Inside(TorchFunctionMode):
    """Open while `with cp:` is: attention means the whole sequence."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.holder = holder
        self.paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.paused:
            if func is F.scaled_dot_product_attention:
                return self._attention(func, *args, **kwargs)
            if func is F.multi_head_attention_forward:
                return self._multi_head(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self, plain: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        sharding = self.holder.sharding
        if dropout_p > 0:
            sharding.refuse(f"dropout_p={dropout_p}: attention dropout over a split sequence is not exact; set it to 0")
        if attn_mask is not None:
            sharding.refuse(
                "attn_mask: a mask or bias over this rank's tokens says nothing about the other ranks' keys; "
                "use is_causal, the batch's documents, or ring_attention(mask=...)"
            )
        if query.dim() != 4:
            shape = query.shape
            query, key, value = (_four_dims(x) for x in (query, key, value))
            out = self._attention(plain, query, key, value, None, 0.0, is_causal, scale, enable_gqa)
            return out.reshape(*shape[:-1], value.shape[-1])
        if query.shape[1] != key.shape[1] and not enable_gqa:
            sharding.refuse(
                f"query has {query.shape[1]} heads, key {key.shape[1]}: scaled_dot_product_attention needs enable_gqa"
            )
        return sharding.attend(query, key, value, sharding.mask(is_causal, None), scale)

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """nn.MultiheadAttention's body, with the attention inside it looked up here."""
        if kwargs.get("need_weights", True):
            self.holder.sharding.refuse(
                "nn.MultiheadAttention with need_weights=True: attention weights of a split sequence are not at hand; "
                "pass need_weights=False"
            )
        body = F.multi_head_attention_forward
        attend = lambda *a, **k: self._attention(F.scaled_dot_product_attention, *a, **k)  # noqa: E731
        names = {**body.__globals__, "scaled_dot_product_attention": attend, "has_torch_function": lambda _: False}
        inner = types.FunctionType(body.__code__, names, body.__name__, body.__defaults__, body.__closure__)
        inner.__kwdefaults__ = body.__kwdefaults__
        return inner(*args, **kwargs)


def current() -> Inside | None:
    """The innermost open `with cp:` of this thread."""
    open_modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Inside)]
    return open_modes[-1] if open_modes else None


def _four_dims(x: Tensor) -> Tensor:
    """[..., H, S, D] -> [B, H, S, D]"""
    if x.dim() < 4:
        return x.reshape(*[1] * (4 - x.dim()), *x.shape)
    return x.flatten(0, -4)
