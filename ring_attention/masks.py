"""Masks: who sees whom, as a rule over global positions, the same on every rank. Pure, no communication.

    visible(i, j) = (band(i, j) or j < prefix) and documents[i] == documents[j] >= 0 and mask_mod(i, j)
    band(i, j)    = i - left <= j <= i + right

with i the global position of a query and j of a key. B is the batch size, S the length of the whole sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ring_attention.errors import UsageError
from ring_attention.layouts import Positions

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Window = tuple[int | None, int | None]


class Mask:
    """Who sees whom. `Mask()` is full attention.

    Args:
        causal: query i sees keys j <= i.
        window: `(left, right)`: i sees j when i - left <= j <= i + right, ends included; `None` on a side sets no
            limit there. Joined with `causal`, both hold. transformers' `sliding_window=n` is `(n - 1, 0)`.
        documents: integer ids `[S]` or `[B, S]` of the whole sequence. Equal ids see each other, neighbours or not;
            negative ids are padding, which sees nobody and is seen by nobody. Narrows everything else.
        prefix: integers `[B]`: the first `prefix[b]` positions are seen by all of row b, widening causal and window.
        mask_mod: `f(b, h, q, k) -> bool tensor` over broadcastable index tensors, as in flex attention; narrows the
            rest. It is evaluated once per call into S_local x S booleans.

    Raises:
        UsageError: anything else.
    """

    def __init__(
        self,
        causal: bool = False,
        window: Window | None = None,
        documents: Tensor | None = None,
        prefix: Tensor | None = None,
        *,
        mask_mod: MaskMod | None = None,
    ) -> None:
        self.causal = bool(causal)
        self.window = None if window is None else _checked_window(window)
        self.documents = None if documents is None else _checked_ids("documents", documents, (1, 2), "[S] or [B, S]")
        self.prefix = None if prefix is None else _checked_ids("prefix", prefix, (1,), "[B]")
        self.mask_mod = mask_mod
        self.spec = f"causal={self.causal} window={self.window}"

    def __repr__(self) -> str:
        return (
            f"Mask(causal={self.causal}, window={self.window}, documents={_shape(self.documents)}, "
            f"prefix={_shape(self.prefix)}, mask_mod={mod_name(self.mask_mod)})"
        )

    def summary(self) -> str:
        """A few words for people."""
        words = ["causal"] if self.causal else []
        words += [] if self.window is None else [f"window {self.window}"]
        words += [name for name in ("documents", "prefix", "mask_mod") if getattr(self, name) is not None]
        return " + ".join(words) or "full attention"

    @property
    def reach(self) -> Window:
        """How far a query sees to the left and to the right; `None` is no limit."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    @cached_property
    def rows(self) -> list[RowRule]:
        """The rule of each run of batch rows that share one; a single rule for all rows where nothing differs."""
        documents = [None] if self.documents is None else [ids.numpy() for ids in torch.atleast_2d(self.documents)]
        prefix = [0] if self.prefix is None else self.prefix.tolist()
        rules: list[RowRule] = []
        for row in range(max(len(documents), len(prefix))):
            rule = RowRule(row, row + 1, documents[min(row, len(documents) - 1)], prefix[min(row, len(prefix) - 1)])
            if rules and rules[-1].same(rule):
                rules[-1] = RowRule(rules[-1].start, row + 1, rule.ids, rule.prefix)
            else:
                rules.append(rule)
        return rules if len(rules) != 1 else [RowRule(0, None, rules[0].ids, rules[0].prefix)]

    def extent(self, seq_len: int) -> int:
        """How many tokens lie at most between two that see each other, these included."""
        left, right = self.reach
        near = seq_len
        if self.prefix is None and left is not None and right is not None:
            near = max(1, left + right + 1)
        return min(near, seq_len, max(rule.longest(seq_len) for rule in self.rows))

    @property
    def batch(self) -> int:
        """The batch size the mask is for; 1 fits any."""
        documents = 1 if self.documents is None or self.documents.dim() == 1 else self.documents.shape[0]
        return max(documents, 1 if self.prefix is None else len(self.prefix))

    def num_rows(self, rows: slice) -> int:
        """How many of the rows that the mask knows are in a slice of the batch."""
        return len(range(self.batch)[rows])

    @cached_property
    def padding(self) -> Tensor | None:
        """Which positions are padding: booleans `[B or 1, S]`, or None if there are none."""
        if self.documents is None or not bool((self.documents < 0).any()):
            return None
        return torch.atleast_2d(self.documents < 0)

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """The mask as booleans `[B or 1, len(i), len(j)]`, for queries at positions i and keys at positions j.

        The definition that every faster path is held to. `mask_mod` is not part of it: see `mod_table`.
        """
        ahead = j[None, :] - i[:, None]  # [I, J]
        left, right = self.reach
        allow = torch.ones_like(ahead, dtype=torch.bool)
        if left is not None:
            allow &= ahead >= -left
        if right is not None:
            allow &= ahead <= right
        allow = allow[None]
        if self.prefix is not None:
            allow = allow | (j[None, None, :] < self.prefix[:, None, None])
        if self.documents is not None:
            ids = self.documents if self.documents.dim() == 2 else self.documents[None]
            allow = allow & (ids[:, i, None] == ids[:, None, j]) & (ids[:, i, None] >= 0)
        return allow

    def mod_table(self, i: Tensor, j: Tensor, batch: int, heads: int) -> Tensor | None:
        """`mask_mod` over positions i x j: booleans `[B or 1, H or 1, len(i), len(j)]`; None without one."""
        if self.mask_mod is None:
            return None
        b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[None, :, None, None]
        table = self.mask_mod(b, h, i[None, None, :, None], j[None, None, None, :])
        while table.dim() < 4:
            table = table[None]
        return table.expand(*table.shape[:2], len(i), len(j)).bool()

    def row_work(self, seq_len: int) -> Positions:
        """Number of keys that each query position sees, summed over distinct rows. int64 `[seq_len]`"""
        at = np.arange(seq_len, dtype=np.int64)
        work = np.zeros(seq_len, np.int64)
        for rule in self.rows:
            weight = self.num_rows(slice(rule.start, rule.stop))
            for members in rule.documents_in(at):
                mine = at[members]
                low, high = self.limits(mine, mine)
                seen = high - low
                if rule.prefix:
                    border = np.searchsorted(mine, rule.prefix)
                    seen = seen + border - np.clip(np.minimum(high, border) - low, 0, None)
                work[members] += weight * seen
        return work

    def limits(self, i: Positions, j: Positions) -> tuple[Positions, Positions]:
        """For each query at i the range `[low, high)` of indices into the ascending positions j inside its band."""
        left, right = self.reach
        low = np.zeros(len(i), np.int64) if left is None else np.searchsorted(j, i - left, "left")
        high = np.full(len(i), len(j)) if right is None else np.searchsorted(j, i + right, "right")
        return low, np.maximum(low, high)


