"""`zeroshard report`: what a run did, as a page, a table, or JSON."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import click
from rich.table import Table

from . import run as runs
from . import terminal
from .run import Run, memory_rows
from .terminal import json_option, print_json, say, size, working


@click.command("report")
@click.argument("run", type=click.Path(exists=True, path_type=pathlib.Path))
@click.option("--output", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="The page; RUN/report.html by default.")
@json_option
def report_command(run: pathlib.Path, output: pathlib.Path | None, as_json: bool) -> None:
    """Makes one HTML page of RUN, a folder with metrics.jsonl as examples/finetune_long_context.py leaves it.

    Loss, tokens/s and MFU, memory by category beside the estimate, and, if traces of zeroshard.trace lie in the folder,
    the communication of each unit: hidden behind computation, or waited for. The page needs no network to be looked at.
    With --json the numbers are printed, and a page is written only to --output.
    """
    found = runs.read(run)
    if output is None and not as_json:
        output = (run if run.is_dir() else run.parent) / "report.html"
    if output is not None:
        with terminal.needs("cli", "report"):
            from . import page
        with working(f"drawing {run}"):
            text = page.render(found)
        output.write_text(text)
    if as_json:
        print_json(_as_json(found) | ({} if output is None else {"page": str(output)}))
    else:
        _show(found)
        say(f"written to {output}")


def _as_json(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "run": run.about,
        "steps": len(run.train),
        "last_step": run.train[-1]["step"],
        "loss": run.train[-1]["loss"],
        "held_out_loss": run.held_out[-1]["loss"] if run.held_out else None,
        "tokens_per_s": run.tokens_per_s,
        "mfu": run.mfu,
        "memory": memory_rows(run.memory),
        "process_bytes": {rank["rank"]: rank["process"] for rank in run.memory},
        "communication": [dataclasses.asdict(transfer) for transfer in run.transfers()],
    }


def _show(run: Run) -> None:
    last = run.train[-1]
    parts = [f"{run.name}: {len(run.train)} steps on {run.about['ranks']} ranks, loss {last['loss']:.4f}"]
    parts += [f"held out {run.held_out[-1]['loss']:.4f}"] if run.held_out else []
    parts += [f"{run.tokens_per_s:,.0f} tokens/s"] if run.tokens_per_s is not None else []
    parts += [f"MFU {run.mfu:.1%}"] if run.mfu is not None else []
    say(", ".join(parts))
    if run.memory:
        table = Table("rank", "category", "estimate", "measured", box=None)
        for row in memory_rows(run.memory):
            table.add_row(str(row["rank"]), row["category"], size(row["predicted"]), size(row["held"]))
        terminal.console().print(table)
    if run.traces:
        table = Table("kind", "exposed", "hidden", box=None)
        for kind in dict.fromkeys(transfer.kind for transfer in run.transfers()):
            mine = [transfer for transfer in run.transfers() if transfer.kind == kind]
            table.add_row(kind, f"{sum(t.exposed_ms for t in mine):,.1f} ms", f"{sum(t.hidden_ms for t in mine):,.1f} ms")
        terminal.console().print(table)
