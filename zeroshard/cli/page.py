"""A run as one HTML page that needs nothing else: its style and its pictures are in it."""

from __future__ import annotations

import base64
import dataclasses
import pathlib
from typing import Any

import jinja2
from matplotlib.figure import Figure

from . import plots
from .run import Run, memory_rows
from .terminal import size


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a sentence on how to read it, pictures (name, data URI) and a table."""

    title: str
    note: str
    plots: list[tuple[str, str]]
    head: tuple[str, ...] = ()
    rows: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)


def render(run: Run) -> str:
    """The whole page."""
    template = pathlib.Path(__file__).with_name("report.html").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    sections = [_training(run)]
    if run.memory:
        sections.append(_memory(run))
    if run.traces:
        sections.append(_communication(run))
    return environment.from_string(template).render(run=run, about=_about(run), tiles=_tiles(run), sections=sections)


def _about(run: Run) -> str:
    parts = [str(run.about["model"])] if "model" in run.about else []
    if "parameters" in run.about:
        parts.append(f"{run.about['parameters']:,} parameters")
    parts.append(f"{run.about['ranks']} rank{'s' * (run.about['ranks'] > 1)}")
    options = run.about.get("options") or {}
    parts += [f"{title} {options[name]}" for name, title in (("stage", "stage"), ("precision", "precision")) if name in options]
    return " · ".join(parts)


def _tiles(run: Run) -> list[tuple[str, str]]:
    tiles = [(f"loss, step {run.train[-1]['step']}", f"{run.train[-1]['loss']:.4f}")]
    if run.held_out:
        tiles.append((f"held out, step {run.held_out[-1]['step']}", f"{run.held_out[-1]['loss']:.4f}"))
    if run.tokens_per_s is not None:
        tiles.append(("tokens/s, median", f"{run.tokens_per_s:,.0f}"))
    if run.mfu is not None:
        tiles.append(("MFU", f"{run.mfu:.1%}"))
    if run.memory:
        tiles.append(("memory of a rank, most", size(max(rank["process"] for rank in run.memory))))
        states = max(sum(rank["held"].values()) for rank in run.memory)
        tiles.append(("of that states, peaks", size(states)))
    if run.traces:
        waited = sum(t.exposed_ms for t in run.transfers())
        tiles.append(("waited for others, a step", f"{waited:,.0f} ms"))
    return tiles


def _training(run: Run) -> Section:
    drawn = [_picture("loss", plots.loss(run))]
    note = "Loss is the mean over the tokens of a step."
    if run.tokens_per_s is not None:
        drawn.append(_picture("speed", plots.speed(run)))
    if run.mfu is not None:
        rate, flops = run.about["rank_flops"], run.about["flops_per_token"]
        note += (
            f" MFU compares the model's {flops / 1e9:,.3g} GFLOP a token, forward and backward, with the"
            f" {rate / 1e9:,.3g} GFLOP/s that a rank reaches in a large matrix product; what is recomputed does not count."
        )
    return Section("Training", note, drawn)


def _memory(run: Run) -> Section:
    note = (
        "The estimate is known before a run; measured are the peaks of each category, which need not come at one time. "
        "What the process takes beyond them is activations, logits and buffers of libraries."
    )
    head = ("rank", "category", "estimate, MiB", "measured, MiB", "difference")
    rows = [
        (row["rank"], row["category"], _mib(row["predicted"]), _mib(row["held"]), _percent(row["difference"]))
        for row in memory_rows(run.memory)
    ]
    return Section("Memory", note, [_picture("memory", plots.memory(run))], head, rows)


def _communication(run: Run) -> Section:
    transfers, (rank, events) = run.transfers(), next(iter(run.traces.items()))
    note = (
        f"From the traces of {len(run.traces)} rank{'s' * (len(run.traces) > 1)}: exposed is how long the host waited for a "
        "transfer, which includes waiting for a rank that is late; hidden, how long it had travelled before. "
        "The traces themselves open in ui.perfetto.dev."
    )
    head = ("kind", "unit", "times a step", "exposed, ms", "hidden, ms")
    rows = [(t.kind, t.unit, f"{t.count:.3g}", f"{t.exposed_ms:,.2f}", f"{t.hidden_ms:,.2f}") for t in transfers]
    drawn = [_picture("timeline", plots.timeline(events, rank)), _picture("communication", plots.communication(transfers))]
    return Section("Communication", note, drawn, head, rows)


def _picture(name: str, figure: Figure) -> tuple[str, str]:
    return name, "data:image/svg+xml;base64," + base64.b64encode(plots.svg(figure).encode()).decode()


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"
