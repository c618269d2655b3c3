"""Whole values of a sharded model, a unit at a time: `gathered`, `full_state_dict`, `full_gradients`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .config import ShardError
from .entry import Entry
from .partition import clean
from .runtime import Runtime, runtime_of
from .sharded import Sharded
from .unit import Unit

# ------------------------------------------------------------------------------------------ gathered


@contextlib.contextmanager
def gathered(model: Any, write: bool = False) -> Iterator[None]:
    """Whole parameters inside the context: a module, a list of modules, or parameters. Collective at its ends only.

    With `write=True` they are the master values; what rank 0 has made of them at the end counts for all ranks. Without, an
    edit raises `ShardError` at the end, naming the parameter and `write`.
    """
    runtime, units = _chosen(model)
    if write:
        yield from _writing(runtime, units)
        return
    with runtime.using(units):
        before = {unit.index: _fingerprint(unit) for unit in units}
        yield
        edited = [int(_fingerprint(unit) != before[unit.index]) for unit in units]
    told = runtime.topology.exchange_all("end of gathered", torch.tensor(edited, dtype=torch.int32))
    for unit, *marks in zip(units, *[t.tolist() for t in told], strict=True):
        if any(marks):
            raise ShardError(
                f"parameters of {unit.name} were edited inside gathered(model): the edit is lost. "
                "Use gathered(model, write=True)"
            )


def _writing(runtime: Runtime, units: Sequence[Unit]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.enter_context(unit.masters_exposed())
        yield
        for unit in units:
            unit.reclaim()
            assert unit.full is not None
            runtime.topology.broadcast(f"edits of {unit.name}", unit.full)
            unit.shard.copy_(unit.held_of(unit.full))


def _fingerprint(unit: Unit) -> int:
    """Changes with (nearly) any change of a bit of the whole values; nothing is copied."""
    if unit.full is None:
        return 0
    return int(unit.full.view(torch.uint8 if unit.full.element_size() == 1 else torch.int16).sum(dtype=torch.int64))


def _chosen(what: Any) -> tuple[Runtime, list[Unit]]:
    """The units behind modules or parameters, in order."""
    items = [what] if isinstance(what, (nn.Module, torch.Tensor)) else list(what)
    units: dict[int, Unit] = {}
    runtimes: list[Any] = []
    for item in items:
        if isinstance(item, nn.Module) and "_zeroshard" in item.__dict__:
            runtimes.append(runtime_of(item, "gathered"))
            units.update({unit.index: unit for unit in runtimes[-1].units})
            continue
        for param in item.parameters() if isinstance(item, nn.Module) else [item]:
            entry = _entry_of(param)
            units[entry.unit.index] = entry.unit
            runtimes.append(entry.unit.runtime())
    if not runtimes or any(runtime is not runtimes[0] for runtime in runtimes):
        raise ShardError("gathered takes a sharded model, modules of it, or its parameters; all of one model")
    return runtimes[0], [units[index] for index in sorted(units)]


def _entry_of(param: torch.Tensor) -> Entry:
    reference = getattr(param, "_zeroshard", None)
    entry = reference() if reference is not None else None
    if not isinstance(entry, Entry):
        raise ShardError(f"gathered got a {type(param).__name__} that belongs to no sharded model")
    return entry


# ------------------------------------------------------------------------------------------ state and gradients


def full_state_dict(model: nn.Module, trainable_only: bool = False, rank0_only: bool = False) -> dict[str, Any]:
    """Whole CPU tensors under the unsharded names, in the unsharded order; masters, gathered a unit at a time.

    Args:
        trainable_only: only parameters with `requires_grad`, and no buffers; nothing else is gathered.
        rank0_only: the other ranks get `{}`, and keep nothing.

    Collective at stage 3 (and where masters are cast for compute); local elsewhere. Buffers are rank 0's.
    """
    runtime = runtime_of(model, "full_state_dict")
    keep = not rank0_only or runtime.topology.shard.ranks[0] == runtime.guard.rank == min(runtime.guard.members or [0])
    wholes: dict[int, torch.Tensor] = {}
    for unit in runtime.units:
        wanted = [entry for entry in unit.entries if entry.param.requires_grad or not trainable_only]
        if wanted:
            with unit.whole_masters("full_state_dict of") as masters:
                if keep:
                    wholes.update({id(entry.param): entry.view_of(masters).detach().cpu().clone() for entry in wanted})
    state = _named_state(model)
    result: dict[str, Any] = {}
    for name, value in state.items():
        if id(value) in runtime.entry_of:
            if id(value) in wholes:
                result[name] = wholes[id(value)]
        elif not trainable_only:
            result[name] = _buffer(runtime, name, value) if isinstance(value, torch.Tensor) else value
    return result if keep else {}


def _buffer(runtime: Runtime, name: str, value: torch.Tensor) -> torch.Tensor:
    values = value.detach().clone().contiguous()
    if any(unit.releases for unit in runtime.units):
        runtime.topology.broadcast(f"full_state_dict of buffer {name}", values)
    return values.cpu()


def _named_state(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()` by clean names, with the model's own parameter objects."""
    return {clean(name): value for name, value in model.state_dict(keep_vars=True).items()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Whole reduced gradients on the CPU by name; `None` where there is none. Collective at stages 1 to 3."""
    runtime = runtime_of(model, "full_gradients")
    by_param: dict[int, torch.Tensor | None] = {}
    for unit in runtime.units:
        grads = {entry.index: entry.recover(entry.visible()) for entry in unit.entries}
        held = unit.grad
        whole = held
        if held is not None and unit.held_numel < unit.layout.numel and any(isinstance(g, Sharded) for g in grads.values()):
            whole = torch.empty(unit.layout.numel, dtype=unit.dtype, device=held.device)
            unit.held_of(whole).copy_(held)
            whole = unit.holders.gather(f"full_gradients of {unit.name}", whole).wait()
        for entry in unit.entries:
            grad = grads[entry.index]
            if isinstance(grad, Sharded):
                assert whole is not None
                grad = entry.view_of(whole)
            by_param[id(entry.param)] = None if grad is None else grad.detach().cpu().clone()
        unit.grad = None
    return {clean(name): by_param.get(id(param)) for name, param in model.named_parameters()}
