"""One picture of a run, drawn from its metrics.jsonl alone."""

from __future__ import annotations

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from finetune.memory import MIB
from finetune.report import read_metrics

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3", "#64b5cd")
REST = "#d0d0d0"
VISIBLE = 0.05 * MIB
MOST = 8  # ranks drawn: those that take most


def draw(metrics: pathlib.Path, target: pathlib.Path) -> None:
    """Loss over the steps, and memory of each rank beside the closed form, into `target` (PNG)."""
    run, ranks = read_metrics(metrics, "run")[-1], read_metrics(metrics, "memory")
    ranks = sorted(sorted(ranks, key=lambda r: -r["process"])[:MOST], key=lambda r: r["rank"])
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9 + 1.5 * len(ranks), 4.2), layout="constrained", width_ratios=(1, 0.5 + 0.35 * len(ranks))
    )
    _loss(left, read_metrics(metrics, "train"), read_metrics(metrics, "eval"))
    _memory(right, ranks, run)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def _loss(axes: Axes, train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    axes.plot([t["step"] for t in train], [t["loss"] for t in train], ".-", color=COLOURS[0], lw=1, label="training")
    steps, losses = [e["step"] for e in held_out], [e["loss"] for e in held_out]
    axes.plot(steps, losses, "D--", color=COLOURS[1], lw=1, label="held out")
    for step, loss in zip(steps, losses, strict=True):
        axes.annotate(f"{loss:.3f}", (step, loss), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=9)
    axes.margins(x=0.08, y=0.12)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title="Loss", xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _memory(axes: Axes, ranks: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Two bars a rank, by category: the closed form, and what was measured with the rest of the process on top."""
    sizes = [(name, size) for r in ranks for kind in ("predicted", "held") for name, size in r[kind].items()]
    categories = list(dict.fromkeys(name for name, size in sizes if size > VISIBLE))
    colour = dict(zip(categories, COLOURS, strict=False))
    names: list[str] = []
    for number, rank in enumerate(ranks):
        for kind in ("predicted", "held"):
            at = 2.6 * number + (kind == "held")
            names.append(f"rank {rank['rank']}\n{'closed form' if kind == 'predicted' else 'measured'}")
            bottom = 0.0
            for name in categories:
                size = rank[kind].get(name, 0) / MIB
                label = name if at == 0 else None
                axes.bar(at, size, bottom=bottom, color=colour[name], label=label)
                bottom += size
            axes.annotate(f"{bottom:,.0f}", (at, bottom), ha="center", va="bottom", fontsize=9)
            if kind == "held":
                rest = max(rank["process"] / MIB - bottom, 0)
                label = "activations and the rest" if not number else None
                axes.bar(at, rest, bottom=bottom, color=REST, hatch="//", edgecolor="white", label=label, zorder=0)
                axes.annotate(f"{bottom + rest:,.0f}", (at, bottom + rest), ha="center", va="bottom", fontsize=9)
    ticks = [2.6 * n + k for n in range(len(ranks)) for k in (0, 1)]
    axes.set_xticks(ticks, names, fontsize=9)
    axes.set(title=f"Memory per rank, stage {run['options']['stage']} on {run['ranks']} ranks", ylabel="MiB")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
