"""Pictures of estimates and runs, drawn by matplotlib. Each function gives a figure; `save` and `svg` take it."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .run import Run, Transfer

GIB, MIB = 2**30, 2**20
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#64b5cd")
CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "gathered", "reducing", "activations")
COLOUR_OF = dict(zip(CATEGORIES, COLOURS, strict=False))
REST, EXPOSED, HIDDEN = "#d0d0d0", "#c44e52", "#a6c8e0"
MOST_RANKS, MOST_UNITS = 8, 40  # drawn of a large run: the ranks and units that take most


def save(figure: Figure, target: pathlib.Path) -> None:
    """Raises click.BadParameter for an ending that names no format, and for a folder that is not there."""
    known = figure.canvas.get_supported_filetypes()
    if target.suffix[1:] not in known:
        raise click.BadParameter(f"{target}: the ending must be one of {', '.join(sorted(known))}", param_hint="--plot")
    if not target.resolve().parent.is_dir():
        raise click.BadParameter(f"{target.parent}: no such folder", param_hint="--plot")
    figure.savefig(target, dpi=130)
    plt.close(figure)


def svg(figure: Figure) -> str:
    """Without anything that differs from one drawing to the next."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "zeroshard"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return text.getvalue()


def bars(rows: Sequence[tuple[str, str, Mapping[str, int]]], title: str, limit_gib: float | None = None) -> Figure:
    """A bar a row (its label, its group, bytes by category), groups side by side, with the sum on top, in GiB."""
    groups = list(dict.fromkeys(group for _, group, _ in rows))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.5 + 0.62 * len(rows)), 4.6), layout="constrained")
    labels = list(dict.fromkeys(label for label, _, _ in rows))
    at = 0.0
    ticks, seen = [], set()
    for group in groups:
        first = at
        for label, _, categories in (row for row in rows if row[1] == group):
            bottom = 0.0
            for name in (name for name in CATEGORIES if categories.get(name)):
                height = categories[name] / GIB
                axes.bar(at, height, 0.85, bottom=bottom, color=COLOUR_OF[name], label=None if name in seen else name)
                seen.add(name)
                bottom += height
            axes.annotate(f"{bottom:.3g}", (at, bottom), ha="center", va="bottom", fontsize=8)
            ticks.append((at, label.removeprefix("stage ") if len(labels) > 1 else ""))
            at += 1
        title_at = ((first + at - 1) / 2, -0.09)
        axes.annotate(group.replace(", ", "\n"), title_at, xycoords=("data", "axes fraction"), ha="center", va="top")
        at += 0.7
    axes.set_xticks([place for place, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.annotate("stage", (0, -0.045), xycoords="axes fraction", ha="right", va="top", fontsize=8)
    if limit_gib is not None:
        axes.axhline(limit_gib, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"{limit_gib:g} GiB", (at - 1, limit_gib), ha="right", va="bottom", fontsize=8)
    axes.set(title=title, ylabel="GiB")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [name for name in reversed(CATEGORIES) if name in handles]  # from top to bottom, as they are stacked
    axes.legend([handles[name] for name in order], order, fontsize=8, frameon=False)
    _finish(axes)
    return figure


def loss(run: Run) -> Figure:
    """Training and held-out loss over the steps."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.plot([t["step"] for t in run.train], [t["loss"] for t in run.train], ".-", lw=1, color=COLOURS[0], label="training")
    if run.held_out:
        steps, losses = [e["step"] for e in run.held_out], [e["loss"] for e in run.held_out]
        axes.plot(steps, losses, "D--", lw=1, color=COLOURS[1], label="held out")
    axes.set(title="Loss", xlabel="step", ylabel="nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, legend=True)
    return figure


def speed(run: Run) -> Figure:
    """Tokens per second over the steps, and the share of the ranks' own speed that this is."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    steps = [t["step"] for t in run.train if "tokens_per_s" in t]
    axes.plot(steps, [t["tokens_per_s"] for t in run.train if "tokens_per_s" in t], ".-", lw=1, color=COLOURS[2])
    axes.set(title="Speed", xlabel="step", ylabel="tokens/s, all ranks")
    axes.set_ylim(bottom=0)
    _finish(axes)
    if run.peak_tokens_per_s:
        peak = run.peak_tokens_per_s
        right = axes.twinx()
        right.set_ylim(0, 100 * axes.get_ylim()[1] / peak)
        right.set_ylabel("MFU, %")
    return figure


def memory(run: Run) -> Figure:
    """Two bars a rank: the estimate, and what was measured, with the rest of the process on top. Beside it the process of
    each rank over the steps."""
    ranks = sorted(sorted(run.memory, key=lambda r: -r["process"])[:MOST_RANKS], key=lambda r: r["rank"])
    width = 2.5 + 1.5 * len(ranks)
    figure, (axes, steps) = plt.subplots(1, 2, figsize=(5 + width, 3.9), width_ratios=(width, 4.2), layout="constrained")
    seen = set()
    for number, rank in enumerate(ranks):
        for side, kind in enumerate(("predicted", "held")):
            at, bottom = 2.6 * number + side, 0.0
            for name in (name for name in CATEGORIES if rank[kind].get(name)):
                height = rank[kind][name] / MIB
                axes.bar(at, height, bottom=bottom, color=COLOUR_OF[name], label=None if name in seen else name)
                seen.add(name)
                bottom += height
            axes.annotate(f"{bottom:,.0f}", (at, bottom), ha="center", va="bottom", fontsize=8)
            if kind == "held":
                rest = max(rank["process"] / MIB - bottom, 0)
                label = "activations and the rest" if not number else None
                axes.bar(at, rest, bottom=bottom, color=REST, hatch="//", edgecolor="white", label=label, zorder=0)
                axes.annotate(f"{bottom + rest:,.0f}", (at, bottom + rest), ha="center", va="bottom", fontsize=8)
    ticks = [2.6 * n + side for n in range(len(ranks)) for side in (0, 1)]
    names = [f"rank {rank['rank']}\n{kind}" for rank in ranks for kind in ("estimate", "measured")]
    axes.set_xticks(ticks, names, fontsize=8)
    axes.set(title="Memory of each rank", ylabel="MiB")
    axes.set_ylim(top=1.1 * axes.get_ylim()[1])
    _finish(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for rank in ranks:
        taken = [(t["step"], t["memory_bytes"][rank["rank"]] / MIB) for t in run.train if "memory_bytes" in t]
        steps.plot([s for s, _ in taken], [m for _, m in taken], ".-", lw=1, label=f"rank {rank['rank']}")
    steps.set(title="Process, at the end of a step", xlabel="step", ylabel="MiB")
    steps.set_ylim(0, 1.1 * steps.get_ylim()[1])
    _finish(steps, legend=True)
    return figure


def communication(transfers: Sequence[Transfer]) -> Figure:
    """A bar a unit and kind: how long the host waited for it, and how long it travelled while the host computed."""
    shown = sorted(transfers, key=lambda t: -(t.exposed_ms + t.hidden_ms))[:MOST_UNITS]
    shown = [t for t in transfers if t in shown]
    figure, axes = plt.subplots(figsize=(11, 1.4 + 0.24 * len(shown)), layout="constrained")
    places = range(len(shown))
    exposed = [t.exposed_ms for t in shown]
    axes.barh(places, exposed, color=EXPOSED, label="exposed: the host waited")
    axes.barh(places, [t.hidden_ms for t in shown], left=exposed, color=HIDDEN, label="hidden behind computation")
    axes.set_yticks(places, [f"{t.kind} {t.unit}" for t in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set(title="Communication of a step, by unit", xlabel="ms, mean of the ranks")
    _finish(axes, legend=True)
    return figure


def timeline(events: Sequence[Mapping[str, Any]], rank: int) -> Figure:
    """What one rank did when, in the lanes of its trace."""
    start = min(event["ts"] for event in events)
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ("forward", "backward", "step", "waiting")}
    rows |= {lane: [] for lane in ("gather", "reduce", "ring")}
    for event in events:
        first = event["name"].split()[0].rstrip(":")
        row = {"wait": "waiting", "ring": ""}.get(first, first) if event["cat"] == "compute" else event["cat"]
        if row in rows:
            rows[row].append(((event["ts"] - start) / 1e3, event["dur"] / 1e3))
    drawn = {row: spans for row, spans in rows.items() if spans}
    figure, axes = plt.subplots(figsize=(11, 0.9 + 0.42 * len(drawn)), layout="constrained")
    for place, (row, spans) in enumerate(drawn.items()):
        colour = EXPOSED if row == "waiting" else COLOURS[list(rows).index(row)]
        axes.broken_barh(spans, (place - 0.38, 0.76), color=colour, alpha=0.45, edgecolor="black", linewidth=0.3)
    axes.set_yticks(range(len(drawn)), list(drawn), fontsize=9)
    axes.invert_yaxis()
    axes.set(title=f"Timeline of rank {rank}", xlabel="ms")
    _finish(axes)
    return figure


def _finish(axes: Axes, legend: bool = False) -> None:
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend and axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
