"""A transformers model whose `model(**batch)` takes the whole batch on every context rank and computes its own part."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ring_attention import ContextParallel

GENERATION = ("past_key_values", "cache", "logits_to_keep")  # a forward with one of these generates, which is local


def context_parallel(mesh: Any) -> ContextParallel:
    """A `ContextParallel` over `mesh`; the package is imported only when one is asked for."""
    from ring_attention import ContextParallel

    return ContextParallel(mesh)


def transformers_model(module: torch.nn.Module) -> torch.nn.Module | None:
    """The outermost module inside `module` whose attention can be chosen by name, e.g. the model inside a PEFT one."""
    return next((m for m in module.modules() if hasattr(type(m), "set_attn_implementation")), None)  # PEFT's forward it


def attach(model: torch.nn.Module, cp: ContextParallel) -> None:
    """Makes the attention inside `model` see the whole sequence, and `model(**batch)` take a whole batch.

    A module of the user's own around a transformers model gets the attention only: what its `forward` takes and returns
    is not ours to guess. Its loop says `with cp: model(**cp.shard(batch))`.

    Raises ValueError for a model that answers for a sequence as a whole, or puts tokens of its own before it.
    """
    inner = transformers_model(model)
    if inner is not None:
        cp.attach(inner)
    if inner is model or (inner is not None and hasattr(model, "get_base_model")):
        _refuse_whole_answers(model, inner)
        _split_batches(model, inner, cp)


def _split_batches(model: torch.nn.Module, inner: torch.nn.Module, cp: ContextParallel) -> None:
    whole = model.forward.__func__  # type: ignore[attr-defined]

    @functools.wraps(whole)
    def forward(self: torch.nn.Module, *args: Any, **batch: Any) -> Any:
        if cp.active or not _is_sequence(batch):  # generation is local
            return whole(self, *args, **batch)
        if batch.get("labels") is not None:
            _refuse_other_losses(inner)
        with cp:
            return whole(self, *args, **split_batch(batch, cp))

    # The same way accelerate wraps forward for autocast: names, types and hooks of the model stay what they were.
    model.forward = types.MethodType(forward, model)


def _is_sequence(batch: dict[str, Any]) -> bool:
    has_tokens = any(torch.is_tensor(batch.get(name)) for name in ("input_ids", "inputs_embeds"))
    return has_tokens and all(batch.get(name) is None for name in GENERATION)


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


# --------------------------------------------------------------------------------------------------- what is refused


def _losses() -> Any:
    from transformers.loss import loss_utils

    return loss_utils


def _refuse_whole_answers(model: torch.nn.Module, inner: torch.nn.Module) -> None:
    losses, kind = _losses(), getattr(inner, "loss_type", None)
    per_token = (losses.ForCausalLMLoss, losses.ForMaskedLMLoss, losses.ForTokenClassification)
    if kind in losses.LOSS_MAPPING and losses.LOSS_MAPPING[kind] not in per_token:
        raise ValueError(
            f"{type(inner).__name__} ({kind}) answers for a sequence as a whole, of which a context rank has a part. "
            "Set cp_size to 1, or split its backbone yourself: `with cp: backbone(**cp.shard(batch))`."
        )
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"adapter {name!r} ({config.peft_type}) puts tokens of its own before a sequence; each context rank would "
                "put them before its part. Use LoRA, or set cp_size to 1."
            )


def _refuse_other_losses(inner: Any) -> None:
    """Of losses that a model computes by itself, only that of the next token is known to add up over ranks."""
    if inner.loss_function is not _losses().ForCausalLMLoss:
        raise ValueError(
            f"the loss of {type(inner).__name__} is not that of the next token, and is not split over context ranks. "
            "Call the model without labels and use cp.cross_entropy, or set cp_size to 1."
        )
    if getattr(inner.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            f"{type(inner).__name__}: the router's auxiliary loss is not a sum over tokens, so it is not that of the whole "
            "sequence on context ranks. Set config.output_router_logits to False, or cp_size to 1."
        )
