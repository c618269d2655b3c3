"""What a sequence in parts means for attention calls that know nothing of it: `scaled_dot_product_attention` anywhere
in a model, while `with cp:` is open.

The function is replaced where it stands, in `torch.nn.functional`, and in modules that took it out of there (captured.py).
What cannot be seen is attention written by hand or called as an operation of `torch.ops`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook

from ring_attention import attention, comm, layouts
from ring_attention.captured import Captured
from ring_attention.comm import Call, Team
from ring_attention.masks import Mask, Window
from ring_attention.plan import MaskTensors
from ring_attention.setting import chosen, request_text
from ring_attention.strategies import Sizes


class Sharding:
    """How the sequence at hand is split: what attention needs to know besides its own arguments.

    layout: a layout's spec, whose seq_len may be pending. documents: ids of the whole sequence, or None.
    seq_len: length of the whole sequence, None before a batch was seen. counted: whether `cp.shard` added the positions.
    """

    def __init__(
        self, groups: str, layout: str, strategy: str, documents: Tensor | None = None, seq_len: int | None = None
    ) -> None:
        self.groups, self.layout, self.strategy = groups, layout, strategy
        self.documents, self.seq_len = documents, seq_len
        self.counted = False
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
        request = request_text(
            groups=self.groups, layout=self.layout, key_layout=self.layout, mask=mask.spec, strategy=self.strategy
        )
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

    def is_share(self, length: int, more: int = 0) -> bool:
        """Could a dim of this length be this rank's part of a sequence that others hold parts of? `more`: padding's size."""
        teams = self.teams
        if comm.total(teams) == 1:
            return False
        if self.seq_len is None:
            return True
        held = len(layouts.parse(self.layout, self.seq_len).held(comm.place(teams)))
        return held <= length <= held + more

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

    def placed(self, documents: Tensor | None, seq_len: int) -> tuple[layouts.Layout, Sharding]:
        """How a whole sequence of this length is split; changes nothing."""


class Inside:
    """Open while `with cp:` is: attention means the whole sequence, in this thread and in backward passes.

    Two functions of `torch.nn.functional` are replaced by methods of this object. Their place is the only state: the
    innermost `Inside` stands there and knows what it replaced, another one included.
    """

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.paused = False
        self.closed = True
        self._instead: Sharding | None = None
        self._thread = threading.get_ident()
        self._captured = Captured()
        self._attention, self._multi_head = self.attention, self.multi_head
        # calls in a checkpoint whose recomputation is still to come
        self._unfinished = 0

    def open(self) -> None:
        self.closed = False
        self._captured.open(_refusing, _scanning)
        self.plain_attention, F.scaled_dot_product_attention = F.scaled_dot_product_attention, self._attention
        self.plain_multi_head, F.multi_head_attention_forward = F.multi_head_attention_forward, self._multi_head
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it computes attention without calling it

    def close(self, failed: bool) -> None:
        """Puts back what was there. One that another thread has covered stays, inert, until that one closes."""
        self.closed = True
        torch.backends.mha.set_fastpath_enabled(self._fast_path)
        while (top := _installed()) is not None and top.closed:
            F.scaled_dot_product_attention = top.plain_attention
            F.multi_head_attention_forward = top.plain_multi_head
        self._captured.close(None if top is None else top._captured)
        if self._unfinished > 0 and not failed:
            self.sharding.refuse(
                "a checkpoint around scaled_dot_product_attention recomputes after `with cp` is left, where attention sees "
                "local tokens only: run backward inside `with cp`, or attach the model"
            )

    @property
    def active(self) -> bool:
        """Not closed, not paused, and asked from its own thread or from a backward pass."""
        here = self._thread == threading.get_ident() or torch._C._current_graph_task_id() != -1
        return here and not self.closed and not self.paused

    @property
    def sharding(self) -> Sharding:
        return self.holder.sharding if self._instead is None else self._instead

    @contextlib.contextmanager
    def using(self, sharding: Sharding) -> Iterator[None]:
        """Another sharding than the batch's, for a forward of its own such as one of generation."""
        before, self._instead = self._instead, sharding
        try:
            yield
        finally:
            self._instead = before

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Takes the place of `scaled_dot_product_attention`."""
        if not torch.compiler.is_compiling():
            if not self.active:
                return self.plain_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            self._count_checkpoints(any(x.requires_grad for x in (query, key, value)))
        sharding = self.sharding
        if dropout_p > 0:
            sharding.refuse(f"dropout_p={dropout_p}: attention dropout over a split sequence is not exact; set it to 0")
        if attn_mask is not None:
            sharding.refuse(
                "attn_mask: a mask or bias over this rank's tokens says nothing about the other ranks' keys; "
                "use is_causal, the batch's documents, or ring_attention(mask=...)"
            )
        shape = query.shape
        if query.dim() != 4:
            query, key, value = _four_dims(query), _four_dims(key), _four_dims(value)
        if query.shape[1] != key.shape[1] and not enable_gqa:
            sharding.refuse(
                f"query has {query.shape[1]} heads, key {key.shape[1]}: scaled_dot_product_attention needs enable_gqa"
            )
        if query.shape[2] == 1 < key.shape[2]:
            sharding.refuse(
                f"one query for {key.shape[2]} keys: a step of decoding, or a pooling? Which rank holds which key cannot be "
                "told from the call. Keep each key on exactly one rank and call cp.decode(query, key, value)"
            )
        out = sharding.attend(query, key, value, sharding.mask(is_causal, None), scale)
        return out if len(shape) == 4 else out.reshape(*shape[:-1], value.shape[-1])

    def multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of `multi_head_attention_forward`, which computes attention by itself if weights are wanted."""
        if kwargs.get("need_weights", True) and not torch.compiler.is_compiling() and self.active:
            self.sharding.refuse(
                "nn.MultiheadAttention with need_weights=True: attention weights of a split sequence are not at hand; "
                "pass need_weights=False"
            )
        return self.plain_multi_head(*args, **kwargs)

    def _count_checkpoints(self, differentiable: bool) -> None:
        """A reentrant checkpoint runs its forward without gradients, and once more, with them, in backward; the other kind
        runs it under hooks of its own."""
        if torch.is_grad_enabled():
            if torch._C._current_graph_task_id() != -1:
                self._unfinished -= self._unfinished > 0
            elif differentiable and (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
                self._unfinished += getattr(hooks[0], "__qualname__", "").startswith(_checkpoint_hook.__qualname__)
            return
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is CheckpointFunction.forward.__code__:
                self._unfinished += any(frame.f_locals["ctx"].needs_input_grad)
                return


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of an attention function that knows local tokens only."""

    @functools.wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        inside = current()
        if inside is not None:
            inside.sharding.refuse(
                f"{name} inside `with cp` attends to this rank's tokens only; call scaled_dot_product_attention, or "
                "ring_attention itself"
            )
        return function(*args, **kwargs)

    return refuse


def _scanning(name: str, function: Callable[..., Any], scanned: Callable[..., tuple[int, int]]) -> Callable[..., Any]:
    """In the place of a function that carries state, or looks around, along a dim: `scanned` tells its length and padding."""

    @functools.wraps(function)
    def scan(*args: Any, **kwargs: Any) -> Any:
        inside = None if torch.compiler.is_compiling() else current()
        if inside is not None and inside.sharding.is_share(*scanned(*args, **kwargs)):
            inside.sharding.refuse(
                f"{name} inside `with cp` runs along this rank's tokens only, as if the sequence began there; layers that "
                "carry state along the sequence cannot be split"
            )
        return function(*args, **kwargs)

    return scan


def current() -> Inside | None:
    """The innermost open `with cp:` of this thread."""
    inside = _installed()
    while inside is not None and not inside.active:
        inside = _owner(inside.plain_attention)
    return inside


def _installed() -> Inside | None:
    return _owner(F.scaled_dot_product_attention)


def _owner(function: Any) -> Inside | None:
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, Inside) else None


def _four_dims(x: Tensor) -> Tensor:
    """[..., H, S, D] -> [B, H, S, D]"""
    if x.dim() < 4:
        return x.reshape(*[1] * (4 - x.dim()), *x.shape)
    return x.flatten(0, -4)
