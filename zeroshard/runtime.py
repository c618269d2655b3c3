"""What happens when: before and after a module's forward, when backward wants a weight, when a gradient arrives.

    scope    a module around whose call units are gathered and released
    use      one such call, seen from backward (saved.py)

The runtime owns the units and knows the model only weakly; the model's hooks own the runtime.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import saved
from .backward import Backward
from .comm import Topology
from .config import DivergenceError, Options, ShardError
from .entry import Entry
from .guard import Guard
from .schedule import Schedule
from .unit import State, Unit

if TYPE_CHECKING:
    from .join import Join
    from .memory.ledger import Ledger


SAME_NORM = 1e-3  # how far norms of one gradient may be apart between ranks: sums may run in another order


@dataclasses.dataclass
class Counters:
    """What has happened since `shard`; `stats` shows it."""

    gathers: int = 0
    reductions: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    steps: int = 0  # of the first optimizer


@dataclasses.dataclass(frozen=True)
class Scope:
    """A module and the units gathered around its call."""

    index: int
    name: str
    units: tuple[Unit, ...]


class Runtime:
    def __init__(
        self,
        units: Sequence[Unit],
        scopes: Sequence[Scope],
        topology: Topology,
        options: Options,
        guard: Guard,
        ledger: Ledger,
        at_end_of_backward: Callable[[Callable[[], None]], None],
    ):
        self.units, self.scopes, self.topology, self.options, self.guard = (
            list(units),
            list(scopes),
            topology,
            options,
            guard,
        )
        self.at_end_of_backward, self.ledger = at_end_of_backward, ledger
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.counters = Counters()
        self.schedule = Schedule()
        self.unit_of_storage: dict[int, Unit] = {}
        self.entry_of: dict[int, Entry] = {id(entry.param): entry for unit in units for entry in unit.entries}
        self.scope_of_unit = {unit.index: scope.index for scope in scopes for unit in scope.units}
        self.join: Join | None = None
        self.unpublished: Any = None  # a save in the background that nobody has waited for
        self.assigned: dict[str, float] = {}  # norms of gradients that the user has put in place since the last step
        self.backward = Backward(self)
        self._depth = 0
        self._entered: list[tuple[Scope, bool]] = []
        self._open: dict[int, set[saved.Use]] = {unit.index: set() for unit in units}
        self._recomputed: tuple[Unit, ...] = ()
        for unit in units:
            unit.runtime = weakref.ref(self)
        ref = weakref.ref(self)
        guard.place = lambda: "" if (runtime := ref()) is None else runtime.place

    @property
    def place(self) -> str:
        """Where this rank is in its loop, as errors tell it. Steps are counted since `shard`."""
        phase = "in backward, " if self.backward.under_way else "in forward, " if self._depth else ""
        return f" {phase}step {self.counters.steps + 1}"

    def check_assigned(self) -> None:
        """Collective where gradients were assigned: each rank keeps its pieces of what must be the same everywhere."""
        here, self.assigned = self.assigned, {}
        if not here or self.topology.ranks == 1:
            return
        told = self.topology.exchange_bytes("gradients assigned before a step", json.dumps(here).encode())
        (first, norms), *others = [(rank, json.loads(text)) for rank, text in told]
        for rank, theirs in others:
            for name in sorted(norms.keys() | theirs.keys()):
                one, other = norms.get(name, math.inf), theirs.get(name, math.inf)
                if not (math.isclose(one, other, rel_tol=SAME_NORM) or (math.isnan(one) and math.isnan(other))):
                    raise DivergenceError(
                        f"the gradient assigned to {name} has norm {one:.6g} on rank {first} and {other:.6g} on rank {rank}, "
                        "and must be the same on all. One from torch.autograd.grad is that of a rank's own data: average it "
                        "over the ranks before it is assigned, or use loss.backward()"
                    )

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardError(
            "copy.deepcopy of a sharded model. For an average of the weights use zeroshard.EMA(model, decay); for a copy, load "
            "zeroshard.full_state_dict(model) into an unsharded model"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardError(
            "a sharded model cannot be pickled. Use zeroshard.save(path, model, optimizer), or torch.save of "
            "zeroshard.full_state_dict(model)"
        )

    # ---- forward

    def before_forward(self, scope: Scope) -> None:
        if saved.recording_transform() and any(unit.releases for unit in scope.units):
            raise ShardError(
                f"{scope.name} is called inside a transform of torch.func that records gradients (grad, vjp, jvp, jacrev), "
                "and stage 3 releases weights that it records. Use torch.autograd.grad or torch.autograd.functional, or stage 2"
            )
        self.backward.forward_starts()
        if self._depth == 0:
            self.schedule.begin(self._phase)
        self._depth += 1
        try:
            self.need(scope.units, scope.index, self._phase)
        except BaseException:  # this call never began
            self._depth -= 1
            raise
        for unit in scope.units:
            unit.expose()
            self._begin_use(unit, scope.index)
        self._entered.append((scope, any(unit.releases for unit in scope.units) and saved.push(self)))

    def _begin_use(self, unit: Unit, scope: int) -> None:
        """What autograd saves of the unit from here on belongs to one use."""
        if unit.releases and torch.is_grad_enabled():
            unit.use = saved.Use(unit, scope, weakref.ref(self))

    def after_forward(self, scope: Scope) -> None:
        if not self._entered or self._entered[-1][0] is not scope:
            return  # before_forward raised
        if self._entered.pop()[1]:
            saved.pop()
        self._depth -= 1
        for unit in scope.units:
            self._used(unit)
        if self._depth == 0:
            self.release_unused()

    def _used(self, unit: Unit) -> None:
        unit.conceal()
        if unit.users == 0:
            unit.use = None
        self.release(unit)

    @property
    def _phase(self) -> str:
        return "train" if torch.is_grad_enabled() else "eval"

    @contextlib.contextmanager
    def using(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keeps `units` full and their parameters plain, outside any forward."""
        self.need(units, None, self._phase)
        for unit in units:
            unit.expose()
        try:
            yield
        finally:
            for unit in units:
                self._used(unit)

    def on_the_spot(self, unit: Unit, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls `func` with every sharded parameter among its arguments whole."""
        if torch._C._current_graph_task_id() != -1:
            self._recompute(unit)
        units = {unit.index: unit}
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            entry = self.entry_of.get(id(leaf))
            if entry is not None and not entry.unit.alias:
                units[entry.unit.index] = entry.unit
        chosen = [units[index] for index in sorted(units)]
        with self.using(chosen):
            for each in chosen:
                self._begin_use(each, self.scope_of_unit.get(each.index, -1))
            versions = [entry.param._version for each in chosen for entry in each.entries]
            pushed = saved.push(self)
            try:
                return func(*args, **kwargs)
            finally:
                if pushed:
                    saved.pop()
                if versions != [entry.param._version for each in chosen for entry in each.entries]:
                    raise ShardError(
                        f"{getattr(func, '__name__', func)} wrote into gathered values of {', '.join(u.name for u in chosen)}, "
                        "which would be lost. Edit inside `with zeroshard.gathered(model, write=True):`"
                    )

    def _recompute(self, unit: Unit) -> None:
        """Backward reads a weight: a checkpoint inside the module's call computes its forward again, without its hooks.

        What the module needs is gathered once and stays until another module is at it, or backward ends.
        """
        scope = self.scope_of_unit.get(unit.index)
        units = (unit,) if scope is None else self.scopes[scope].units
        if units == self._recomputed:
            return
        done, self._recomputed = self._recomputed, units
        for each in done:
            self.release(each)
        self.backward.entered()
        self.need(units, scope, "backward")

    def is_recomputed(self, unit: Unit) -> bool:
        return unit in self._recomputed

    # ---- gather and release

    def need(self, units: Sequence[Unit], scope: int | None, phase: str) -> None:
        """Makes `units` full, then starts to gather what the schedule expects next."""
        for unit in units:
            if unit.needs_gather:
                self.start_gather(unit)
                self.counters.prefetch_misses += unit.releases
            elif unit.state is State.GATHERING:
                self.counters.prefetch_hits += 1
        for unit in units:
            if unit.state is State.GATHERING:
                unit.finish_gather()
        if scope is None or not self.options.prefetch:
            return
        for index in self.schedule.use(phase, scope, self.options.prefetch):
            for unit in self.scopes[index].units:
                if unit.releases and unit.state is State.SHARDED:
                    self.start_gather(unit)

    def start_gather(self, unit: Unit) -> None:
        if self.join is not None:
            self.join.announce("gather", unit=unit.index)
        unit.gather()
        self.unit_of_storage[unit.full_storage] = unit
        self.counters.gathers += unit.holders.size > 1

    def release(self, unit: Unit) -> None:
        if not unit.releases or unit.users or unit in self._recomputed or self._open[unit.index]:
            return
        if unit.state is not State.SHARDED:
            self.unit_of_storage.pop(unit.full_storage, None)
            unit.release()

    def release_unused(self) -> None:
        """What was gathered ahead and never used, and what stale graphs hold open."""
        for unit in self.units:
            self.release(unit)

    # ---- backward

    def unpack(self, ref: saved.Ref) -> torch.Tensor:
        """Backward wants a weight of a unit that has been released."""
        use, unit = ref.use, ref.use.unit
        self.backward.entered()
        if not use.open:
            use.open = True
            self._open[unit.index].add(use)
            self.need([unit], use.scope, "backward")
        elif unit.state is not State.FULL:
            self.need([unit], None, "backward")
        use.unpacked += 1
        assert unit.full is not None
        tensor = unit.full.as_strided(ref.size, ref.stride, ref.offset)
        if use.unpacked >= use.packed:
            use.close()
        return tensor

    def close_use(self, use: saved.Use) -> None:
        self._open[use.unit.index].discard(use)
        self.release(use.unit)

    def backward_ended(self) -> None:
        self._recomputed = ()
        for uses in self._open.values():
            for use in list(uses):
                use.close()
        if self._depth == 0:
            self.release_unused()


def runtime_of(model: Any, call: str) -> Runtime:
    """The runtime behind a sharded model; `call` is what the user called, for the error."""
    runtime = model.__dict__.get("_zeroshard") if isinstance(model, nn.Module) else None
    if runtime is None:
        raise ShardError(f"{call} takes a model that zeroshard.shard has sharded, got {type(model).__name__}")
    return runtime
