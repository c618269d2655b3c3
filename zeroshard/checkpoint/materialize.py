"""materialize: values for a model that was built on the meta device and sharded there.

From scratch, module by module in the order in which they were built: a module's own parameters are made whole on the CPU,
its `reset_parameters` fills them, and every rank keeps its pieces. A model of transformers fills all its modules a second time
when it has built them, by its own `_init_weights`; so is done here. All ranks draw from rank 0's random state, so nothing is
sent, and what a CPU build with the same seed would hold is held. From files, each rank reads its own bytes.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..config import ShardError
from ..optimizer import publish
from ..partition import clean
from ..runtime import Runtime, runtime_of
from . import contents
from .filling import REMEDY, Fill, Scratch, full_name, on_meta, values_of
from .tensorfile import Stored, stored_in
from .together import together

_MAX_NAMED = 40


@torch.no_grad()
def materialize(model: nn.Module, source: str | os.PathLike[str] | None = None) -> None:
    """Gives values to all parameters, and to the buffers that are still on the meta device. Collective.

    Args:
        model: sharded, usually after it was built under `with torch.device("meta"):`.
        source: `None`: every module's own `reset_parameters`, children before parents, and the `_init_weights` of models
            of transformers; bit-equal to a CPU build with the same seed. Or a safetensors file, or a folder of them, read
            by byte ranges and cast to the masters' dtype; buffers that are not in it come from the same functions.

    Memory beyond the model's own: the parameters of one module; from files, one block of 2**22 elements.

    Raises:
        ShardError: on all ranks: a module has parameters or buffers of its own that nothing fills, or nobody can know
            whether its constructor would draw random numbers (transformers' Conv1D); a name that is missing or not expected;
            another shape; a damaged file.
    """
    runtime = runtime_of(model, "materialize")
    topology = runtime.topology
    error: Exception | None = None
    stored: dict[str, Stored] | None = None
    try:
        if source is not None:
            stored = stored_in(pathlib.Path(os.path.abspath(source)))
            _match(stored, model, runtime)
        fills = _fills(model) if stored is None else _fills_of_buffers(model, stored)
    except Exception as problem:
        error = problem
    states = together(topology, "materialize: begin", torch.get_rng_state().numpy().tobytes(), error)
    try:
        if stored is None:
            _build(model, runtime, fills, states)
        else:
            _read(stored, model, runtime, fills)
    except Exception as problem:
        error = problem
    together(topology, "materialize: done", error=error)
    publish(runtime.units, runtime)


# ------------------------------------------------------------------------------------------ who fills what

def _in_build_order(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Children before parents, each module once: a parent resets itself at the end of its own construction."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child_name, child in module.named_children():
        yield from _in_build_order(child, f"{name}.{child_name}" if name else child_name, seen)
    yield name, module


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def _initializer_of(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """The way of transformers: a model has one function for all of its modules."""
    function = getattr(module, "_init_weights", None)
    return function if callable(function) else None


def _fills(model: nn.Module) -> list[Fill]:
    """From scratch. A model inside a model initializes its modules when it is built; the outer one leaves them alone."""
    fills: list[Fill] = []
    initialized: set[int] = set()
    for name, module in _in_build_order(model):
        reset = _reset_of(module)
        if reset is not None:
            fills.append(Fill(name, module, reset, f"reset_parameters of {type(module).__name__}"))
        function = _initializer_of(module)
        if function is None:
            continue
        for inner_name, inner in _in_build_order(module, name):
            if id(inner) not in initialized:
                initialized.add(id(inner))
                how = f"_init_weights of {type(module).__name__}"
                fills.append(Fill(inner_name, inner, functools.partial(function, inner), how, _reset_of(inner) is None))
    filled = {id(fill.module) for fill in fills}
    for name, module in _in_build_order(model):
        if id(module) not in filled:
            params = [leaf for leaf, param in module._parameters.items() if param is not None]
            _refuse_if_any(name, module, params + [leaf for leaf, buffer in module._buffers.items() if on_meta(buffer)])
    return fills


def _fills_of_buffers(model: nn.Module, stored: dict[str, Stored]) -> list[Fill]:
    """With files, only for modules with buffers on the meta device that are not in them."""
    modules = dict(model.named_modules())
    fills: list[Fill] = []
    for name, module in _in_build_order(model):
        needs = [leaf for leaf, buffer in module._buffers.items() if on_meta(buffer) and full_name(name, leaf) not in stored]
        call, above = _reset_of(module), name
        while call is None and above:
            above = above.rpartition(".")[0]
            function = _initializer_of(modules[above])
            call = functools.partial(function, module) if function is not None else None
        if call is None:
            _refuse_if_any(name, module, needs)
        elif needs:
            fills.append(Fill(name, module, call, f"reset_parameters of {type(module).__name__}"))
    return fills


def _refuse_if_any(name: str, module: nn.Module, leaves: list[str]) -> None:
    if leaves:
        raise ShardError(
            f"{full_name(name, leaves[0])} cannot be given a value: its module, a {type(module).__name__}, has no "
            f"reset_parameters. Give it one that fills its own parameters and buffers. {REMEDY}"
        )


# ------------------------------------------------------------------------------------------ from scratch


def _build(model: nn.Module, runtime: Runtime, fills: list[Fill], states: list[bytes]) -> None:
    own = torch.get_rng_state()
    shared = torch.frombuffer(bytearray(states[0]), dtype=torch.uint8)
    torch.set_rng_state(shared)
    filled: set[str] = set()
    scratch = Scratch()
    for fill in fills:
        before = torch.get_rng_state() if fill.alone else None
        new = values_of(fill, runtime, scratch)
        first = next((leaf for leaf, param in fill.module._parameters.items() if param is not None), None)
        if first is not None and before is not None and not torch.equal(before, torch.get_rng_state()):
            raise ShardError(
                f"{full_name(fill.name, first)}: its module, a {type(fill.module).__name__}, has no reset_parameters, and the "
                f"{fill.how} draws random numbers for it; whether its constructor draws some too cannot be known, so a CPU "
                f"build with the same seed cannot be repeated. {REMEDY}"
            )
        for leaf, values in new.items():
            entry = runtime.entry_of[id(fill.module._parameters[leaf])]
            filled.add(entry.name)
            if entry.name == full_name(fill.name, leaf):  # a tied one has the values of its first place
                entry.piece_of(entry.unit.shard).copy_(entry.spec.cut(values))
    if not torch.equal(own, shared):
        torch.set_rng_state(own)
    _check_filled({entry.name for entry in runtime.entry_of.values()} - filled, model, fills)


def _check_filled(missing: set[str], model: nn.Module, fills: list[Fill]) -> None:
    missing = missing | {clean(name) for name, buffer in model.named_buffers() if on_meta(buffer)}
    if missing:
        name = min(missing)
        how = [fill.how for fill in fills if clean(fill.name) == name.rpartition(".")[0]]
        raise ShardError(f"{' and '.join(how)} leaves {name} without a value. {REMEDY}")


# ------------------------------------------------------------------------------------------ from files


def _match(stored: dict[str, Stored], model: nn.Module, runtime: Runtime) -> None:
    """Names and shapes, before anything is read. Of tied names one is enough."""
    tensors, _ = contents.buffers(model, runtime)
    shapes = {name: tuple(buffer.shape) for name, buffer in tensors.items()}
    missing = sorted(name for name in shapes if name not in stored)
    for entry in runtime.entry_of.values():
        shapes.update(dict.fromkeys(entry.names, tuple(entry.slot.shape)))
        if not any(name in stored for name in entry.names):
            missing.append(entry.name)
    not_saved = {clean(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    unexpected = sorted(set(stored) - set(shapes) - not_saved)
    if missing or unexpected:
        wrong = [("they lack", missing), ("the model lacks", unexpected)]
        text = "; ".join(f"{what} {', '.join(names[:_MAX_NAMED])} ({len(names)})" for what, names in wrong if names)
        raise ShardError(f"the files are of another model: {text}")
    for name, shape in shapes.items():
        if name in stored and stored[name].shape != shape:
            raise ShardError(f"{name} has shape {stored[name].shape} in {stored[name].path} and {shape} in the model")


def _read(stored: dict[str, Stored], model: nn.Module, runtime: Runtime, fills: list[Fill]) -> None:
    modules = dict(model.named_modules())
    with torch.random.fork_rng(devices=[]):
        scratch = Scratch()
        for fill in fills:
            values_of(fill, runtime, scratch)
    for entry in runtime.entry_of.values():
        name = next(name for name in entry.names if name in stored)
        stored[name].read(entry.start, entry.piece_of(entry.unit.shard))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if clean(name) in stored:
            values = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            stored[clean(name)].read(0, values.view(-1))
            if buffer.device.type == "meta":
                home, _, leaf = name.rpartition(".")
                modules[home]._buffers[leaf] = values.to(runtime.units[0].shard.device)
            else:
                buffer.copy_(values)
    _check_filled(set(), model, fills)
