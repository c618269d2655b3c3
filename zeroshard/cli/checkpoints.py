"""`zeroshard inspect` and `zeroshard convert`: checkpoints, without a model and without a process group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click
import torch
from rich.table import Table

from ..checkpoint import convert as conversion
from ..checkpoint.convert import Summary
from ..checkpoint.index import INDEX
from ..config import ShardError
from . import terminal
from .terminal import json_option, print_json, say, working

_CATEGORIES = {"model": "parameters and buffers", "optim": "optimizer state", "ema": "averages"}


@click.command("inspect")
@click.argument("path", type=click.Path(exists=True, file_okay=False))
@click.option("--tensors", is_flag=True, help="List every tensor with its dtype and shape.")
@json_option
def inspect_command(path: str, tensors: bool, as_json: bool) -> None:
    """Says what the checkpoint in PATH holds, and whether its files are as they were written."""
    with working(f"reading {path}"):
        about = conversion.summary(path)
    nbytes: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for name, (shape, dtype, _) in about.tensors.items():
        category = name.partition(".")[0]
        nbytes[category] += torch.Size(shape).numel() * dtype.itemsize
        numbers[category] += 1
    if as_json:
        print_json(_as_json(about, nbytes, numbers, tensors))
    else:
        _show(about, nbytes, numbers, tensors)
    if about.problems:
        raise ShardError("damaged: " + "; ".join(about.problems))
    if not as_json:
        say("all checksums are right" if about.checksums else "written by another tool, without checksums")


def _show(about: Summary, nbytes: Counter[str], numbers: Counter[str], tensors: bool) -> None:
    table = Table("what", "tensors", "bytes", box=None)
    for category in nbytes:
        table.add_row(_CATEGORIES.get(category, category), f"{numbers[category]:,}", f"{nbytes[category]:,}")
    table.add_row(f"{about.num_files} files", "", f"{about.file_bytes:,}")
    terminal.console().print(table)
    for number, group in enumerate(about.groups):
        options = ", ".join(f"{key}={value}" for key, value in _options(group).items())
        say(f"group {number}: {len(group['params'])} parameters, {options}")
    if isinstance(about.extra, dict):
        say(f"extra: {', '.join(map(str, about.extra))}; {_plain(about.extra)}")
    if tensors:
        for name, (shape, dtype, boxes) in about.tensors.items():
            say(f"{name}  {str(dtype).removeprefix('torch.')} {list(shape)}  {boxes} boxes")


def _as_json(about: Summary, nbytes: Counter[str], numbers: Counter[str], tensors: bool) -> dict[str, Any]:
    listed = {
        name: {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "boxes": boxes}
        for name, (shape, dtype, boxes) in about.tensors.items()
    }
    return {
        "categories": {name: {"tensors": numbers[name], "bytes": nbytes[name]} for name in nbytes},
        "files": about.num_files,
        "file_bytes": about.file_bytes,
        "groups": [{"parameters": len(group["params"]), **_plain(_options(group))} for group in about.groups],
        "extra": _plain(about.extra) if isinstance(about.extra, dict) else {},
        "checksums": about.checksums,
        "problems": about.problems,
        **({"tensors": listed} if tensors else {}),
    }


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _plain(values: dict[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in values.items() if isinstance(value, (bool, int, float, str))}


@click.command("convert")
@click.argument("path", type=click.Path(exists=True))
@click.argument("out", type=click.Path())
@click.option("--average", is_flag=True, help="Take the average (EMA) of the weights instead of the weights.")
@click.option("--max-file-bytes", type=click.IntRange(min=1), default=5 * 10**9, show_default=True)
@json_option
def convert_command(path: str, out: str, average: bool, max_file_bytes: int, as_json: bool) -> None:
    """Makes safetensors files of the checkpoint in PATH, or a checkpoint of the safetensors file or folder PATH."""
    with working(f"converting {path}"):
        if conversion.is_checkpoint(path):
            count = conversion.to_safetensors(path, out, "ema." if average else "model.", max_file_bytes)
        elif average:
            raise ShardError(f"--average: {path} has no {INDEX}, so it is no checkpoint")
        else:
            count = conversion.from_safetensors(path, out)
    if as_json:
        print_json({"tensors": count, "out": out})
    else:
        click.echo(f"{count} tensors written to {out}")
