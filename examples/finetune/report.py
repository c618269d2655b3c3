"""What a run shows and leaves behind: progress, metrics.jsonl, a table, a plot. Only the main process writes."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import rich.box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from finetune.memory import MIB, RankMemory


class Metrics:
    """metrics.jsonl: one JSON object a line, told apart by `kind` ("run", "eval", "train", "memory").

    Opened for a run that goes on from step `first`, it keeps the lines up to there: a step is never in it twice.
    """

    def __init__(self, path: pathlib.Path, first: int):
        kept = _lines_before(path, first) if first else []
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text("".join(line + "\n" for line in kept))
        unfinished.replace(path)
        self._file = path.open("a", buffering=1)  # a line at a time: what is there is whole

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


def _lines_before(path: pathlib.Path, first: int) -> list[str]:
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines() if line]
    return [line for line in lines if (entry := json.loads(line))["kind"] != "memory" and entry.get("step", 0) <= first]


class Steps:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, first: int, last: int):
        self._console, self._first, self._last = console, first, last
        self._started = self._shown = time.monotonic()
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[values]}"),
            TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("training", total=last, completed=first, values="")

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, step: int, *, loss: float, tokens_per_s: float, memory: int) -> None:
        values = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {memory / MIB:,.0f} MiB a rank"
        self._bar.update(self._task, completed=step, values=values)
        due = time.monotonic() - self._shown > 5 or step in (self._first + 1, self._last)
        if not self._console.is_terminal and due and not self._console.quiet:
            self._shown = time.monotonic()
            self._console.print(f"step {step}/{self._last}  {values}", highlight=False)


def memory_table(ranks: list[RankMemory], stage: int, world_size: int) -> Table:
    """Per rank, by category: predicted by the closed form, and measured."""
    title = f"Memory per rank, stage {stage} on {world_size} rank{'s' * (world_size > 1)} (MiB)"
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify="left")
    table.add_column("rank", justify="right")
    for name in ("category", "predicted", "measured"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for memory in ranks:
        for name in dict.fromkeys([*memory.predicted, *memory.held]):
            table.add_row(str(memory.rank), name, _mib(memory.predicted.get(name)), _mib(memory.held.get(name)))
        table.add_row("", "states", _mib(sum(memory.predicted.values())), _mib(sum(memory.held.values())), style="bold")
        table.add_row("", "activations and the rest", "", _mib(memory.rest))
        table.add_row("", "process, above its start", "", _mib(memory.process), style="bold", end_section=True)
    return table


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:,.1f}"
