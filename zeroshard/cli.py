"""The command `zeroshard`: looks into checkpoints and converts them, without a model and without a process group."""

from __future__ import annotations

import sys
from collections import Counter

import click
import torch
from rich.console import Console
from rich.table import Table

from .checkpoint import convert as conversion
from .checkpoint.index import INDEX
from .config import ShardError

_CATEGORIES = {"model": "parameters and buffers", "optim": "optimizer state", "ema": "averages"}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """Looks into checkpoints of zeroshard and converts them."""


@commands.command("inspect")
@click.argument("path", type=click.Path(exists=True, file_okay=False))
@click.option("--tensors", is_flag=True, help="List every tensor with its dtype and shape.")
def inspect_command(path: str, tensors: bool) -> None:
    """Says what the checkpoint in PATH holds, and whether its files are as they were written."""
    about, console = conversion.summary(path), Console(soft_wrap=True)
    nbytes: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for name, (shape, dtype, _) in about.tensors.items():
        category = name.partition(".")[0]
        nbytes[category] += torch.Size(shape).numel() * dtype.itemsize
        numbers[category] += 1
    table = Table("what", "tensors", "bytes", box=None)
    for category in nbytes:
        table.add_row(_CATEGORIES.get(category, category), f"{numbers[category]:,}", f"{nbytes[category]:,}")
    table.add_row(f"{about.num_files} files", "", f"{about.file_bytes:,}")
    console.print(table)
    for number, group in enumerate(about.groups):
        options = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
        console.print(f"group {number}: {len(group['params'])} parameters, {options}", markup=False, highlight=False)
    if isinstance(about.extra, dict):
        known = {key: value for key, value in about.extra.items() if isinstance(value, (bool, int, float, str))}
        console.print(f"extra: {', '.join(map(str, about.extra))}; {known}", markup=False, highlight=False)
    if tensors:
        for name, (shape, dtype, boxes) in about.tensors.items():
            text = f"{name}  {str(dtype).removeprefix('torch.')} {list(shape)}  {boxes} boxes"
            console.print(text, markup=False, highlight=False)
    if about.problems:
        raise ShardError("damaged: " + "; ".join(about.problems))
    console.print("all checksums are right" if about.checksums else "written by another tool, without checksums")


@commands.command("convert")
@click.argument("path", type=click.Path(exists=True))
@click.argument("out", type=click.Path())
@click.option("--average", is_flag=True, help="Take the average (EMA) of the weights instead of the weights.")
@click.option("--max-file-bytes", type=click.IntRange(min=1), default=5 * 10**9, show_default=True)
def convert_command(path: str, out: str, average: bool, max_file_bytes: int) -> None:
    """Makes safetensors files of the checkpoint in PATH, or a checkpoint of the safetensors file or folder PATH."""
    if conversion.is_checkpoint(path):
        count = conversion.to_safetensors(path, out, "ema." if average else "model.", max_file_bytes)
    elif average:
        raise ShardError(f"--average: {path} has no {INDEX}, so it is no checkpoint")
    else:
        count = conversion.from_safetensors(path, out)
    click.echo(f"{count} tensors written to {out}")


def main() -> None:
    """The console script: a ShardError is one line, and exit status 1."""
    try:
        commands(standalone_mode=True)
    except (ShardError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
