"""`join`: ranks may run out of work at different times. Those that have none left follow the others.

Inside the context every collective is announced before it starts. A rank that has left its loop listens: it gives its share
to every gather, adds nothing to every reduction, and steps its own shards when the others step, with their settings. The
mean of gradients is taken over the ranks that still have work. The context ends when nobody has any.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .config import DivergenceError, ShardError
from .entry import Entry
from .partial import Partial, resolve
from .runtime import Runtime, runtime_of
from .schedule import Schedule
from .sharded import Sharded, dispatch


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Work of different length on every rank: training, evaluation or generation loops inside the context.

    Raises:
        ShardError: a call on gradients that the idle ranks cannot follow; optimizers that take a closure.
        DivergenceError: the ranks that have work do different things.
    """
    runtime = runtime_of(model, "join")
    if runtime.topology.ranks == 1:
        yield
        return
    if runtime.join is not None:
        raise ShardError("join(model) inside join(model)")
    following = Join(runtime)
    runtime.join = following
    for channel in runtime.topology.channels:
        channel.mirror = following
    try:
        yield
        following.serve()
    finally:
        runtime.join, runtime.schedule = None, Schedule()  # the ranks have not seen the same passes
        for channel in runtime.topology.channels:
            channel.mirror = None


class Join:
    """`active`: how many ranks took part in the last announcement with work of their own."""

    def __init__(self, runtime: Runtime):
        self.runtime, self.active, self._quiet = runtime, runtime.topology.ranks, 0
        self._events, self._worked_until = 0, 0
        self.ranks: list[int] = []
        self.entries = {name: entry for unit in runtime.units for entry in unit.entries for name in entry.names}
        self._followers: dict[str, Callable[[dict[str, Any]], None]] = {
            "gather": self._gather,
            "reduce": self._reduce,
            "settle": self._settle,
            "step": self._step,
            "norms": self._norms,
            "apply": self._apply,
        }

    # ---- ranks that have work

    def announce(self, do: str, **what: Any) -> dict[str, Any] | None:
        """-> the event as all ranks have it, with the first rank that has work as `from`; `None` inside another event."""
        if self._quiet:
            return None
        event = self._exchange({"do": do, **what})
        self._worked_until = self._events
        return event

    @contextlib.contextmanager
    def event(self, do: str, **what: Any) -> Iterator[None]:
        """Announced as one: whatever it communicates inside, the others know."""
        event = self.announce(do, **what)
        self._quiet += 1
        try:
            if do == "step" and event is not None:
                self.share_plain_gradients(event["from"])
            yield
        finally:
            self._quiet -= 1

    def calls(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """An operation on gradients or values that changes pieces, or asks all pieces: the idle ranks do it too."""
        if not self._quiet:
            self.announce("apply", func=str(func), args=[self._encode(arg) for arg in args], kwargs=self._encode(kwargs))

    def asks(self, partials: list[Partial]) -> None:
        if not self._quiet:
            self.announce("norms", of=[[str(p.source[0]), [self._encode(arg) for arg in p.source[1]]] for p in partials])

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """-> what the ranks that have work do; `None` if no rank has any."""
        told = self.runtime.topology.exchange_bytes("join", json.dumps(message).encode())
        doing = [(rank, json.loads(text)) for rank, text in told]
        working = [(rank, each) for rank, each in doing if each["do"] is not None]
        self._events += 1
        if not working:
            self._end_alike([each for _, each in doing])
            return None
        self.active = len(working)
        for rank, each in working[1:]:
            if each != working[0][1]:
                raise DivergenceError(
                    f"inside join, ranks {working[0][0]} and {rank} do different things: {_brief(working[0][1])} and "
                    f"{_brief(each)}"
                )
        self.ranks = [rank for rank, _ in told]
        return {**working[0][1], "from": working[0][0]}

    def _end_alike(self, told: list[dict[str, Any]]) -> None:
        """Gradients that the last working rank has cleared are cleared here too."""
        last = max(told, key=lambda each: each["until"])
        for unit, alive in zip(self.runtime.units, last["alive"], strict=True):
            self.runtime.backward.keep_only(unit, set(alive))

    # ---- ranks that have none

    def serve(self) -> None:
        """Follows until no rank has work."""
        while (event := self._exchange(self._idle())) is not None:
            self._quiet += 1
            try:
                self._followers[event["do"]](event)
            finally:
                self._quiet -= 1

    def _idle(self) -> dict[str, Any]:
        alive = [sorted(self.runtime.backward.alive(unit)) for unit in self.runtime.units]
        return {"do": None, "until": self._worked_until, "alive": alive}

    def _gather(self, event: dict[str, Any]) -> None:
        unit = self.runtime.units[event["unit"]]
        self.runtime.start_gather(unit)
        unit.finish_gather()
        self.runtime.release(unit)

    def _reduce(self, event: dict[str, Any]) -> None:
        self.runtime.backward.follow_reduce(self.runtime.units[event["unit"]], set(event["alive"]))

    def _settle(self, event: dict[str, Any]) -> None:
        for unit, alive in zip(self.runtime.units, event["alive"], strict=True):
            if not unit.rounds:
                self.runtime.backward.keep_only(unit, set(alive))
        self.runtime.backward.wide = event["wide"]
        self.runtime.backward.settle()

    def _step(self, event: dict[str, Any]) -> None:
        optimizer = self.runtime.optimizers[event["optimizer"]]()
        assert optimizer is not None
        self.share_plain_gradients(event["from"])
        for group, settings in zip(optimizer.param_groups, event["groups"], strict=True):
            group.update({name: tuple(v) if isinstance(group.get(name), tuple) else v for name, v in settings.items()})
        optimizer.step()

    def share_plain_gradients(self, source: int) -> None:
        """Where a rank holds everything its gradients are plain tensors, and nobody has seen what became of them."""
        for unit in (unit for unit in self.runtime.units if unit.plain):
            flat = torch.zeros(unit.layout.numel, dtype=unit.dtype, device=unit.shard.device)
            grads = {entry.index: entry.visible() for entry in unit.entries}
            for entry in unit.entries:
                if (grad := grads[entry.index]) is not None:
                    entry.view_of(flat).copy_(grad)
            everywhere = self.runtime.topology.exchange_all(f"gradients of {unit.name} for idle ranks", flat)
            place = self.ranks.index(source)
            for entry in unit.entries:
                if (grad := grads[entry.index]) is not None:
                    grad.copy_(entry.view_of(everywhere[place]))

    def _norms(self, event: dict[str, Any]) -> None:
        resolve([dispatch(_function(name), [self._decode(arg) for arg in args], {}) for name, args in event["of"]])

    def _apply(self, event: dict[str, Any]) -> None:
        dispatch(_function(event["func"]), [self._decode(arg) for arg in event["args"]], self._decode(event["kwargs"]))

    # ---- arguments

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Partial):
            value = value.resolved()
        if isinstance(value, Sharded):
            if value.owner is not None:
                return {"value": value.spec.name}
            if hasattr(value, "_zeroshard_held"):
                return {"grad": value.spec.name}
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            return {"number": value.item(), "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        elif isinstance(value, (list, tuple)):
            return [self._encode(each) for each in value]
        elif isinstance(value, dict):
            return {"items": [[name, self._encode(each)] for name, each in value.items()]}
        elif value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ShardError(
            "inside join, ranks without work can follow operations of gradients and numbers only: clip with "
            "torch.nn.utils.clip_grad_norm_ or clip_grad_value_, or do this outside join"
        )

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "items" in value:
            return {name: self._decode(each) for name, each in value["items"]}
        if "number" in value:
            return torch.tensor(value["number"], dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
        entry: Entry = self.entries[value.get("grad") or value["value"]]
        return entry.recover(entry.visible()) if "grad" in value else entry.value()


def _function(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _brief(event: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in event.items())[:200]
