"""The user's optimizer, kept and re-pointed. Its step has three phases:

    drain     every sharded parameter in its groups is exchanged for the part this rank steps, with that part's gradient
    step      the user's own, on plain tensors
    publish   the parameters come back; where whole values stay, the stepped shards are sent to everybody

Between steps groups, state and schedulers see the model's own parameters. The state's tensors have the shape of the parts.
An element-wise optimizer steps pieces; one that needs whole tensors steps the whole parameters it owns (whole.py).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from .config import ShardError, settings_of
from .entry import Entry
from .runtime import Runtime
from .sharded import Sharded
from .unit import Unit
from .whole import Owners

log = logging.getLogger(__name__)

ELEMENTWISE = frozenset(
    [
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adagrad,
        optim.Adadelta,
        optim.Adamax,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    ]
)
REFUSED = {
    optim.LBFGS: "it takes inner products over all parameters inside one step",
    optim.SparseAdam: "it needs sparse gradients, which are made dense when they are reduced; use Adam",
}

# State that is one number for a parameter; tells it from state shaped like a 0-dim parameter.
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


def listed(optimizer: Any) -> list[optim.Optimizer]:
    """Of what calls take as `optimizer`: one, a list of them, or None."""
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in optimizers:
        if not isinstance(each, optim.Optimizer):
            raise ShardError(f"optimizer is a {type(each).__name__}: expected a torch.optim.Optimizer, a list of them, or None")
    return optimizers


class Stepper:
    """One optimizer of a runtime. Owned by the optimizer's hooks; knows the optimizer weakly."""

    def __init__(self, optimizer: optim.Optimizer, runtime: Runtime):
        self._optimizer, self.runtime = weakref.ref(optimizer), runtime
        self.owners = Owners(runtime) if self._needs_whole(optimizer) else None
        how = "pieces of parameters" if self.owners is None else "whole parameters, each on the rank that owns it"
        log.debug("%s steps %s", type(optimizer).__name__, how)
        self._parts: dict[int, nn.Parameter] = {}
        self._groups: list[list[nn.Parameter]] | None = None
        self._swapped: list[tuple[Entry, nn.Parameter]] = []
        self._announced = contextlib.ExitStack()
        self._num_states = 0
        runtime.optimizers.append(self._optimizer)
        for param, state in list(optimizer.state.items()):
            entry = self.entry_of(param)
            if entry is not None:
                self._cut_state(entry, state)
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)
        optimizer.register_state_dict_post_hook(self.show_state)
        optimizer.register_load_state_dict_pre_hook(self.take_state)

    def _needs_whole(self, optimizer: optim.Optimizer) -> bool:
        """Refuses what cannot be right, before anything is changed."""
        entries = [self.entry_of(param) for group in optimizer.param_groups for param in group["params"]]
        if not any(entry is not None for entry in entries):
            return False
        for kind, reason in REFUSED.items():
            if isinstance(optimizer, kind):
                raise ShardError(f"{type(optimizer).__name__} cannot step sharded parameters: {reason}")
        return not is_elementwise(optimizer)

    def entry_of(self, param: torch.Tensor) -> Entry | None:
        """The entry of a parameter whose whole this rank does not simply step in place."""
        entry = self.runtime.entry_of.get(id(param))
        return None if entry is None or entry.unit.plain else entry

    def _cut_state(self, entry: Entry, state: dict[str, Any]) -> None:
        """State of steps made before sharding: whole tensors become this rank's part."""
        if self.owners is None:
            for name, value in state.items():
                if name not in SCALARS and isinstance(value, torch.Tensor) and value.shape == entry.param.shape:
                    state[name] = entry.spec.cut(value).clone()
        elif not self.owners.owns(entry):
            state.clear()

    # ---- state_dict and load_state_dict

    def show_state(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Parts are shown as what they are parts of: Sharded tensors, which can be kept and loaded, but not pickled."""
        entries = self._entries_by_index(optimizer)
        if self.owners is not None and any(entry.unit.holders.size > 1 for entry in entries.values()):
            raise ShardError(
                f"{type(optimizer).__name__}.state_dict(): each rank has the state of the parameters it owns only. "
                "Use zeroshard.save(path, model, optimizer)"
            )
        shown = {
            index: {name: self._shown(entries.get(index), name, value) for name, value in state.items()}
            for index, state in state_dict["state"].items()
        }
        return {**state_dict, "state": shown}

    @staticmethod
    def _shown(entry: Entry | None, name: str, value: Any) -> Any:
        part = isinstance(value, torch.Tensor) and value.dim() == 1 and name not in SCALARS
        return Sharded(value, entry.spec) if entry is not None and part and value.numel() == entry.numel else value

    def take_state(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Sharded tensors become parts again; whole tensors of an unsharded run are cut."""
        entries = self._entries_by_index(optimizer)
        taken = {index: dict(state) for index, state in state_dict["state"].items()}
        for index, state in taken.items():
            entry = entries.get(index)
            for name, value in state.items():
                state[name] = value.piece if isinstance(value, Sharded) else value
            if entry is not None:
                self._cut_state(entry, state)
        return {**state_dict, "state": taken}

    def _entries_by_index(self, optimizer: optim.Optimizer) -> dict[int, Entry]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return {index: entry for index, param in enumerate(params) if (entry := self.entry_of(param)) is not None}

    # ---- the three phases

    def before_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self.unswap()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        self.runtime.backward.settle_pending()
        self._announced.close()
        if self.runtime.join is not None:
            if closure is not None:
                raise ShardError("optimizer.step(closure) inside join: idle ranks cannot follow a closure; call step() without")
            index = [ref() for ref in self.runtime.optimizers].index(optimizer)
            event = self.runtime.join.event("step", optimizer=index, groups=settings_of(optimizer))
            self._announced.enter_context(event)
        self.drain()
        if closure is None:
            return None
        again = self._around(closure)
        return ((args[0], again, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": again})

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def again() -> Any:
            self.unswap()
            loss = closure()
            self.drain()
            return loss

        return again

    def after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = {entry.unit.index: entry.unit for entry, part in self._swapped if part.grad is not None}
        if self.owners is not None:
            stepped = self.owners.return_values()
        self.unswap()
        publish([stepped[index] for index in sorted(stepped)], self.runtime)
        self._announced.close()
        self.runtime.counters.steps += optimizer is self.runtime.optimizers[0]()
        if len(optimizer.state) != self._num_states:
            self._num_states = len(optimizer.state)
            self.runtime.ledger.count_optimizers(self.runtime.optimizers)

    def drain(self) -> None:
        self.runtime.backward.settle_pending()
        optimizer = self._optimizer()
        assert optimizer is not None
        entries = [
            entry
            for group in optimizer.param_groups
            for param in group["params"]
            if (entry := self.entry_of(param)) is not None
        ]
        for entry in entries:
            entry.unit.reclaim()
        grads = {id(entry): entry.recover(entry.visible()) for entry in entries}
        self.runtime.check_assigned()
        if self.owners is not None:
            parts = self.owners.collect(entries, grads)
        else:
            parts = {id(entry): self._part(entry, grads[id(entry)]) for entry in entries}
        self._groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = self._exchanged(group["params"], parts)
        for entry in entries:
            part = parts.get(id(entry))
            if part is not None:
                self._swapped.append((entry, part))
                if entry.param in optimizer.state:
                    optimizer.state[part] = optimizer.state.pop(entry.param)

    def _exchanged(self, params: list[nn.Parameter], parts: dict[int, nn.Parameter]) -> list[nn.Parameter]:
        entries = [(param, self.entry_of(param)) for param in params]
        return [param if entry is None else parts[id(entry)] for param, entry in entries if entry is None or id(entry) in parts]

    def _part(self, entry: Entry, grad: torch.Tensor | None) -> nn.Parameter:
        part = self._parts.get(id(entry))
        if part is None:
            part = self._parts[id(entry)] = nn.Parameter(entry.piece_of(entry.unit.shard), requires_grad=True)
        part.grad = None if grad is None else entry.grad_piece()
        return part

    def unswap(self) -> None:
        """The optimizer has the model's own parameters again, and their state."""
        optimizer = self._optimizer()
        if self._groups is None or optimizer is None:
            return
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = params
        for entry, part in self._swapped:
            part.grad = None
            if part in optimizer.state:
                optimizer.state[entry.param] = optimizer.state.pop(part)
        for unit in self.runtime.units:
            unit.grad = None
        self._groups = None
        self._swapped.clear()


def publish(units: list[Unit], runtime: Runtime) -> None:
    """Sends stepped shards to where whole values stay; all at once, then waits for all."""
    for unit in units:
        unit.publish()
        runtime.counters.gathers += unit.gathering
    for unit in units:
        if unit.gathering:
            unit.finish_gather()


# ------------------------------------------------------------------------------------------ what kind of optimizer


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether stepping the pieces of a tensor is stepping the tensor. torch's own are known; others are tried out."""
    if type(optimizer) in ELEMENTWISE:
        return True
    if type(optimizer) in (optim.Adafactor, getattr(optim, "Muon", None)):
        return False
    return _probe(optimizer)


def _probe(optimizer: optim.Optimizer) -> bool:
    """Three steps of a 4 x 6 tensor, and of its flattened pieces: the same bits, or it is not element-wise."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator)
    grads = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    cuts = (0, 7, 9, 24)
    whole = [nn.Parameter(start.clone())]
    pieces = [nn.Parameter(start.flatten()[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    try:
        for params, split in ((whole, (0, 24)), (pieces, cuts)):
            trial = without_state(optimizer, params)
            for grad in grads:
                for param, a, b in zip(params, split, split[1:], strict=False):
                    param.grad = grad.flatten()[a:b].clone().view(param.shape)
                trial.step()
    except Exception:
        return False
    same_values = torch.equal(whole[0].detach().flatten(), torch.cat([piece.detach() for piece in pieces]))
    return same_values


def without_state(optimizer: optim.Optimizer, params: list[nn.Parameter]) -> optim.Optimizer:
    """The same class with the same settings over other parameters, without state and without hooks."""
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    group = optimizer.param_groups[0]
    settings = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    trial.param_groups = [{**settings, "params": params}]
    trial.state = defaultdict(dict)
    for name, value in optimizer.__dict__.items():
        if isinstance(value, OrderedDict) and "hooks" in name:
            trial.__dict__[name] = OrderedDict()
    trial.__dict__.pop("step", None)
    return trial
