"""`trace`: what a rank does when, as a timeline that Perfetto and chrome://tracing show.

    compute   what the host does: forward and backward of each unit's module, steps, ring steps, waits inside of them
    gather    whole values on their way, from the start until they are all there
    reduce    gradients on their way
    ring      keys, values and their gradients, or heads, between the ranks of a sequence
    other     what the engines tell each other

Names are those of the units, and every span of `compute` is a range of torch.profiler under the same name. Nothing is
patched: collectives tell two loggers (`zeroshard.events`, `ring_attention.events`), which costs one attribute read each
while nobody listens; modules and optimizers are observed by torch's global hooks, which are there during a trace only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import comm
from .hooks import at_end_of_backward, observed
from .partition import clean

LANES = ("compute", "gather", "reduce", "ring", "other")
BACKWARD = "backward"

_UNIT = re.compile(r"(gather|reduce) (.*?)( over replicas( \(\w+\))?| for all)?")


@contextlib.contextmanager
def trace(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Writes what this rank does inside the block to a Chrome trace (JSON), for ui.perfetto.dev or chrome://tracing.

        with zeroshard.trace("trace.json"):
            for batch in itertools.islice(loader, 3):  # a few steps: it keeps every event in memory
                ...

    One rank writes `path`; of several each writes its own, `trace.rank0.json` and so on, on one clock per machine.
    The file is written when the block is left, by an exception too. Lanes are named at the top of trace.py. Each transfer
    says how long the host waited for it (`exposed_us`), and how long it travelled while something else was computed
    (`hidden_us`). These are times of the host: on an accelerator, where kernels run later, trace with torch.profiler.

    Args:
        path: file to write; its folder must exist. `None` writes nothing: only ranges for torch.profiler are made.

    Raises:
        ShardError: several ranks were launched, but there is no process group yet.
        FileNotFoundError: no such folder.
    """
    world = comm.topology(None).shard
    rank = world.ranks[world.rank]
    target = None if path is None else _file_of(pathlib.Path(path), rank, world.size)
    if target is not None and not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such folder to write a trace to")
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        for package in ("zeroshard", "ring_attention"):
            stack.enter_context(_listening(logging.getLogger(f"{package}.events"), Listener(recorder)))
        stack.enter_context(observed(recorder))
        try:
            yield
        finally:
            recorder.finish()
            if target is not None:
                _write(target, recorder.as_events(rank), rank)


def _file_of(path: pathlib.Path, rank: int, ranks: int) -> pathlib.Path:
    return path if ranks == 1 else path.with_suffix(f".rank{rank}{path.suffix}")


@contextlib.contextmanager
def _listening(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    before = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def _write(target: pathlib.Path, events: list[dict[str, Any]], rank: int) -> None:
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"rank": rank, "written_by": "zeroshard.trace"}}
    unfinished = target.with_name(f"{target.name}.tmp")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(target)


@dataclasses.dataclass
class Span:
    """From `begin` to `end` on a lane, in ns. waited: when the host began to wait for a transfer, 0 before."""

    lane: str
    name: str
    begin: int
    end: int = 0
    waited: int = 0
    nbytes: int = 0
    range: Any = None

    def arguments(self) -> dict[str, Any]:
        if self.lane == LANES[0]:
            return {}
        unit = _UNIT.fullmatch(self.name)
        waited = self.waited or self.end
        exposed, hidden = (self.end - waited) / 1e3, (waited - self.begin) / 1e3
        named = {} if unit is None else {"unit": unit[2]}
        return {**named, "exposed_us": exposed, "hidden_us": hidden, "bytes_received": self.nbytes}


