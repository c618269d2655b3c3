"""materialize: values for a model that was built on the meta device and sharded there.

From scratch, module by module in the order in which they were built: a module's own parameters are made whole on the CPU,
its `reset_parameters` fills them, and every rank keeps its pieces. All ranks draw from rank 0's random state, so nothing is
sent, and what a CPU build with the same seed would hold is held. From files, each rank reads its own bytes.
"""

from __future__ import annotations

import contextlib
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
from .tensorfile import Stored, stored_in
from .together import together

_MAX_NAMED = 40


@torch.no_grad()
def materialize(model: nn.Module, source: str | os.PathLike[str] | None = None) -> None:
    """Gives values to all parameters, and to the buffers that are still on the meta device. Collective.

    Args:
        model: sharded, usually after it was built under `with torch.device("meta"):`.
        source: `None`: every module's own `reset_parameters`, children before parents; bit-equal to a CPU build with
            the same seed. Or a safetensors file, or a folder of them, read by byte ranges and cast to the masters' dtype;
            buffers that are not in it come from `reset_parameters`, or from transformers' `_init_weights`.

    Memory beyond the model's own: the parameters of one module; from files, one block of 2**22 elements.

    Raises:
        ShardError: on all ranks: a module has parameters or buffers of its own and no `reset_parameters`, or it leaves some
            as they are; a name that is missing or not expected; another shape; a damaged file.
    """
    runtime = runtime_of(model, "materialize")
    topology = runtime.topology
    error: Exception | None = None
    stored: dict[str, Stored] | None = None
    try:
        if source is not None:
            stored = stored_in(pathlib.Path(os.path.abspath(source)))
            _match(stored, model, runtime)
        builders = _builders(model, stored)
    except Exception as problem:
        error = problem
    states = together(topology, "materialize: begin", torch.get_rng_state().numpy().tobytes(), error)
    try:
        if stored is None:
            _build(model, runtime, builders, states)
        else:
            _read(stored, model, runtime, builders)
    except Exception as problem:
        error = problem
    together(topology, "materialize: done", error=error)
    publish(runtime.units, runtime)


# ------------------------------------------------------------------------------------------ who can fill what


Builders = dict[str, Callable[[], Any]]


def _in_build_order(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Children before parents, each module once: a parent resets itself at the end of its own construction."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child_name, child in module.named_children():
        yield from _in_build_order(child, f"{name}.{child_name}" if name else child_name, seen)
    yield name, module


def _builders(model: nn.Module, stored: dict[str, Stored] | None) -> Builders:
    """What fills each module that needs filling. With files, only modules with buffers that are not in them do."""
    modules = dict(model.named_modules())
    builders: Builders = {}
    for name, module in _in_build_order(model):
        prefix = f"{name}." if name else ""
        needs = [clean(prefix + leaf) for leaf, buffer in module._buffers.items() if _on_meta(buffer)]
        if stored is None:
            needs = [clean(prefix + leaf) for leaf, param in module._parameters.items() if param is not None] + needs
        else:
            needs = [each for each in needs if each not in stored]
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None and stored is not None and needs:
            reset = _ancestors_reset(name, module, modules)
        if callable(reset) and (needs or stored is None):
            builders[name] = reset
        elif needs:
            raise ShardError(
                f"{needs[0]} cannot be given a value: its module, a {type(module).__name__}, has no reset_parameters. Give it "
                "one that fills its own parameters and buffers, or load values with materialize(model, source) or load"
            )
    return builders


def _on_meta(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.device.type == "meta"


def _ancestors_reset(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> Callable[[], Any] | None:
    """The way of transformers: a model has one function for all of its modules."""
    while name:
        name = name.rpartition(".")[0]
        function = getattr(modules[name], "_init_weights", None)
        if callable(function):
            return lambda: function(module)
    return None


# ------------------------------------------------------------------------------------------ from scratch


def _build(model: nn.Module, runtime: Runtime, builders: Builders, states: list[bytes]) -> None:
    modules = dict(model.named_modules())
    own = torch.get_rng_state()
    shared = torch.frombuffer(bytearray(states[0]), dtype=torch.uint8)
    torch.set_rng_state(shared)
    for name, reset in builders.items():
        with _whole_and_new(modules[name], name, runtime) as new:
            reset()
        for leaf, values in new.items():
            full_name = clean(f"{name}.{leaf}" if name else leaf)
            entry = runtime.entry_of[id(modules[name]._parameters[leaf])]
            if entry.name == full_name:  # a tied one has the values of its first place
                entry.piece_of(entry.unit.shard).copy_(entry.spec.cut(values))
    if not torch.equal(own, shared):
        torch.set_rng_state(own)


@contextlib.contextmanager
def _whole_and_new(module: nn.Module, name: str, runtime: Runtime) -> Iterator[dict[str, torch.Tensor]]:
    """The module's own parameters, and its buffers on the meta device, are new tensors on the CPU that await values.

    Afterwards the parameters are back, and the yielded dict has the values; the buffers stay, on the model's device.
    """
    kept = dict(module._parameters)
    fresh: dict[str, torch.Tensor] = {}
    new: dict[str, torch.Tensor] = {}
    device = runtime.units[0].shard.device if runtime.units else torch.device("cpu")
    for leaf, param in kept.items():
        if param is not None:
            values = _unset(tuple(param.shape), param.dtype)
            module._parameters[leaf] = whole = nn.Parameter(values, requires_grad=param.requires_grad)
            fresh[leaf] = whole
    for leaf, buffer in module._buffers.items():
        if buffer is not None and _on_meta(buffer):
            fresh[leaf] = module._buffers[leaf] = _unset(tuple(buffer.shape), buffer.dtype)
    versions = {leaf: tensor._version for leaf, tensor in fresh.items()}
    try:
        yield new
        for leaf, tensor in fresh.items():
            now = module._parameters.get(leaf) if leaf in kept else module._buffers.get(leaf)
            if now is None or (now is tensor and tensor._version == versions[leaf] and _is_unset(tensor)):
                where = clean(f"{name}.{leaf}" if name else leaf)
                raise ShardError(f"reset_parameters of {type(module).__name__} leaves {where} without a value")
            if leaf in kept:
                new[leaf] = now.detach()
            else:
                module._buffers[leaf] = now.to(device)
    finally:
        module._parameters.update(kept)


def _mark(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _unset(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, _mark(dtype), dtype=dtype, device="cpu")


def _is_unset(tensor: torch.Tensor) -> bool:
    same = tensor.isnan() if tensor.is_floating_point() or tensor.is_complex() else tensor == _mark(tensor.dtype)
    return bool(tensor.numel() and same.all())


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


def _read(stored: dict[str, Stored], model: nn.Module, runtime: Runtime, builders: Builders) -> None:
    modules = dict(model.named_modules())
    with torch.random.fork_rng(devices=[]):
        for name, reset in builders.items():
            with _whole_and_new(modules[name], name, runtime):
                reset()
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
