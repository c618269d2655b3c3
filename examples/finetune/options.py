"""The command line, checked before anything is built."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

DESCRIPTION = """Fine-tunes a language model on long sequences, its states and the sequences spread over all ranks.
Start it with `accelerate launch --config_file examples/accelerate/cpu.yaml`, or with python for a single process."""


class UserError(Exception):
    """Something only the user can put right. Shown as one line, by one rank, without a traceback."""


@dataclasses.dataclass(frozen=True)
class Options:
    model: str
    data: pathlib.Path | None
    output: pathlib.Path
    seq_len: int
    context_parallel_size: int | None
    stage: int
    precision: str
    gradient_checkpointing: bool
    max_position_embeddings: int | None
    steps: int
    batch_size: int
    gradient_accumulation_steps: int
    lr: float
    min_lr: float
    max_grad_norm: float
    seed: int
    checkpoint_every: int
    trace: bool
    resume: bool
    auto_resume: bool

    @property
    def checkpoint(self) -> pathlib.Path:
        return self.output / "checkpoint"

    @property
    def goes_on(self) -> bool:
        return self.resume or (self.auto_resume and self.checkpoint.is_dir())

    def as_text(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in dataclasses.asdict(self).items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `--help` lists all options.")


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _not_negative(kind: type) -> Any:
    def check(text: str) -> Any:
        if not 0 <= (value := kind(text)) < float("inf"):
            raise argparse.ArgumentTypeError(f"must be 0 or more, got {value}")
        return value

    check.__name__ = kind.__name__  # argparse names it in "invalid ... value"
    return check


# fmt: off
def parser() -> argparse.ArgumentParser:
    p = _Parser(description=DESCRIPTION, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    what = p.add_argument_group("what")
    what.add_argument("--model", default="smollm2", help="'smollm2' (SmolLM2-135M-Instruct, from a Python package), "
                      "'scratch' (a small one, random weights, bytes as tokens), or a from_pretrained folder")
    what.add_argument("--data", type=pathlib.Path, help="folder of text or code; default: Python's reference")
    what.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/finetune"), help="where results go")
    what.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    what.add_argument("--auto-resume", action="store_true", help="the same where there is one, anew where there is "
                      "none: for launchers that start a run again, such as torchrun --max-restarts")

    split = p.add_argument_group("memory and ranks")
    split.add_argument("--stage", type=int, choices=range(4), default=3, help="0 replicate, 1 shard optimizer state, "
                       "2 and gradients, 3 and parameters")
    split.add_argument("--seq-len", type=positive, default=2048, help="tokens in a sequence, over all its ranks")
    split.add_argument("--context-parallel-size", type=positive, help="ranks that share a sequence; default: the "
                       "YAML's parallelism_config_cp_size. The other ranks take other sequences")
    split.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of weights and activations "
                       "in use; masters, gradients and optimizer state are fp32")
    split.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations in backward")
    split.add_argument("--max-position-embeddings", type=positive, help="positions of the model; beyond what it was "
                       "trained with, its rotary embedding is scaled (YaRN)")

    run = p.add_argument_group("training")
    run.add_argument("--steps", type=positive, default=24, help="optimizer steps")
    run.add_argument("--batch-size", type=positive, default=1, help="sequences per replica and micro-batch")
    run.add_argument("--gradient-accumulation-steps", type=positive, default=1, help="micro-batches per step")
    run.add_argument("--lr", type=_not_negative(float), default=1e-4, help="learning rate at the first step")
    run.add_argument("--min-lr", type=_not_negative(float), default=1e-5, help="cosine decay to it")
    run.add_argument("--max-grad-norm", type=_not_negative(float), default=1.0, help="gradient clipping; 0 for none")
    run.add_argument("--seed", type=_not_negative(int), default=0, help="of data order and of a model from scratch")
    run.add_argument("--checkpoint-every", type=_not_negative(int), default=0, help="steps; 0: only after the last")
    run.add_argument("--trace", action="store_true", help="every rank writes what it does in the second step, for "
                     "`zeroshard report` and ui.perfetto.dev")
    return p
# fmt: on


def parse(argv: Sequence[str] | None = None) -> Options:
    """Raises UserError for a bad option or a path that cannot work."""
    options = Options(**vars(parser().parse_args(argv)))
    if options.min_lr > options.lr:
        raise UserError(f"--min-lr {options.min_lr} is above --lr {options.lr}: the cosine decays from --lr to it.")
    if options.data is not None and not options.data.is_dir():
        raise UserError(f"--data {options.data}: no such folder. Give a folder that holds text files.")
    if options.output.exists() and not options.output.is_dir():
        raise UserError(f"--output {options.output} is a file. Give a folder; it is made if missing.")
    if options.resume and not options.checkpoint.is_dir():
        raise UserError(f"--resume: there is no checkpoint in {options.output}. Leave --resume out to start anew.")
    return options
