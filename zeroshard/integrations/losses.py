"""Losses of a Trainer, made those of all ranks' batches: what its counts mean when ranks have different or shared rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

if TYPE_CHECKING:
    from ring_attention import ContextParallel

IGNORED = -100


def without_repeats(inputs: dict[str, Any], accelerator: Any) -> dict[str, Any]:
    """Without targets in the rows that fill up an epoch's last batch: they were counted at its beginning.

    Only integer `labels` can say so; others are returned as they are.
    """
    labels, state = inputs["labels"], accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0 or not torch.is_tensor(labels) or labels.is_floating_point():
        return inputs
    rows = accelerator.replica * len(labels) + torch.arange(len(labels), device=labels.device)
    repeated = (rows >= state.remainder).view(-1, *[1] * (labels.dim() - 1))
    return {**inputs, "labels": labels.masked_fill(repeated, IGNORED)}


class ContextLabelSmoother:
    """A Trainer's label smoother for the logits of one context rank. It is given the labels of the whole sequence."""

    def __init__(self, smoother: Any, cp: ContextParallel):
        self._smoother, self._cp = smoother, cp

    def __call__(
        self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if shift_labels:
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED).sum() / self._cp.world_size
        return self._smoother(model_output, self._cp.shard(labels), num_items_in_batch=num_items_in_batch)


class LossScale:
    """Finds out whether a model's loss is divided by the `num_items_in_batch` it is given, and puts right one that is not.

    The Trainer gives the count of all ranks to every model that takes any keyword and multiplies the loss by the number
    of ranks. A model that ignores the count (heads for classification do) would train on a multiple of its loss. Its
    ranks' means are weighted by what each is a mean of.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._ignores_count: dict[int, bool] = {}

    def factor(
        self, model: torch.nn.Module, inputs: dict[str, Any], count: Any
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What the loss of this batch has to go through; None if nothing. Every rank must call it."""
        trainer = self._trainer
        scaled = trainer.args.average_tokens_across_devices and trainer.args.world_size > 1
        if not (scaled and trainer.model_accepts_loss_kwargs and count is not None and torch.is_tensor(inputs.get("labels"))):
            return None
        if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
            return None
        if not self._is_ignored_by(model, inputs, count):
            return None
        mine = (inputs["labels"] != IGNORED).sum()
        share = mine / trainer.accelerator.gather(mine).sum().clamp(min=1)
        return lambda loss: torch.where(mine > 0, loss, torch.zeros_like(loss)) * share

    def _is_ignored_by(self, model: torch.nn.Module, inputs: dict[str, Any], count: torch.Tensor) -> bool:
        base = self._trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        if "loss_function" in inspect.unwrap(type(base).forward).__code__.co_names and base.loss_function is ForCausalLMLoss:
            return False
        if id(base) not in self._ignores_count:
            self._ignores_count[id(base)] = self._try(model, inputs, count)
        return self._ignores_count[id(base)]

    @torch.no_grad()
    def _try(self, model: torch.nn.Module, inputs: dict[str, Any], count: torch.Tensor) -> bool:
        """Whether twice the count leaves the loss as it is. Without dropout, so that nothing else differs."""
        training = model.training
        model.eval()
        outputs = [model(**inputs, num_items_in_batch=times * count) for times in (1, 2)]
        model.train(training)
        once, twice = [(o["loss"] if isinstance(o, dict) else o[0]).detach().abs() for o in outputs]
        told = torch.stack([twice > 0.75 * once]) & (once > 0)  # half of it, or all
        return bool(self._trainer.accelerator.gather(told).any())
