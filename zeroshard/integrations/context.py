"""A transformers model whose `model(**batch)` takes the whole batch on every context rank and computes its own part."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ring_attention import ContextParallel


def context_parallel(mesh: Any) -> ContextParallel:
    """A `ContextParallel` over `mesh`; the package is imported only when one is asked for."""
    from ring_attention import ContextParallel

    return ContextParallel(mesh)


def transformers_model(module: torch.nn.Module) -> torch.nn.Module | None:
    """The outermost module inside `module` whose attention can be chosen by name, e.g. the model inside a PEFT one."""
    return next((m for m in module.modules() if hasattr(m, "set_attn_implementation")), None)


def attach(model: torch.nn.Module, cp: ContextParallel) -> None:
    """Makes the attention inside `model` see the whole sequence, and `model(**batch)` take a whole batch.

    A module of the user's own around a transformers model gets the attention only: what its `forward` takes and returns
    is not ours to guess. Its loop says `with cp: model(**cp.shard(batch))`.
    """
    inner = transformers_model(model)
    if inner is not None:
        cp.attach(inner)
    if inner is model or (inner is not None and hasattr(model, "get_base_model")):
        _split_batches(model, cp)


def _split_batches(model: torch.nn.Module, cp: ContextParallel) -> None:
    whole = model.forward.__func__  # type: ignore[attr-defined]

    @functools.wraps(whole)
    def forward(self: torch.nn.Module, *args: Any, **batch: Any) -> Any:
        if cp.active or not _is_sequence(batch):  # generation is local
            return whole(self, *args, **batch)
        with cp:
            return whole(self, *args, **split_batch(batch, cp))

    # The same way accelerate wraps forward for autocast: names, types and hooks of the model stay what they were.
    model.forward = types.MethodType(forward, model)


def _is_sequence(batch: dict[str, Any]) -> bool:
    generation = ("cache", "past_key_values", "logits_to_keep")
    return torch.is_tensor(batch.get("input_ids")) and all(batch.get(name) is None for name in generation)


def split_batch(batch: dict[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """This rank's part of `batch`, with the loss of transformers scaled so that averaging over all ranks is exact.

    transformers divides the sum over the local tokens by `num_items_in_batch`. A context rank holds an arbitrary share
    of the valid tokens, so the divisor is the whole batch's count over the number of context ranks.
    """
    labels, already_shifted = batch.get("labels"), batch.get("shift_labels")
    part = cp.shard(batch)
    if labels is None:
        return part
    if already_shifted is None:
        already_shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    if part.get("num_items_in_batch") is None:
        part["num_items_in_batch"] = (already_shifted != -100).sum() / cp.world_size
    part["labels"] = part["shift_labels"]  # only has to be there: given shift_labels, the loss reads nothing else
    return part
