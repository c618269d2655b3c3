"""Batches: from a batch of whole sequences to this rank's part of it, and tensors back to whole ones.

What decides who sees whom is read off the whole batch here, since no part of it can tell: document ids, padding, and
packing that only restarting positions tell. B batch, S whole length, S_local this rank's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention import comm, layouts
from ring_attention.comm import Call, Team
from ring_attention.errors import UsageError

IGNORE_INDEX = -100
PER_TOKEN = ("position_ids", "documents", "cache_position")  # also sharded when they have no batch dim


def whole_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """(B, S) of a batch of whole sequences."""
    for name in ("input_ids", "inputs_embeds", "labels", "shift_labels"):
        x = batch.get(name)
        if isinstance(x, Tensor) and x.dim() >= 2:
            return x.shape[0], x.shape[1]
    raise UsageError(f"the batch has no input_ids, inputs_embeds or labels of [B, S]; it has {', '.join(batch) or 'nothing'}")


def documents_of(batch: Mapping[str, Any]) -> Tensor | None:
    """Document ids `[S]` or `[B, S]` of the whole batch, negative at padding; None if everybody is in one document.

    `documents` of the batch count; without them a position that does not follow the one before starts a document.
    """
    shape = whole_shape(batch)
    documents, positions = batch.get("documents"), batch.get("position_ids")
    if documents is not None and tuple(documents.shape) not in (shape, shape[1:]):
        raise UsageError(f"documents are {list(documents.shape)}, expected {list(shape)} or {list(shape[1:])}")
    if documents is None and positions is not None and positions.dim() <= 2:
        rows = torch.atleast_2d(positions)
        starts = rows.diff(dim=1, prepend=rows[:, :1] - 1) != 1
        documents = starts.cumsum(1) if bool(starts.any()) else None
    padding = _padding(batch.get("attention_mask"), shape)
    if padding is not None:
        base = torch.zeros_like(padding, dtype=torch.int64) if documents is None else documents
        documents = base.expand(shape).masked_fill(padding, -1)
    return None if documents is None else documents.detach().to("cpu", torch.int64)


def _padding(attention_mask: Any, shape: tuple[int, int]) -> Tensor | None:
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise UsageError(f"attention_mask must tell padding as {list(shape)}, got {got}; other masks: Mask, documents")
    padding = attention_mask == 0
    return padding if bool(padding.any()) else None


def shard(batch: Mapping[str, Any], layout: layouts.Layout, rank: int) -> dict[str, Any]:
    """This rank's part of a batch, as a new dict; labels are shifted over the whole sequence first."""
    whole = dict(batch)
    shape = B, S = whole_shape(whole)
    labels = whole.pop("labels", None)
    if labels is not None and whole.get("shift_labels") is None:
        whole["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if whole.get("position_ids") is None:
        device = next(x.device for x in whole.values() if isinstance(x, Tensor))
        whole["position_ids"] = torch.arange(S, device=device).expand(B, S)
    _check_positions(whole["position_ids"], S)
    dims = {name: sequence_dim(name, x, shape) for name, x in whole.items()}
    return {name: x if (dim := dims[name]) is None else layout.shard(x, rank, dim) for name, x in whole.items()}


def _check_positions(positions: Tensor, length: int) -> None:
    """Positions that ran over are plain numbers again: only their dtype tells."""
    dtype = positions.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or torch.iinfo(dtype).max < length - 1:
        raise UsageError(
            f"position_ids are {dtype}, which cannot count a sequence of {length} positions; make them with torch.int64"
        )


def sequence_dim(name: str, x: Any, shape: tuple[int, int]) -> int | None:
    """Along which dim a value of the batch is split; None leaves it as it is."""
    if not isinstance(x, Tensor):
        return None
    if tuple(x.shape[:2]) == shape:
        return 1
    if name == "position_ids" and tuple(x.shape[-2:]) == shape:
        return x.dim() - 1
    if name in PER_TOKEN and tuple(x.shape) == (shape[1],):
        return 0
    if name in PER_TOKEN and tuple(x.shape) == (1, shape[1]):
        return 1
    return None


# ------------------------------------------------------------------------------------------------ whole tensors
def unshard(x: Tensor, dim: int, teams: list[Team], layout: str) -> Tensor:
    """The whole tensor in order on every rank. Differentiable: a part's gradient is the sum of all ranks' for it."""
    return Unshard.apply(x, dim % x.dim(), teams, layout)


class Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, teams: list[Team], spec: str) -> Tensor:
        shape = [size for at, size in enumerate(x.shape) if at != dim]
        told = {"call": "unshard", "shape": str(shape), "dim": str(dim), "dtype": str(x.dtype), "layout": spec}
        answer = comm.agree(teams, Call(told, (x.shape[dim], 0)))
        lengths = [mine[0] for mine in answer.lengths]
        layout = layouts.parse(spec, sum(lengths))
        want = [layout.size(rank) for rank in range(layout.world_size)]
        if lengths != want:
            raise UsageError(f"local lengths along dim {dim} are {lengths}, the layout of {sum(lengths)} gives {want}")
        ctx.args = dim, teams, lengths, layout, answer.number
        whole = comm.gather(teams, x.movedim(dim, 0), lengths)
        return whole.index_select(0, layout.inverse().to(x.device)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dim, teams, lengths, layout, number = ctx.args
        told = {"call": "backward of unshard", "shape": str(list(grad.shape)), "order of calls": f"number {number}"}
        comm.agree(teams, Call(told))
        joined = torch.cat([layout.positions(rank) for rank in range(layout.world_size)]).to(grad.device)
        parts = grad.movedim(dim, 0).index_select(0, joined)
        return comm.sum_parts(teams, parts, lengths).movedim(0, dim), None, None, None
