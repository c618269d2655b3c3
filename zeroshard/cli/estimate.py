"""`zeroshard estimate`: memory of a rank by stage, number of ranks and context degree, before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import click
import torch
from rich.table import Table
from rich.text import Text

from ..config import Precision, ShardError, Stage
from ..memory import estimate
from . import terminal
from .model import Described, read
from .terminal import json_option, print_json, say, size, working

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "none": None,
}
GIB = 2**30


class Numbers(click.ParamType):
    """1,2,4: whole numbers, `least` or more."""

    name = "numbers"

    def __init__(self, least: int = 1):
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(sorted({int(part) for part in value.split(",")}))
        except ValueError:
            self.fail(f"{value!r}: expected whole numbers, e.g. 1,2,4", param, ctx)
        if numbers[0] < self.least:
            self.fail(f"{value!r}: expected {self.least} or more", param, ctx)
        return numbers


@dataclasses.dataclass(frozen=True)
class Row:
    """One choice: bytes of a rank by category. `activations` are of the longest share of a sequence, if one was given."""

    ranks: int
    context: int
    stage: int
    categories: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.categories.values())


@click.command("estimate")
@click.argument("model", type=click.Path(exists=True, path_type=pathlib.Path))
@click.option("--ranks", type=Numbers(), default="1,2,4,8", show_default=True, help="Numbers of ranks.")
@click.option("--stages", type=Numbers(least=0), default=None, help="Stages to show; all of them by default.")
@click.option("--context", type=Numbers(), default="1", show_default=True, help="Ranks that share a sequence.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens of a sequence; with it activations are counted.")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences per micro-batch.")
@click.option("--recompute", is_flag=True, help="Activations are recomputed in backward, a block at a time.")
@click.option("--precision", type=click.Choice(["bf16", "none"]), default="bf16", show_default=True,
              help="bf16: fp32 masters, bf16 weights in use and activations; none: dtypes as they are.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True)
@click.option("--device-memory", type=click.FloatRange(min=0, min_open=True), help="GiB of a rank: says what fits.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="Draw it, too; the ending says how.")
@json_option
def estimate_command(
    model: pathlib.Path, ranks: tuple[int, ...], stages: tuple[int, ...] | None, context: tuple[int, ...],
    seq_len: int | None, batch_size: int, recompute: bool, precision: str, optimizer: str,
    device_memory: float | None, plot: pathlib.Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Memory of one rank in closed form, for MODEL: a folder with config.json, such a file, or safetensors files.

    Nothing is loaded: the model is built on the meta device. Without --seq-len these are the states alone. A context degree
    makes activations smaller; states are cut over all ranks, whatever they share.
    """
    compute = torch.bfloat16 if precision == "bf16" else None
    chosen = tuple(Stage) if stages is None else _stages(stages)
    if context != (1,) and seq_len is None:
        raise click.UsageError("--context changes activations alone: give --seq-len, too")
    pairs = [(n, degree) for n in ranks for degree in context if n % degree == 0]
    if not pairs:
        raise click.UsageError(f"no --context of {context} divides any --ranks of {ranks}")
    steps = len(chosen) * len(ranks) + (len(context) if seq_len else 0)
    with working(f"estimating {model}", steps) as done:
        described = read(model, compute)
        states = {
            (n, stage): _states(described, n, int(stage), precision, optimizer, done) for n in ranks for stage in chosen
        }
        kept = {} if seq_len is None else _activations(described, seq_len, batch_size, context, recompute, done)
    rows = [
        Row(n, degree, int(stage), states[n, stage] | ({"activations": kept[degree]} if kept else {}))
        for n, degree in pairs
        for stage in chosen
    ]
    logits = _logits(described, seq_len, batch_size, context)
    if as_json:
        print_json({
            "model": described.name, "parameters": described.numel, "precision": precision, "optimizer": optimizer,
            "seq_len": seq_len, "batch_size": batch_size, "recompute": recompute, "logits": logits,
            "rows": [dataclasses.asdict(row) | {"total": row.total} for row in rows],
        })  # fmt: skip
    else:
        _show(described, rows, seq_len, logits, device_memory)
    if plot is not None:
        _draw(described, rows, plot, device_memory)
        if not as_json:
            say(f"drawn in {plot}")


