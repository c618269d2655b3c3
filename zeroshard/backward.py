"""Gradients of one backward: they arrive, fill a unit, are reduced while backward goes on, and are settled at its end.

chain    the units expected to get a gradient, in the order they are reduced on every rank: by falling index, never by
         arrival. A unit is reduced early only when all before it in the chain were
round    one reduction of a unit; a gradient that arrives after it takes part in another one
flight   the units being reduced at one time: together no larger than the model's largest unit, so that many small ones
         (adapters, say) are reduced without ranks waiting for each other, and large ones cost the memory of one
settle   at the end the ranks tell each other what arrived where. Every rank then reduces the same units: a gradient
         missing here counts as zero if another rank has one, and stays `None` if nobody has
"""

from __future__ import annotations

import itertools
import json
import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from .comm import tag_of
from .config import DivergenceError, ShardError, settings_of
from .entry import Entry
from .unit import Unit

if TYPE_CHECKING:
    from .runtime import Runtime

ARRIVED, PENDING = 1, 2


class Backward:
    def __init__(self, runtime: Runtime):
        self._runtime = weakref.ref(runtime)
        self.units = runtime.units
        self.chain = [unit for unit in reversed(self.units) if unit.trainable and not unit.alone]
        self.no_sync_depth = 0
        self.wide = False  # gradients travel in the masters' dtype: some have been accumulated in no_sync
        self._issued = 0
        self._in_flight: list[Unit] = []
        self._most_in_flight = max((unit.whole_bytes for unit in self.units), default=0)
        self._tasks: list[int] = []

    @property
    def runtime(self) -> Runtime:
        runtime = self._runtime()
        assert runtime is not None
        return runtime

    @property
    def under_way(self) -> bool:
        return bool(self._tasks)

    @property
    def deferred(self) -> bool:
        """Inside no_sync, at a stage that may keep whole gradients."""
        return self.no_sync_depth > 0 and not self.runtime.options.stage.release_grads

    # ---- where a backward starts and ends

    def entered(self) -> None:
        """Some event of a backward. Nested ones (reentrant checkpointing) belong to the outermost."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._tasks:
            return
        if self._tasks and _outermost():
            self.abandon()
        if not self._tasks:
            for entry in self.runtime.entry_of.values():
                entry.check_param()
            self._issued = 0
            self.runtime.schedule.begin_reversed("backward", "train")
        self._tasks.append(task)
        self.runtime.at_end_of_backward(lambda: self._left(task))

    def _left(self, task: int) -> None:
        self._tasks.remove(task)
        if not self._tasks:
            if self.deferred:
                self.wide = True
                self._show_local()
            else:
                self._settle_all()
            self.runtime.backward_ended()

    def forward_starts(self) -> None:
        """A forward inside a backward is a recomputation; one outside finds no backward, unless that one was broken off."""
        if torch._C._current_graph_task_id() != -1:
            self.entered()
        elif self._tasks:
            self.abandon()

    def abandon(self) -> None:
        """A backward ended in an error: what it had gathered so far is dropped."""
        self._tasks.clear()
        for unit in self._in_flight:
            unit.finish_reduce(set(), self.runtime.topology.ranks)
        self._in_flight.clear()
        for unit in self.units:
            unit.local, unit.rounds, unit.grad = None, 0, None
            unit.filled, unit.arrived, unit.reduced = set(), set(), set()
            for entry in unit.entries:
                entry.stashed = None
        self.runtime.backward_ended()

    # ---- arrival

    def before_accumulation(self, entry: Entry) -> None:
        """Autograd is about to add a gradient to the parameter: it must find none."""
        unit = entry.unit
        if not self.runtime.optimizers:
            raise ShardError(
                f"a gradient reached {entry.name}, but shard() was given no optimizer. Pass it: shard(model, optimizer, ...), "
                "or freeze a model for inference with model.requires_grad_(False)"
            )
        if unit.alone:
            return
        self.entered()
        if entry.index in unit.arrived:
            return
        visible = entry.recover(entry.hide())
        if visible is None:
            unit.filled.discard(entry.index)
        elif visible is not entry.local_view:
            if self.deferred:
                if self.runtime.join is not None:
                    raise ShardError(
                        f"inside join, no_sync() found a gradient of {entry.name} that is reduced already: over how many ranks "
                        "the next mean will be is not known yet. Call zero_grad() before no_sync(), or accumulate without it"
                    )
                unit.fold(entry)
            else:
                entry.stashed = visible

    def accumulated(self, entry: Entry) -> None:
        """Autograd and the user's hooks are done with this parameter."""
        unit = entry.unit
        if unit.alone:
            self._keep(entry)
            return
        grad = entry.take_raw()
        if grad is None:
            entry.show(entry.stashed)
            return
        if grad.requires_grad:
            raise ShardError(
                f"backward(create_graph=True) gave {entry.name} a gradient that has a graph, which reduction over ranks would "
                "cut. Use torch.autograd.grad(..., create_graph=True) and call backward on a loss made of its result"
            )
        unit.arrive(entry, grad.to_dense() if grad.is_sparse else grad, keep=self.deferred)
        unit.arrived.add(entry.index)
        entry.local_view = None  # no_sync's view would keep local alive beyond its reduction
        if not self.deferred:
            self._advance()

    def _keep(self, entry: Entry) -> None:
        """The gradient of the only rank: what autograd has accumulated, made dense."""
        grad = entry.param.grad
        if grad is not None:
            if grad.is_sparse:
                grad = entry.param.grad = grad.to_dense()
            self.runtime.ledger.hold("gradients", grad)

    def _advance(self) -> None:
        while self._issued < len(self.chain) and self.chain[self._issued].arrived >= self.chain[self._issued].expected:
            unit = self.chain[self._issued]
            if self.runtime.join is not None:
                self.runtime.join.announce("reduce", unit=unit.index, alive=sorted(self.alive(unit)))
            self._issue(unit)
            self._issued += 1

    def follow_reduce(self, unit: Unit, alive: set[int]) -> None:
        """The part of a rank that has no gradients of its own, inside join."""
        self.keep_only(unit, alive)
        self._issue(unit)
        self._issued += 1

    @staticmethod
    def keep_only(unit: Unit, alive: set[int]) -> None:
        for entry in unit.entries:
            if entry.index not in alive:
                entry.show(None)

    @staticmethod
    def alive(unit: Unit) -> set[int]:
        """Entries whose earlier gradient still counts."""
        return {
            entry.index
            for entry in unit.entries
            if entry.stashed is not None or (entry.index not in unit.arrived and entry.visible() is not None)
        }

    def _issue(self, unit: Unit) -> None:
        while self._in_flight and sum(u.whole_bytes for u in (*self._in_flight, unit)) > self._most_in_flight:
            self._finish(self._in_flight.pop(0))
        self._drop_cleared(unit)
        unit.reduce(self.wide)
        self.runtime.counters.reductions += 1
        self._in_flight.append(unit)

    @staticmethod
    def _drop_cleared(unit: Unit) -> None:
        """Local gradients of earlier backwards, in no_sync, that were cleared since."""
        for entry in unit.entries:
            if entry.index in unit.filled and entry.index not in unit.arrived:
                if entry.visible() is not entry.local_view:
                    unit.filled.discard(entry.index)
                else:
                    entry.hide()

    def _finish(self, unit: Unit) -> None:
        alive = set()
        for entry in unit.entries:
            if entry.index not in unit.arrived and entry.stashed is None:
                visible = entry.visible()
                entry.stashed = entry.recover(visible) if visible is not entry.local_view else None
            if entry.stashed is not None or unit.rounds:
                alive.add(entry.index)
        unit.finish_reduce(alive, self.runtime.join.active if self.runtime.join is not None else self.runtime.topology.ranks)
        unit.rounds += 1

    # ---- the end

    def _settle_all(self) -> None:
        """Settles; inside join the ranks without work hear of it first."""
        if self.runtime.join is None:
            self.settle()
            return
        alive = [sorted(self.alive(unit)) for unit in self.units]
        with self.runtime.join.event("settle", alive=alive, wide=self.wide):
            self.settle()

    def settle(self) -> None:
        """Reduces on every rank what arrived on any, then shows the gradients. Collective.

        The rest of the chain goes first, as zeros where nothing arrived: another rank may wait for it in mid-backward.
        """
        while self._issued < len(self.chain):
            self._issue(self.chain[self._issued])
            self._issued += 1
        told = self._exchange()
        for unit in reversed(self.units):
            if any(mark & PENDING for marks in told for mark in marks[unit.index]):
                self._issue(unit)
        while self._in_flight:
            self._finish(self._in_flight.pop(0))
        chain: list[Unit] = []
        for unit in self.units:
            present = [any(marks) for marks in zip(*(marks[unit.index] for marks in told), strict=True)]
            self._show(unit, present)
            if any(present):
                chain.insert(0, unit)
        self.chain = chain or self.chain
        self._issued, self.wide = 0, False

    def _exchange(self) -> list[list[list[int]]]:
        """Of every rank, per unit and entry: ARRIVED, and PENDING where it has not been in a round yet.

        Ranks whose optimizers have other settings are found out here, before they step their shards differently.
        """
        settings = json.dumps([settings_of(o) for ref in self.runtime.optimizers if (o := ref()) is not None])
        marks = [tag_of(settings)]
        for unit in self.units:
            for entry in unit.entries:
                waits = entry.index in unit.filled
                marks.append(ARRIVED * (waits or entry.index in unit.reduced) + PENDING * waits)
        messages = self.runtime.topology.exchange_all("end of backward", torch.tensor(marks, dtype=torch.int32))
        if self.runtime.join is None and any(int(message[0]) != marks[0] for message in messages):
            self._raise_settings(settings)
        told = []
        for message in messages:
            of_entry = iter(message.tolist()[1:])
            told.append([[next(of_entry) for _ in unit.entries] for unit in self.units])
        return told

    def _raise_settings(self, settings: str) -> None:
        told = self.runtime.topology.exchange_bytes("settings of optimizers", settings.encode())
        first = told[0]
        other = next(each for each in told if each[1] != first[1])
        nothing: Any = {}
        names = [
            f"{name}={one.get(name)} and {two.get(name)}"
            for a, b in itertools.zip_longest(json.loads(first[1]), json.loads(other[1]), fillvalue=nothing)
            for one, two in itertools.zip_longest(a, b, fillvalue=nothing)
            for name in {**one, **two}
            if one.get(name) != two.get(name)
        ]
        raise DivergenceError(
            f"optimizer settings differ on ranks {first[0]} and {other[0]}: {', '.join(names[:4])}. Each rank would step "
            "its own shards with its own; set them alike on all ranks"
        )

    def _show(self, unit: Unit, present: list[bool]) -> None:
        if unit.arrived:
            unit.expected = set(unit.arrived)
        for entry in unit.entries:
            if present[entry.index] and unit.rounds:
                entry.show(entry.make_handle())
            elif entry.stashed is not None:
                entry.show(entry.stashed)
            entry.stashed = entry.local_view = None
        unit.arrived, unit.reduced, unit.rounds, unit.grad = set(), set(), 0, None

    def _show_local(self) -> None:
        for unit in self.units:
            for entry in unit.entries:
                if entry.index in unit.arrived:
                    assert unit.local is not None
                    entry.local_view = entry.view_of(unit.local)
                    entry.show(entry.local_view)
            unit.arrived, unit.grad = set(), None

    def settle_pending(self) -> None:
        """Before a step: gradients that no_sync left unreduced. Collective if there are any."""
        if self._tasks:
            self.abandon()
            raise ShardError("the last backward did not finish: call optimizer.zero_grad() and run the step again")
        if any(unit.local is not None for unit in self.units):
            self._issued = 0
            self._settle_all()


def _outermost() -> bool:
    """Whether just one run of the engine is on this thread's stack: then no earlier backward can still be under way."""
    frame: FrameType | None = sys._getframe()
    runs = 0
    while frame is not None:
        runs += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return runs == 1
