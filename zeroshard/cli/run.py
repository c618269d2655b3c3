"""A run as `zeroshard report` reads it: a folder with metrics.jsonl, and traces of its ranks beside it if there are any.

metrics.jsonl holds one JSON object a line, told apart by `kind`; other kinds and other fields are let be.

    run      {"ranks"}, and as far as known {"model", "options": {...}, "parameters", "flops_per_token", "rank_flops"}
             flops_per_token: of forward and backward of one token; rank_flops: floating-point operations a second that one
             rank reaches in a large matrix product. A run that went on has one such line each time; the last one counts
    train    {"step", "loss"}, and as far as known {"tokens_per_s", "seconds", "lr", "grad_norm", "memory_bytes": [per rank]}
    eval     {"step", "loss"}: on data that is held out
    memory   {"rank", "predicted": {category: bytes}, "held": {category: bytes}, "process"}, one line a rank: what
             `zeroshard.estimate` said, the peaks of `zeroshard.stats`, and the peak of the process

Traces are what `zeroshard.trace("trace.json")` leaves: trace.json, or trace.rank0.json and so on.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import ShardError

METRICS = "metrics.jsonl"
NEEDED: dict[str, dict[str, Any]] = {
    "run": {"ranks": int},
    "train": {"step": int, "loss": (int, float)},
    "eval": {"step": int, "loss": (int, float)},
    "memory": {"rank": int, "predicted": dict, "held": dict, "process": (int, float)},
}
LANES = ("gather", "reduce", "ring", "other")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What moved for one unit (or between the ranks of a sequence) in a step: ms of the host, the mean of the ranks."""

    kind: str
    unit: str
    count: float
    exposed_ms: float
    hidden_ms: float


@dataclasses.dataclass(frozen=True)
class Run:
    """The lines of metrics.jsonl by kind, and the complete events of the traces by rank."""

    name: str
    about: dict[str, Any]
    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    memory: list[dict[str, Any]]
    traces: dict[int, list[dict[str, Any]]]

    @property
    def peak_tokens_per_s(self) -> float | None:
        """What the ranks would reach if they did nothing but multiply large matrices."""
        flops, rate = self.about.get("flops_per_token"), self.about.get("rank_flops")
        return self.about["ranks"] * rate / flops if flops and rate else None

    @property
    def tokens_per_s(self) -> float | None:
        """The median of the steps, the first one aside: it warms up."""
        speeds = [t["tokens_per_s"] for t in self.train if "tokens_per_s" in t]
        return statistics.median(speeds[1:] or speeds) if speeds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: useful operations over those the ranks reach in a large matrix product, 0 to 1."""
        return self.tokens_per_s / self.peak_tokens_per_s if self.tokens_per_s and self.peak_tokens_per_s else None

    def transfers(self) -> list[Transfer]:
        """By unit and kind, in the order they first happened, divided by steps and ranks."""
        steps = sum(sum(e["name"].startswith("step ") for e in events) or 1 for events in self.traces.values())
        sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0])
        for events in self.traces.values():
            for event in (event for event in events if event["cat"] in LANES):
                unit = event["args"].get("unit") or event["name"].split(" from rank")[0]
                total = sums[event["cat"], unit]
                for place, amount in enumerate((1, event["args"]["exposed_us"] / 1e3, event["args"]["hidden_us"] / 1e3)):
                    total[place] += amount / steps
        ordered = sorted(sums.items(), key=lambda item: LANES.index(item[0][0]))
        return [Transfer(kind, unit, *amounts) for (kind, unit), amounts in ordered]


def read(path: pathlib.Path) -> Run:
    """`path`: the folder of a run, or its metrics file.

    Raises:
        ShardError: no metrics there, no steps in them, or a line or trace that cannot be read; it is named.
    """
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise ShardError(f"{path} has no {METRICS}: give the folder of a run, or such a file")
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, text in enumerate(file.read_text().splitlines(), 1):
        if text.strip():
            entry = _entry(text, f"{file}, line {number}")
            lines[entry["kind"]].append(entry)
    if not lines["train"]:
        raise ShardError(f'{file} has no line of kind "train": there is nothing to report yet')
    if not lines["run"]:
        raise ShardError(f'{file} has no line of kind "run", which tells how many ranks there were')
    name = file.resolve().parent.name if file.name == METRICS else file.stem
    return Run(name, lines["run"][-1], lines["train"], lines["eval"], lines["memory"], _traces(file.parent))


def _entry(text: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise ShardError(f"{where} is no JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise ShardError(f'{where}: expected an object with a "kind", got {text[:60]}')
    for field, types in NEEDED.get(entry["kind"], {}).items():
        if not isinstance(entry.get(field), types):
            raise ShardError(f"{where}: kind {entry['kind']!r} has no proper {field!r}: {entry.get(field)!r}")
    return entry


def _traces(folder: pathlib.Path) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for file in sorted([*folder.glob("trace.json"), *folder.glob("trace.rank*.json")]):
        try:
            content = json.loads(file.read_text())
            events = [event for event in content["traceEvents"] if event["ph"] == "X"]
            if events:
                found[content["otherData"]["rank"]] = events
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{file} is no trace of zeroshard.trace: {error!r}") from error
    return dict(sorted(found.items()))


def memory_rows(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each rank and category: bytes `predicted` and `held`, and by how much they differ (`None`: of nothing)."""
    rows = []
    for rank in ranks:
        for name in dict.fromkeys([*rank["predicted"], *rank["held"]]):
            predicted, held = rank["predicted"].get(name, 0), rank["held"].get(name, 0)
            difference = held / predicted - 1 if predicted else None
            rows.append(
                {"rank": rank["rank"], "category": name, "predicted": predicted, "held": held, "difference": difference}
            )
    return rows