def _stages(numbers: tuple[int, ...]) -> tuple[Stage, ...]:
    try:
        return tuple(Stage(number) for number in numbers)
    except ValueError as error:
        raise click.BadParameter("stages are 1, 2 and 3, and 0 for no sharding", param_hint="--stages") from error


def _states(described: Described, ranks: int, stage: int, precision: str, optimizer: str, done: Any) -> dict[str, int]:
    found = estimate(
        described.model,
        stage=stage,
        world_size=ranks,
        optimizer=OPTIMIZERS[optimizer],
        precision=Precision(compute=torch.bfloat16) if precision == "bf16" else None,
    )
    done()
    return dict(found)


def _activations(
    described: Described, seq_len: int, batch: int, context: tuple[int, ...], recompute: bool, done: Any
) -> dict[int, int]:
    """Bytes by context degree, of the rank with the longest share."""
    if described.kept is None:
        raise ShardError("--seq-len: safetensors files do not tell what a forward computes; give a folder with config.json")
    found = {}
    for degree in context:
        found[degree] = described.kept(batch, -(-seq_len // degree))[recompute]
        done()
    return found


def _logits(described: Described, seq_len: int | None, batch: int, context: tuple[int, ...]) -> dict[int, int]:
    """Bytes of fp32 logits and their gradient, by context degree: what a loss that is not computed in chunks adds."""
    if seq_len is None or not described.logit_width:
        return {}
    return {degree: 2 * 4 * batch * -(-seq_len // degree) * described.logit_width for degree in context}


def _show(
    described: Described, rows: list[Row], seq_len: int | None, logits: dict[int, int], device_memory: float | None
) -> None:
    counted = "states" if seq_len is None else f"states and activations of {seq_len:,} tokens"
    console = terminal.console()
    say(f"{described.name}: {described.numel:,} parameters. Bytes of one rank, {counted}:")
    stages = list(dict.fromkeys(row.stage for row in rows))
    table = Table(box=None, pad_edge=False)
    for title in ("ranks", "context"):
        table.add_column(title, justify="right")
    for stage in stages:
        table.add_column(f"stage {stage}", justify="right")
    for ranks, context in dict.fromkeys((row.ranks, row.context) for row in rows):
        cells = [next(r for r in rows if (r.ranks, r.context, r.stage) == (ranks, context, stage)) for stage in stages]
        table.add_row(str(ranks), str(context), *(_cell(row.total, device_memory) for row in cells))
    console.print(table)
    least = min(rows, key=lambda row: row.total)
    parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in least.categories.items() if nbytes)
    say(f"the least, {least.ranks} ranks at stage {least.stage}: {parts}")
    if logits:
        told = ", ".join(f"{size(nbytes)} at context {degree}" for degree, nbytes in logits.items())
        say(f"not counted: logits and their gradient, unless the loss is computed in chunks: {told}")
    if device_memory is not None:
        say(_fits(rows, device_memory))


def _cell(nbytes: int, device_memory: float | None) -> Text:
    if device_memory is None:
        return Text(size(nbytes))
    fits = nbytes <= device_memory * GIB
    return Text(size(nbytes) + (" ✓" if fits else "  "), style="green" if fits else "red")


def _fits(rows: list[Row], device_memory: float) -> str:
    fitting = [row for row in rows if row.total <= device_memory * GIB]
    if not fitting:
        return f"none of these fits {device_memory:g} GiB: try more ranks, --recompute, or a larger --context"
    row = min(fitting, key=lambda row: (row.ranks, row.stage, row.context))
    return f"the first that fits {device_memory:g} GiB (✓): {row.ranks} ranks, stage {row.stage}, context {row.context}"


def _draw(described: Described, rows: list[Row], target: pathlib.Path, device_memory: float | None) -> None:
    with terminal.needs("cli", "--plot"):
        from . import plots
    bars = [(f"stage {row.stage}", _group(row, rows), row.categories) for row in rows]
    plots.save(plots.bars(bars, f"{described.name}: memory of one rank", device_memory), target)


def _group(row: Row, rows: list[Row]) -> str:
    ranks = f"{row.ranks} rank{'s' * (row.ranks > 1)}"
    return ranks if all(each.context == 1 for each in rows) else f"{ranks}, context {row.context}"
