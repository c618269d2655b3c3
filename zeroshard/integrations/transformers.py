"""`transformers.Trainer` with its model and optimizer sharded: one import and one keyword.

    from zeroshard.integrations.transformers import Trainer

    trainer = Trainer(model=model, args=args, train_dataset=data, shard=dict(stage=3))

`TrainerMixin` does the same for any subclass: `class MyTrainer(TrainerMixin, SFTTrainer)`. Overridden is what the Trainer
would do with one rank's view: which accelerator it has, what it writes and reads, and how it counts tokens and losses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import gather_object, get_int_from_env, is_peft_model, recursively_apply
from transformers.trainer import SCHEDULER_NAME

from zeroshard.checkpoint import load, save
from zeroshard.integrations.accelerate import Accelerator, optimizers_of
from zeroshard.integrations.context import transformers_model
from zeroshard.integrations.losses import ContextLabelSmoother, LossScale, without_repeats
from zeroshard.integrations.parallelism import Parallelism
from zeroshard.reading import full_state_dict, gathered

STATE = "zeroshard"  # the folder with model and optimizer states in each checkpoint-N

if TYPE_CHECKING:
    Base: Any = transformers.Trainer
else:
    Base = object  # a mixin: the Trainer comes after it


class TrainerMixin(Base):
    """Put before a Trainer class: `class MyTrainer(TrainerMixin, SFTTrainer)`.

    `shard` holds the keywords of `zeroshard.shard`, e.g. `dict(stage=3)`. Replicas, data and context degrees come from
    `TrainingArguments(parallelism_config=...)`, by default from the YAML's section of that name. With a context degree
    above 1 every rank of one sequence is given the same batch and computes its part of it.

    A step is what one process would do with the batches of all replicas at once: losses, gradient norms, weights and
    evaluation losses are the same. Checkpoints can be resumed by another number of ranks and at another stage.

    Raises ValueError for settings that do not fit or cannot be exact, naming them.
    """

    label_smoother: Any

    def __init__(self, *args: Any, shard: dict[str, Any] | None = None, **kwargs: Any):
        self._shard_options = dict(shard or {})
        given = [a for a in (*args, kwargs.get("args")) if isinstance(a, transformers.TrainingArguments)]
        # Read here: a trainer that converts its arguments (SFTTrainer) loses the config on the way.
        self._parallelism = given[0].parallelism_config if given else None
        super().__init__(*args, **kwargs)
        self._check_settings()
        cp = self.accelerator.context_parallel
        if cp is not None and self.label_smoother is not None:
            self.label_smoother = ContextLabelSmoother(self.label_smoother, cp)
        if hasattr(self, "_tp_size"):  # of TRL, whose count of tokens is divided by it
            self._tp_size = self.accelerator.context_parallel_size
        self._loss_scale = LossScale(self)

    # ------------------------------------------------------------------------------------------------ accelerator

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)
        config = self._parallelism or built.get("parallelism_config")
        built["parallelism_config"] = Parallelism.read(config, self.args.world_size)
        return built

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.world_size == 1 and get_int_from_env(["WORLD_SIZE"], 1) > 1:
            raise ValueError("Each rank takes itself for the only one: on CPU, set TrainingArguments(use_cpu=True).")
        super().create_accelerator_and_postprocess()
        Accelerator.adopt(self.accelerator, self._shard_options)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _check_settings(self) -> None:
        if self.args.n_gpu > 1:
            raise ValueError(
                f"This process has {self.args.n_gpu} GPUs, over which the Trainer would replicate the model. "
                "Start one process per GPU: accelerate launch or torchrun."
            )
        if self.accelerator.num_replicas > 1 and not self.accelerator.even_batches:
            raise ValueError("accelerator_config: even_batches=False leaves ranks without a batch. Leave it out.")
        if self.args.bf16_full_eval or self.args.fp16_full_eval:
            raise ValueError(
                "bf16_full_eval and fp16_full_eval convert the model, but shards keep their dtype. Use bf16=True, or "
                "shard=dict(precision=zeroshard.Precision(compute=torch.bfloat16))."
            )
        if self.accelerator.context_parallel is None:
            return
        inexact = {
            "compute_loss_func": (self.compute_loss_func, "gets one rank's logits with the labels of all"),
            "neftune_noise_alpha": (self.neftune_noise_alpha, "scales its noise by one rank's length of a sequence"),
        }
        for name, (value, reason) in inexact.items():
            if value is not None:
                raise ValueError(f"{name} {reason} when ranks share a sequence. Leave it out, or set cp_size to 1.")

    # ------------------------------------------------------------------------------------------------ losses, counts

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the Trainer's; in evaluation without the rows that only fill up the last batch."""
        if not model.training and "labels" in inputs and self._counts_over_ranks():
            inputs = without_repeats(inputs, self.accelerator)
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        scale = self._loss_scale.factor(model, inputs, num_items_in_batch)
        answer = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if scale is None:
            return answer
        return (scale(answer[0]), answer[1]) if return_outputs else scale(answer)

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As the Trainer's; the loss is that of whole batches, and predictions are those of whole sequences."""
        length = next((x.shape[1] for n in ("input_ids", "inputs_embeds") if torch.is_tensor(x := inputs.get(n))), None)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if loss is not None:
            parts = self.accelerator.gather(loss.reshape(1)).view(self.accelerator.num_replicas, -1).mean(1)
            loss = parts.mean() if self._counts_over_ranks() else parts[self.accelerator.replica]
        cp = self.accelerator.context_parallel
        if cp is not None and logits is not None and length is not None:
            local = len(cp.positions(length))

            def whole(x: torch.Tensor) -> torch.Tensor:
                return cp.unshard(x, dim=1) if x.dim() > 1 and x.shape[1] == local else x

            logits = recursively_apply(whole, logits)
        return loss, logits, labels

    def _counts_over_ranks(self) -> bool:
        """Whether a rank's loss is its part of the mean over all ranks' targets, and -100 is no target."""
        known = isinstance(transformers_model(self.model), transformers.PreTrainedModel)
        return known and self.model_accepts_loss_kwargs and self.args.average_tokens_across_devices

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Of this rank: context ranks share one batch."""
        return super().floating_point_ops(inputs) // self.accelerator.context_parallel_size

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        seen_by_all = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen_by_all // self.accelerator.context_parallel_size

    # ------------------------------------------------------------------------------------------------ checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A folder for `from_pretrained`, of adapters alone for a PEFT model. Every rank must call it."""
        if "_zeroshard" not in self.model.__dict__:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        state = full_state_dict(
            self.model, trainable_only=_adapters_are_trainable(self.model), rank0_only=not self.args.save_on_each_node
        )
        prompts = _prompt_parameters(self.model)
        with gathered(prompts) if prompts else contextlib.nullcontext():
            self._write(output_dir, lambda: self._save(output_dir, state_dict=state))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write(self, path: str, write: Callable[[], None]) -> None:
        """`write()` on ranks that save; what goes wrong there is raised on all, so that none waits for another."""
        problem = None
        if self.args.should_save:
            try:
                write()
            except Exception as error:
                problem = f"rank {self.args.process_index}: {type(error).__name__}: {error}"
        problems = [p for p in gather_object([problem]) if p is not None]
        if problems:
            raise OSError(f"{path} could not be written: {problems[0]}")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # The base under adapters does not change: it is no more part of the checkpoint than of the model's folder.
        only = is_peft_model(self.model) and _adapters_are_trainable(self.model)
        save(pathlib.Path(output_dir, STATE), self.model, optimizers_of(self.model), trainable_only=only)
        path = os.path.join(output_dir, SCHEDULER_NAME)
        self._write(path, lambda: torch.save(self.lr_scheduler.state_dict(), path))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Weights of a checkpoint with `STATE` are read once the model is sharded, by each rank its own."""
        if not pathlib.Path(resume_from_checkpoint, STATE).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not pathlib.Path(checkpoint, STATE).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load(pathlib.Path(checkpoint, STATE), self.model, optimizers_of(self.model))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_best_model(self) -> None:
        best = pathlib.Path(self.state.best_model_checkpoint, STATE)
        if best.is_dir():
            load(best, self.model)
        else:  # save_only_model: whole weights, of which each rank takes its own
            super()._load_best_model()


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer(...)` with the keyword `shard`; see `TrainerMixin`."""


def _adapters_are_trainable(model: Any) -> bool:
    """Whether all that PEFT writes of `model` is trained; a frozen adapter or a resized embedding is not."""
    if not is_peft_model(model):
        return False
    from peft import get_peft_model_state_dict

    named = model.state_dict(keep_vars=True)
    written: set[int] = set()
    for adapter, config in model.peft_config.items():
        if not config.is_prompt_learning:  # which computes what it writes
            written |= {id(x) for x in get_peft_model_state_dict(model, state_dict=dict(named), adapter_name=adapter).values()}
    return written <= {id(p) for p in model.parameters() if p.requires_grad}


def _prompt_parameters(model: Any) -> list[torch.nn.Parameter]:
    """What PEFT computes with while it writes learned prompts; empty for other models."""
    encoder = getattr(model, "prompt_encoder", None) if is_peft_model(model) else None
    return list(encoder.parameters()) if encoder is not None else []