class Recorder:
    """Events of one rank. What the host does is a stack; what travels is looked up by who is waited for."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._stack: list[Span] = []
        self._flying: dict[str, Span] = {}
        self._names: dict[nn.Module, str] = {}
        self._roots: set[nn.Module] = set()
        self._in_backward = False
        self._to_epoch = time.time_ns() - time.perf_counter_ns()

    # ---- what the host does

    def push(self, name: str) -> None:
        range_ = torch.profiler.record_function(name)
        range_.__enter__()
        self._stack.append(Span(LANES[0], name, time.perf_counter_ns(), range=range_))

    def pop(self, name: str) -> None:
        """Ends the innermost span of that name, and what an exception left open inside of it."""
        if any(span.name == name for span in self._stack):
            while self._pop().name != name:
                pass

    def _pop(self) -> Span:
        span = self._stack.pop()
        span.end = time.perf_counter_ns()
        span.range.__exit__(None, None, None)
        span.range = None
        self.spans.append(span)
        return span

    # ---- told by hooks.observed

    def name_of(self, module: nn.Module) -> str | None:
        if "_zeroshard" in module.__dict__ and module not in self._roots:
            self._roots.add(module)
            self._names.update({home: title for title, home in _homes(module).items()})
        return self._names.get(module)

    def forward_begins(self, name: str) -> None:
        self._leave_broken_backward()
        self.push(f"forward {name}")

    def forward_ends(self, name: str) -> None:
        self.pop(f"forward {name}")

    def backward_begins(self, name: str) -> None:
        """The gradient of a unit's output is there. What ran before in this backward was the unit after it."""
        if not self._in_backward:
            self._in_backward = True
            self.push(BACKWARD)
            at_end_of_backward(self._last_unit_ends)
        self._end_unit()
        self.push(f"{BACKWARD} {name}")

    def _end_unit(self) -> None:
        if self._stack and self._stack[-1].name.startswith(f"{BACKWARD} "):
            self._pop()

    def _last_unit_ends(self) -> None:
        self._end_unit()
        at_end_of_backward(self._backward_ends)  # after what the engine does at the end

    def _backward_ends(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self.pop(BACKWARD)

    def _leave_broken_backward(self) -> None:
        """A backward that ended in an error never says so."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._backward_ends()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._leave_broken_backward()
        self.push(f"step {type(optimizer).__name__}")

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self.pop(f"step {type(optimizer).__name__}")

    # ---- told by collectives

    def posted(self, lane: str, label: str, which: str, nbytes: int) -> None:
        self._flying[which] = Span(lane, label, time.perf_counter_ns(), nbytes=nbytes)

    def waiting(self, label: str, which: str) -> None:
        self.push(f"wait: {label}")
        if which in self._flying:
            self._flying[which].waited = self._stack[-1].begin

    def finished(self, label: str, which: str) -> None:
        self.pop(f"wait: {label}")
        span = self._flying.pop(which, None)
        if span is not None:
            span.end = self.spans[-1].end if self.spans[-1].name == f"wait: {label}" else time.perf_counter_ns()
            self.spans.append(span)

    # ---- the end

    def finish(self) -> None:
        """What is still open ends here; what is still travelling is left out, for nobody knows when it arrives."""
        while self._stack:
            self._pop()

    def as_events(self, rank: int) -> list[dict[str, Any]]:
        """Complete events by time, an outer one before those inside, and the names of process and lanes."""
        rows = _rows(self.spans)
        titles = list(dict.fromkeys(row for _, row in sorted(rows, key=lambda pair: (LANES.index(pair[0].lane), pair[1]))))
        threads = {title: number for number, title in enumerate(titles)}
        named: list[dict[str, Any]] = [_metadata("process_name", rank, 0, name=f"rank {rank}")]
        for title, number in threads.items():
            named.append(_metadata("thread_name", rank, number, name=title))
            named.append(_metadata("thread_sort_index", rank, number, sort_index=number))
        return named + [
            {
                "ph": "X", "pid": rank, "tid": threads[row], "cat": span.lane, "name": span.name, "args": span.arguments(),
                "ts": (span.begin + self._to_epoch) / 1e3, "dur": (span.end - span.begin) / 1e3,
            }
            for span, row in rows
        ]  # fmt: skip


class Listener(logging.Handler):
    """Hears what collectives tell (guard.py; comm.py and ring.py of ring_attention) and passes it on."""

    def __init__(self, recorder: Recorder):
        super().__init__(logging.DEBUG)
        self.recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        what, label, *rest = record.args
        name, recorder = str(label), self.recorder
        if what == "begin":
            recorder.push(name)
        elif what == "end":
            recorder.pop(name)
        else:
            which = f"{record.name} {rest[0]}"
            if what == "posted":
                recorder.posted(_lane(record.name, name), name, which, int(str(rest[1])))
            elif what == "waiting":
                recorder.waiting(name, which)
            else:
                recorder.finished(name, which)


def _lane(logger: str, label: str) -> str:
    if logger.startswith("ring_attention"):
        return "other" if label.startswith("agreement") else "ring"
    unit = _UNIT.fullmatch(label)
    return "other" if unit is None else unit[1]


def _homes(root: nn.Module) -> dict[str, nn.Module]:
    """Title of a unit -> the module around whose call it is used; the root itself, if it has no unit of its own, too."""
    runtime = root.__dict__["_zeroshard"]
    titles = {re.sub(r" \(\d+\)$", "", unit.name) for unit in runtime.units} | {type(root).__name__}
    homes: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        title = clean(name) or type(root).__name__
        if title in titles:
            homes.setdefault(title, module)  # a wrapper and what it wraps have one name
    return homes


def _rows(spans: list[Span]) -> list[tuple[Span, str]]:
    """Each span with its row, by time. Spans of a lane that overlap without nesting go to rows "gather 2", ..."""
    ends: dict[str, list[list[int]]] = {}
    placed = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        rows = ends.setdefault(span.lane, [])
        for open_ends in rows:
            while open_ends and open_ends[-1] <= span.begin:
                open_ends.pop()
        fitting = (number for number, open_ends in enumerate(rows) if not open_ends or span.end <= open_ends[-1])
        number = next(fitting, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(span.end)
        placed.append((span, span.lane if number == 0 else f"{span.lane} {number + 1}"))
    return placed


def _metadata(kind: str, rank: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": arguments}