class RowRule:
    """The part of a mask that may differ between rows of the batch: rows `start:stop`, document ids, prefix."""

    def __init__(self, start: int, stop: int | None, ids: Positions | None, prefix: int) -> None:
        self.start, self.stop, self.ids, self.prefix = start, stop, ids, prefix

    def same(self, other: RowRule) -> bool:
        alike = self.ids is other.ids or (
            self.ids is not None and other.ids is not None and np.array_equal(self.ids, other.ids)
        )
        return alike and self.prefix == other.prefix

    def longest(self, seq_len: int) -> int:
        """Tokens from the first to the last one of a document, of that where they are most."""
        if self.ids is None:
            return seq_len
        order = np.argsort(self.ids, kind="stable")
        order = order[np.searchsorted(self.ids[order], 0) :]
        starts = np.flatnonzero(np.diff(self.ids[order], prepend=-1))
        ends = np.append(starts[1:], len(order)) - 1
        return int((order[ends] - order[starts]).max() + 1) if len(order) else 0

    def documents_in(self, at: Positions) -> list[Positions]:
        """Indices into `at`, one array per document; padding belongs to none."""
        if self.ids is None:
            return [np.arange(len(at))] if len(at) else []
        ids = self.ids[at]
        order = np.argsort(ids, kind="stable")
        order = order[np.searchsorted(ids[order], 0) :]
        return [part for part in np.split(order, np.flatnonzero(np.diff(ids[order])) + 1) if len(part)]


def parse(spec: str, documents: Tensor | None, prefix: Tensor | None) -> Mask:
    """The mask of a `spec` and its tensors."""
    causal, window = (part.split("=")[1] for part in spec.split(" ", 1))
    ends = None if window == "None" else [None if end == "None" else int(end) for end in window[1:-1].split(", ")]
    return Mask(causal == "True", None if ends is None else (ends[0], ends[1]), documents, prefix)


def digest(x: Tensor | None) -> str:
    """Shape and a checksum of the values of a CPU tensor."""
    if x is None:
        return "None"
    return f"{list(x.shape)} #{hashlib.blake2b(x.contiguous().numpy().tobytes(), digest_size=8).hexdigest()}"


def mod_name(mod: MaskMod | None) -> str:
    return "None" if mod is None else getattr(mod, "__qualname__", type(mod).__name__)


def _checked_window(window: Window) -> Window:
    good = isinstance(window, (tuple, list)) and len(window) == 2
    if not good or not all(end is None or (isinstance(end, int) and not isinstance(end, bool)) for end in window):
        raise UsageError(f"window must be a pair (left, right) of integers or None, got {window!r}")
    return (window[0], window[1])


def _shape(x: Tensor | None) -> str:
    return "None" if x is None else f"int64{list(x.shape)}"


def _checked_ids(name: str, ids: Tensor, dims: tuple[int, ...], shape: str) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dim() not in dims:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
        raise UsageError(f"{name} must be an integer tensor {shape}, got {got}")
    return ids.detach().to("cpu", torch.int64).contiguous()
