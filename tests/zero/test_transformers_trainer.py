"""zeroshard.integrations.transformers: a Trainer on ranks, against the stock Trainer in one process.

A `Job` says what is trained; `work` does it with either Trainer. The ranks' batches of one step are one batch of the
reference, so losses, gradient norms, weights, evaluation losses and predictions are compared one by one.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import RankPools, assert_equal
from tests.zero.test_accelerate import launched

VOCABULARY, LENGTH, ROWS, EVAL_ROWS = 61, 18, 24, 7  # 7: the last evaluation batch is not full
PER_STEP = 4  # rows of all replicas in a micro-batch


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and how. `settings` are those of TrainingArguments."""

    name: str
    data: str = "padded"
    adapter: str = ""  # "lora" or "dora"
    head: str = "causal"  # or "classes", "masked"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)


JOBS = {
    job.name: job
    for job in [
        Job("padded", settings={"gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "lr_scheduler_type": "cosine"}),
        Job("left padded", data="left"),
        Job("packed", data="packed"),
        Job("smoothed", settings={"label_smoothing_factor": 0.2, "max_grad_norm": 0}),
        Job("recomputed", settings={"gradient_checkpointing": True}),
        Job("lora", adapter="lora", settings={"gradient_accumulation_steps": 2, "gradient_checkpointing": True}),
        Job("dora", adapter="dora"),
        Job("classes", data="classes", head="classes"),
        Job("masked", head="masked"),
        Job("per rank", settings={"average_tokens_across_devices": False}),
    ]
}


def model_for(job: Job) -> Any:
    import transformers

    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    }  # fmt: skip
    if job.head == "masked":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**config, **quiet)).double()
    llama = transformers.LlamaConfig(**config, num_key_value_heads=2, num_labels=5)
    kind = {"causal": transformers.LlamaForCausalLM, "classes": transformers.LlamaForSequenceClassification}[job.head]
    model = kind(llama).double()
    if not job.adapter:
        return model
    import peft

    adapted = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=job.adapter == "dora", lora_alpha=8)
    model = peft.get_peft_model(model, adapted)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first: let the other half have a gradient, too
            torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def rows(job: Job, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Sequences that hold very different numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        used = 3 + 5 * number % (LENGTH - 3)
        mask = torch.arange(LENGTH) < used
        if job.data == "left":
            mask = mask.flip(0)
        row = {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
        if job.data == "classes":
            row["labels"] = torch.tensor(number % 5)
        elif job.data == "packed":
            positions = torch.arange(LENGTH) - torch.where(mask, 0, used)
            row = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
        made.append(row)
    return made


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    if labels.ndim > 1:
        logits, labels = logits[:, :-1], labels[:, 1:]
    right = (logits.argmax(-1) == labels)[labels != -100]
    return {"accuracy": float(right.mean()), "targets": int((labels != -100).sum())}


def targets_of(prediction: Any) -> Tensor:
    """Logits without those of padding, which mean nothing and are zero where sequences are split."""
    logits, labels = torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids)
    return logits[labels != -100] if labels.dim() > 1 else logits


def arguments(job: Job, folder: pathlib.Path, replicas: int, **more: Any) -> Any:
    import transformers

    settings = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 5,
        "per_device_train_batch_size": PER_STEP // replicas, "per_device_eval_batch_size": PER_STEP // replicas,
        "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", "learning_rate": 0.02, "adam_epsilon": 1e-2,
        "max_grad_norm": 1.0, "weight_decay": 0.1, "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**settings | job.settings | more)


def build(job: Job, folder: pathlib.Path, replicas: int, kind: Any, more: dict[str, Any], **keywords: Any) -> Any:
    import transformers

    return kind(
        model=model_for(job), args=arguments(job, folder, replicas, **more), train_dataset=rows(job, ROWS, 1),
        eval_dataset=rows(job, EVAL_ROWS, 2), data_collator=transformers.default_data_collator,
        compute_metrics=accuracy, **keywords,
    )  # fmt: skip


def work(trainer: Any) -> dict[str, Any]:
    """Evaluates before, trains with evaluations on the way, evaluates and predicts after."""
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    prediction = trainer.predict(trainer.eval_dataset)
    kept = ("eval_loss", "eval_accuracy", "eval_targets")
    return {
        "evaluations": [{name: m[name] for name in kept} for m in (before, after)],
        "steps": [{n: float(log[n]) for n in ("loss", "grad_norm", "learning_rate")} for log in steps_of(trainer)],
        "predictions": targets_of(prediction),
        "labels": torch.from_numpy(prediction.label_ids),
        "flos": float(trainer.state.total_flos),
    }


def steps_of(trainer: Any) -> list[dict[str, Any]]:
    return [log for log in trainer.state.log_history if "grad_norm" in log]


def weights_of(model: Any) -> dict[str, Tensor]:
    import zeroshard

    if "_zeroshard" in model.__dict__:
        return zeroshard.full_state_dict(model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One process, whatever accelerate thinks of earlier tests."""
    with launched(0, 1):
        yield


@functools.cache
def reference(name: str, folder: str) -> dict[str, Any]:
    import transformers

    with alone():
        trainer = build(JOBS[name], pathlib.Path(folder), 1, transformers.Trainer, {})
        return work(trainer) | {"weights": weights_of(trainer.model)}


def run_jobs(rank: int, world: int, names: list[str], stage: int, sizes: dict[str, int], folder: str) -> list[dict[str, Any]]:
    from zeroshard.integrations.transformers import Trainer

    done = []
    for name in names:
        with launched(rank, world, **sizes):
            replicas = world // sizes.get("cp_size", 1)
            trainer = build(JOBS[name], pathlib.Path(folder, name), replicas, Trainer, {}, shard={"stage": stage})
            result = work(trainer)
            assert trainer.model is trainer.model_wrapped and "_zeroshard" in trainer.model.__dict__
            done.append(result | {"weights": weights_of(trainer.model)})
    return done


SPLITS = [
    (2, 3, {}, ["padded", "left padded", "smoothed", "lora", "dora", "classes", "masked"]),
    (2, 1, {}, ["recomputed", "packed"]),
    (2, 3, {"cp_size": 2}, ["padded", "left padded", "packed", "smoothed", "recomputed", "lora", "per rank"]),
    (4, 2, {"dp_shard_size": 2, "cp_size": 2}, ["padded", "dora"]),
]


@pytest.mark.parametrize(("world", "stage", "sizes", "names"), SPLITS, ids=["data", "stage 1", "context", "data x context"])
def test_a_job_on_ranks_is_that_of_one_process(
    ranks: RankPools, tmp_path: pathlib.Path, world: int, stage: int, sizes: dict[str, int], names: list[str]
) -> None:
    by_rank = ranks(world).run(run_jobs, names, stage, sizes, str(tmp_path), timeout=240)
    wrong = []
    for results in by_rank:
        for name, got in zip(names, results, strict=True):
            try:
                assert_equal(got, reference(name, str(tmp_path / "alone")), atol=2e-5, rtol=2e-5)
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


# --------------------------------------------------------------------------------------------- saving, resuming


EVERY = {
    "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    "save_total_limit": 9, "include_num_input_tokens_seen": "all", "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}  # fmt: skip


def run_resumable(
    rank: int, world: int, name: str, folder: str, stage: int, sizes: dict[str, int], resume: str | None, only_model: bool
) -> dict[str, Any]:
    from transformers import TrainerCallback

    from zeroshard.integrations.transformers import Trainer

    class Recorder(TrainerCallback):
        """What callbacks of the user see, at which step."""

        seen: list[tuple[str, int]] = []  # noqa: RUF012 (one recorder per run)

        def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
            assert about["model"] is trainer.model
            self.seen.append(("step", state.global_step))

        def on_save(self, args: Any, state: Any, control: Any, **about: Any) -> None:
            self.seen.append(("save", state.global_step))

    recorder = Recorder()
    recorder.seen = []
    with launched(rank, world, **sizes):
        replicas = world // sizes.get("cp_size", 1)
        more = EVERY | {"save_only_model": only_model}
        trainer = build(
            JOBS[name], pathlib.Path(folder), replicas, Trainer, more, shard={"stage": stage}, callbacks=[recorder]
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(pathlib.Path(folder, "result")))
        return {
            "steps": [float(log["loss"]) for log in steps_of(trainer)],
            "weights": weights_of(trainer.model),
            "best": trainer.state.best_model_checkpoint,
            "tokens": trainer.state.num_input_tokens_seen,
            "seen": recorder.seen,
        }


def reference_of_two_epochs(name: str, folder: pathlib.Path) -> dict[str, Any]:
    import transformers

    with alone():
        trainer = build(JOBS[name], folder, 1, transformers.Trainer, EVERY)
        trainer.train()
        return {
            "steps": [float(log["loss"]) for log in steps_of(trainer)],
            "weights": weights_of(trainer.model),
            "best": trainer.state.best_model_checkpoint,
            "tokens": trainer.state.num_input_tokens_seen,
        }


def test_resumed_by_other_ranks_at_another_stage(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    """Two ranks at stage 3; then two that share sequences at stage 2; then one process: the best model in the end, too."""
    want = reference_of_two_epochs("padded", tmp_path / "alone")
    first = ranks(2).run(run_resumable, "padded", str(tmp_path / "run"), 3, {}, None, False, timeout=120)[0]
    assert [kind for kind, _ in first["seen"]].count("step") == 6 and ("save", 4) in first["seen"]
    middle = tmp_path / "run" / "checkpoint-4"
    for sizes, stage in (({"cp_size": 2}, 2), ({}, 1)):
        for got in ranks(2).run(run_resumable, "padded", str(tmp_path / "run"), stage, sizes, str(middle), False, timeout=120):
            assert_equal(got["steps"], want["steps"], atol=2e-5)
            assert_equal(got["weights"], want["weights"], atol=2e-5)
            assert pathlib.Path(got["best"]).name == pathlib.Path(want["best"]).name
            assert got["tokens"] == want["tokens"]
    from zeroshard.integrations.transformers import Trainer

    with alone():
        trainer = build(JOBS["padded"], tmp_path / "run", 1, Trainer, EVERY, shard={"stage": 3})
        trainer.train(resume_from_checkpoint=str(middle))
        assert_equal(weights_of(trainer.model), want["weights"], atol=2e-5)
    import transformers

    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "result")
    assert type(opened).__name__ == "LlamaForCausalLM" and opened.dtype == torch.float64
    assert_equal(dict(opened.state_dict()), got["weights"])  # of the last run on ranks, which wrote that folder
    assert json.loads((tmp_path / "run" / "result" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_checkpoints_of_adapters_hold_adapters(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    """Neither the folder for PEFT nor the states have the base in them; both give the run back."""
    import peft

    from zeroshard.checkpoint.index import read_index

    want = reference_of_two_epochs("dora", tmp_path / "alone")
    first = ranks(2).run(run_resumable, "dora", str(tmp_path / "run"), 3, {}, None, False, timeout=120)[0]
    assert_equal(first["weights"], want["weights"], atol=2e-5)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    held = [name for name in read_index(checkpoint / "zeroshard").metadata.state_dict_metadata if name.startswith("model.")]
    assert len(held) == 12 and all("lora" in name for name in held)
    assert (checkpoint / "adapter_config.json").is_file() and not list(checkpoint.glob("model*"))
    again = {"stage": 1, "sizes": {"cp_size": 2}, "resume": str(checkpoint), "only_model": False}
    for got in ranks(2).run(run_resumable, "dora", str(tmp_path / "run"), **again, timeout=120):
        assert_equal(got["steps"], want["steps"], atol=2e-5)
        assert_equal(got["weights"], want["weights"], atol=2e-5)
    opened = peft.PeftModel.from_pretrained(model_for(JOBS["padded"]), tmp_path / "run" / "result")
    assert_equal(dict(opened.state_dict()), got["weights"])


def test_weights_alone_are_enough_for_the_best_model(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    """save_only_model: whole weights are loaded into a sharded model; a checkpoint of the stock Trainer is resumed."""
    for name in ("padded", "lora"):
        want = reference_of_two_epochs(name, tmp_path / name)
        kept = str(tmp_path / f"kept {name}")
        got = ranks(2).run(run_resumable, name, kept, 3, {}, None, True, timeout=120)[1]
        assert_equal(got["weights"], want["weights"], atol=2e-5)
        assert not (pathlib.Path(kept) / "checkpoint-4" / "zeroshard").exists()
        stock = str(tmp_path / name / "checkpoint-4")
        resumed = ranks(2).run(run_resumable, name, kept, 3, {}, stock, True, timeout=120)[0]
        assert_equal(resumed["steps"], want["steps"], atol=2e-5)


def run_twice(rank: int, world: int, folder: str) -> tuple[list[float], list[float]]:
    from zeroshard.integrations.transformers import Trainer

    with launched(rank, world):
        trainer = build(JOBS["padded"], pathlib.Path(folder), world, Trainer, {}, shard={"stage": 3})
        trainer.train()
        first = [float(log["loss"]) for log in steps_of(trainer)]
        trainer.train()
        return first, [float(log["loss"]) for log in steps_of(trainer)]


def test_train_twice_and_a_disk_that_is_full(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    import transformers

    with alone():
        trainer = build(JOBS["padded"], tmp_path, 1, transformers.Trainer, {})
        trainer.train()
        trainer.train()
        want = [float(log["loss"]) for log in steps_of(trainer)]
    for _, second in ranks(2).run(run_twice, str(tmp_path)):
        assert_equal(second, want, atol=2e-5)
    (tmp_path / "file").write_text("")
    for message in ranks(2).run(run_unwritable, str(tmp_path)):
        assert "rank 0" in message and "file" in message


def run_unwritable(rank: int, world: int, folder: str) -> str:
    from zeroshard.integrations.transformers import Trainer

    with launched(rank, world):
        trainer = build(JOBS["padded"], pathlib.Path(folder), world, Trainer, {"max_steps": 1}, shard={"stage": 3})
        trainer.train()
        with pytest.raises(OSError) as caught:
            trainer.save_model(str(pathlib.Path(folder, "file", "inside")))
        return str(caught.value)


# ------------------------------------------------------------------------------------------------------- SFTTrainer


def sft(kind: Any, folder: pathlib.Path, replicas: int, packing: bool, **more: Any) -> Any:
    import datasets
    import peft
    import transformers
    import trl

    settings = arguments(JOBS["padded"], folder, replicas, max_grad_norm=1.0).to_dict()
    names = {field.name for field in dataclasses.fields(trl.SFTConfig) if field.init}
    chosen = {name: value for name, value in settings.items() if name in names and value is not None}
    chosen |= {"packing": packing, "max_length": 24, "gradient_checkpointing": False, "dataset_kwargs": None}
    chosen.pop("accelerator_config", None)
    data = {"input_ids": [row["input_ids"][: 4 + 5 * n % 12].tolist() for n, row in enumerate(rows(JOBS["packed"], ROWS, 1))]}
    return kind(
        model=model_for(JOBS["padded"]), args=trl.SFTConfig(**chosen), train_dataset=datasets.Dataset.from_dict(data),
        eval_dataset=datasets.Dataset.from_dict({name: values[:EVAL_ROWS] for name, values in data.items()}),
        processing_class=transformers.ByT5Tokenizer(extra_ids=0),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]) if more.pop("adapter", False) else None, **more,
    )  # fmt: skip


def work_sft(trainer: Any) -> dict[str, Any]:
    trainer.train()
    evaluated = trainer.evaluate()
    names = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")
    return {
        "steps": [{name: float(log[name]) for name in names} for log in steps_of(trainer)],
        "eval_loss": float(evaluated["eval_loss"]),
        "weights": weights_of(trainer.model),
    }


def run_sft(rank: int, world: int, folder: str, stage: int, sizes: dict[str, int], packing: bool, adapter: bool) -> Any:
    from trl import SFTTrainer

    from zeroshard.integrations.transformers import TrainerMixin

    class Sharded(TrainerMixin, SFTTrainer):
        pass

    with launched(rank, world, **sizes):
        replicas = world // sizes.get("cp_size", 1)
        trainer = sft(Sharded, pathlib.Path(folder), replicas, packing, adapter=adapter, shard={"stage": stage})
        return work_sft(trainer)


@pytest.mark.parametrize(
    ("stage", "sizes", "packing", "adapter"),
    [(3, {}, False, False), (3, {"cp_size": 2}, True, False), (2, {"cp_size": 2}, False, True)],
    ids=["data", "context, packed", "context, LoRA"],
)
def test_sft_trainer(
    ranks: RankPools, tmp_path: pathlib.Path, stage: int, sizes: dict[str, int], packing: bool, adapter: bool
) -> None:
    from trl import SFTTrainer

    with alone():
        want = work_sft(sft(SFTTrainer, tmp_path / "alone", 1, packing, adapter=adapter))
    for got in ranks(2).run(run_sft, str(tmp_path / "run"), stage, sizes, packing, adapter, timeout=120):
        assert_equal(got, want, atol=5e-5, rtol=1e-5)


# ----------------------------------------------------------------------------------------------- what is refused


def run_refusals(rank: int, world: int, folder: str) -> None:
    import peft

    from zeroshard.integrations.transformers import Trainer

    here = pathlib.Path(folder)
    padded, options = JOBS["padded"], {"shard": {"stage": 3}}
    context = {"cp_size": 2}
    refused: list[tuple[str, dict[str, int], Job, dict[str, Any], dict[str, Any]]] = [
        ("compute_loss_func", context, padded, {}, {"compute_loss_func": lambda *args, **kwargs: 0.0}),
        ("neftune_noise_alpha", context, padded, {"neftune_noise_alpha": 5.0}, {}),
        ("dispatch_batches", context, padded, {"accelerator_config": {"dispatch_batches": True}}, {}),
        ("use_cpu=True", {}, padded, {"use_cpu": False}, {}),
        ("even_batches", {}, padded, {"accelerator_config": {"even_batches": False}}, {}),
        ("bf16_full_eval", {}, padded, {"bf16_full_eval": True}, {}),
        ("fp16 does nothing", {}, padded, {"fp16": True}, {}),
        ("tp_size=2", {"tp_size": 2}, padded, {}, {}),
        ("answers for a sequence as a whole", context, JOBS["classes"], {}, {}),
        ("loss of BertForMaskedLM is not that of the next token", context, JOBS["masked"], {}, {}),
    ]
    for words, sizes, job, settings, keywords in refused:
        with launched(rank, world, **sizes), pytest.raises(ValueError, match=words):
            build(job, here, 1, Trainer, settings, **options, **keywords).train()
    with launched(rank, world, **context), pytest.raises(ValueError, match="puts tokens of its own before a sequence"):
        trainer = build(padded, here, 1, Trainer, {}, **options)
        prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        trainer.accelerator.prepare_model(peft.get_peft_model(model_for(padded), prompts))


def test_what_cannot_be_exact_is_refused_by_name(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(run_refusals, str(tmp_path), timeout=120)


def run_from_arguments(rank: int, world: int, folder: str) -> list[float]:
    from accelerate.utils import ParallelismConfig

    from zeroshard.integrations.transformers import Trainer

    class Endless(torch.utils.data.IterableDataset):
        """Of no known length: accelerate's own loader would give every rank, context ranks too, other rows."""

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            while True:
                yield from rows(JOBS["padded"], ROWS, 1)

    with launched(rank, world):
        more = {"parallelism_config": ParallelismConfig(cp_size=2), "max_steps": 3}
        trainer = build(JOBS["padded"], pathlib.Path(folder), 1, Trainer, more, shard={"stage": 3})
        trainer.train_dataset = Endless()
        trainer.train()
        assert trainer.accelerator.context_parallel_size == 2
        return [float(log["loss"]) for log in steps_of(trainer)]


def test_degrees_in_the_arguments_and_data_without_length(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    import transformers

    with alone():
        trainer = build(JOBS["padded"], tmp_path, 1, transformers.Trainer, {"max_steps": 3})
        data = rows(JOBS["padded"], ROWS, 1)
        trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(data)
        trainer.train()
        want = [float(log["loss"]) for log in steps_of(trainer)]
    for got in ranks(2).run(run_from_arguments, str(tmp_path)):
        assert_equal(got, want, atol=2e-5)


def test_private_names_that_are_relied_upon() -> None:
    """The Trainer has no extension point for these; a release that moves them must fail here, not in a training."""
    import transformers
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    from transformers.trainer import SCHEDULER_NAME
    from transformers.trainer_pt_utils import LabelSmoother
    from trl import SFTTrainer

    called = {
        "_build_accelerator_args": ["kwargs"],
        "create_accelerator_and_postprocess": [],
        "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
        "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
        "floating_point_ops": ["inputs"],
        "_track_num_input_tokens": ["inputs"],
        "save_model": ["output_dir", "_internal_call"],
        "_save": ["output_dir", "state_dict"],
        "_save_optimizer_and_scheduler": ["output_dir"],
        "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
        "_load_optimizer_and_scheduler": ["checkpoint"],
        "_load_best_model": [],
        "_get_num_items_in_batch": ["batch_samples", "device"],
    }
    for name, parameters in called.items():
        assert list(inspect.signature(getattr(transformers.Trainer, name)).parameters) == ["self", *parameters], name
    source = inspect.getsource(transformers.Trainer)
    for name in ("self.gather_function", "self.label_smoother", "self.model_accepts_loss_kwargs", "self._save_optimizer_and"):
        assert name in source
    assert "_tp_size" in inspect.getsource(SFTTrainer.compute_loss)
    assert "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
    assert LOSS_MAPPING["ForCausalLM"] is ForCausalLMLoss and SCHEDULER_NAME == "scheduler.pt"
    assert isinstance(transformers.PreTrainedModel.loss_function, property)
