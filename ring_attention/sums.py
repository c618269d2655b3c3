"""Results that are made of parts: of blocks, which are added or merged, and of heads, which lie side by side.

B batch, H heads, S tokens. Everything is [B, H, S, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ring_attention import lse

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Place:
    """Which rows of the batch and which tokens of a tensor [B, H, S, ...].

    With a `count` over 1 that many runs of tokens of one row, each `stride` after the one before it; they take the
    place of the batch. Runs do not overlap, so what is read here can be written here.
    """

    rows: slice
    start: int
    stop: int
    count: int = 1
    stride: int = 0

    def of(self, x: Tensor) -> Tensor:
        """The part as a view [B or count, H, stop - start, ...]."""
        part = x[self.rows, :, self.start : self.stop + (self.count - 1) * self.stride]
        if self.count == 1:
            return part
        runs = part.unfold(2, self.stop - self.start, self.stride)[0]  # [H, count, ..., L]
        return runs.movedim(1, 0).movedim(-1, 2)

    def of_flags(self, flags: Flags) -> Flags:
        """The part of an array [B, S] as a view [B or count, stop - start]."""
        if self.count == 1:
            return flags[self.rows, self.start : self.stop]
        row = flags[self.rows][0, self.start :]
        step = row.strides[0]
        return np.lib.stride_tricks.as_strided(
            row, (self.count, self.stop - self.start), (self.stride * step, step), writeable=True
        )


def major(x: Tensor) -> str:
    """Which of heads and tokens is the outer dim of a tensor [B, H, S, D] in memory; models make "seq"."""
    return "seq" if x.stride(1) < x.stride(2) else "head"


def new_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, major: str) -> Tensor:
    """[B, H, S, ...] with the given order in memory."""
    if major == "head":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty((shape[0], shape[2], shape[1], *shape[3:]), dtype=dtype, device=device).transpose(1, 2)


def laid_out(x: Tensor, major: str) -> Tensor:
    """`x` [B, H, S, ...] in the given order in memory, itself if it has that already."""
    return x.contiguous() if major == "head" else x.transpose(1, 2).contiguous().transpose(1, 2)


def by_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors [..., D] with each row together in memory: fused kernels take that for granted, and else read other values."""
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors)


class Sum:
    """A wide sum of parts. Where a part is the first it is written, not added: no zeros are written to be read again.

    `into`: where the sum is kept; without it a first part that covers everything becomes the sum itself.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, empty: float = 0.0, major: str = "seq",
        into: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.device, self.empty, self.major = tuple(shape), dtype, device, empty, major
        self._sum = into
        self._written = np.zeros((shape[0], shape[2]), dtype=bool)  # [B, S]

    @classmethod
    def like(cls, x: Tensor) -> Sum:
        return cls(tuple(x.shape), lse.wide(x.dtype), x.device)

    def take(self, at: Place, part: Tensor) -> bool:
        """Writes a part where nothing has been written; False if it has to be added to what is there."""
        written = at.of_flags(self._written)
        if self._sum is None and tuple(part.shape) == self.shape:
            self._sum = part.to(self.dtype)
        elif not written.any():
            self.at(at).copy_(part)
        else:
            self._blank(at)
            return False
        written[...] = True
        return True

    def add(self, at: Place, part: Tensor) -> None:
        if not self.take(at, part):
            self.at(at).add_(part)

    def at(self, place: Place) -> Tensor:
        return place.of(self._storage())

    def value(self) -> Tensor:
        self._blank(Place(slice(None), 0, self.shape[2]))
        return self._storage()

    def _storage(self) -> Tensor:
        if self._sum is None:
            self._sum = new_empty(self.shape, self.dtype, self.device, self.major)
        return self._sum

    def _blank(self, at: Place) -> None:
        """Puts `empty` where nothing has been written."""
        written = at.of_flags(self._written)
        if not written.all():
            hole = torch.from_numpy(~written).to(self.device)[:, None]
            target = self.at(at)
            target.masked_fill_(hole[..., None] if target.dim() == 4 else hole, self.empty)
            written[...] = True


class Portioned:
    """One result as a sum for each portion of its heads, kept side by side."""

    def __init__(
        self, shape: tuple[int, ...], like: Tensor, heads: Sequence[slice], empty: float = 0.0, major: str = "seq"
    ) -> None:
        dtype = lse.wide(like.dtype)
        self._whole = new_empty(shape, dtype, like.device, major) if len(heads) > 1 else None
        self.sums = [
            Sum(
                (shape[0], len(range(shape[1])[mine]), *shape[2:]), dtype, like.device, empty, major,
                None if self._whole is None else self._whole[:, mine],
            )
            for mine in heads
        ]  # fmt: skip

    def value(self) -> Tensor:
        values = [total.value() for total in self.sums]
        return values[0] if self._whole is None else self._whole


def merge(out: Sum, norm: Sum, at: Place, part: Tensor, part_norm: Tensor) -> None:
    """Merges a block's output and log-sum-exp into what is there."""
    first = out.take(at, part), norm.take(at, part_norm)
    if not all(first):
        lse.merge_(out.at(at), norm.at(at), part, part_norm)
