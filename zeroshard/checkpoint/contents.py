"""What a checkpoint holds, under the names of the unsharded model, and this rank's part of it.

    model.<name>                     parameters (masters) and persistent buffers
    optim.state.<name>.<key>         optimizer state of a parameter, tensors only
    optim.param_groups.<i>.<key>     options of the groups of all optimizers; `params` are names
    ema.<name>                       averages
    zeroshard.contents               state that is no tensor, which state is shaped like its parameter, extra state of modules
    zeroshard.extra[.<rank>]         the caller's own; a rank's only where it differs from rank 0's

A `Part` is what this rank holds of one tensor. The same description serves saving, where its values are written, and
loading, where they are overwritten.
"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch
from torch import nn, optim

from ..config import ShardError
from ..ema import EMA
from ..entry import Entry
from ..optimizer import SCALARS, Stepper, listed
from ..partition import clean
from ..runtime import Runtime

numpy: Any
try:
    import numpy
except ImportError:  # torch works without it
    numpy = None

CONTENTS, EXTRA = "zeroshard.contents", "zeroshard.extra"


@dataclasses.dataclass(frozen=True)
class Part:
    """Elements [start, start + numel) of the tensor `name` of `shape`; `values` [numel] is contiguous.

    everywhere: all ranks hold these same elements; otherwise only the replicas of this rank's shard do.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
    everywhere: bool


def is_cut(entry: Entry) -> bool:
    """Whether ranks hold different pieces of this parameter."""
    return entry.unit.held_numel < entry.unit.layout.numel


# ------------------------------------------------------------------------------------------ model and averages


def kept(runtime: Runtime, trainable_only: bool) -> list[Entry]:
    """The parameters of a checkpoint."""
    return [e for unit in runtime.units for e in unit.entries if e.param.requires_grad or not trainable_only]


def parameters(runtime: Runtime, trainable_only: bool) -> list[Part]:
    return [
        Part(f"model.{e.name}", e.slot.shape, e.start, e.piece_of(e.unit.shard), not is_cut(e))
        for e in kept(runtime, trainable_only)
    ]


def averages(ema: EMA, runtime: Runtime) -> list[Part]:
    return [
        Part(f"ema.{e.name}", e.slot.shape, e.start, e.piece_of(ema.averages[unit.index]), not is_cut(e))
        for unit in runtime.units
        for e in unit.entries
    ]


def aliases(runtime: Runtime, trainable_only: bool) -> dict[str, str]:
    """Other names of tied parameters -> the name they are saved under."""
    return {
        f"model.{name}": f"model.{entry.name}"
        for entry in kept(runtime, trainable_only)
        for name in entry.names
        if name != entry.name
    }


def buffers(model: nn.Module, runtime: Runtime) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Persistent buffers by name, and what modules give as their extra state."""
    tensors, others = {}, {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in runtime.entry_of:
            continue
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            tensors[clean(name)] = value
        else:
            others[clean(name)] = value
    return tensors, others


# ------------------------------------------------------------------------------------------ optimizers


class OptimizerView:
    """One sharded optimizer by the names of its parameters. `index` is its place in the list given by the user."""

    def __init__(self, optimizer: optim.Optimizer, runtime: Runtime, index: int):
        self.optimizer, self.runtime = optimizer, runtime
        self.label = f"optimizer {index} ({type(optimizer).__name__})" if index else type(optimizer).__name__
        self.stepper = _stepper(optimizer, runtime)
        self.stepper.unswap()
        self.entries: dict[str, Entry] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                entry = runtime.entry_of.get(id(param))
                if entry is None:
                    raise ShardError(
                        f"{self.label} holds a parameter of shape {tuple(param.shape)} that is not in the model; save and load "
                        "a model together with its own optimizers"
                    )
                self.entries[entry.name] = entry

    def groups(self) -> list[dict[str, Any]]:
        """The groups with the names of their parameters."""
        names = self.runtime.entry_of
        return [{**group, "params": [names[id(p)].name for p in group["params"]]} for group in self.optimizer.param_groups]

    def holds(self, entry: Entry) -> bool:
        """Whether this rank has the state of a parameter; otherwise another rank of the shard group owns it."""
        owners = self.stepper.owners
        return owners is None or owners.owns(entry)

    def in_pieces(self, entry: Entry) -> bool:
        """State shaped like the parameter is kept as this rank's flat piece [entry.numel]."""
        return self.stepper.owners is None and self.stepper.entry_of(entry.param) is not None

    def describe(self) -> dict[str, dict[str, dict[str, Any]]]:
        """name -> key -> what this rank has there: a tensor like the parameter or not, or another value."""
        states = {name: self.optimizer.state[e.param] for name, e in self.entries.items() if e.param in self.optimizer.state}
        scalars = set(SCALARS)
        for name, state in states.items():
            scalars |= {
                k for k, v in state.items() if isinstance(v, torch.Tensor) and not v.dim() and self.entries[name].param.dim()
            }
        return {
            name: {key: self._describe_one(self.entries[name], key, value, scalars) for key, value in state.items()}
            for name, state in states.items()
            if self.holds(self.entries[name])
        }

    def _describe_one(self, entry: Entry, key: str, value: Any, scalars: set[str]) -> dict[str, Any]:
        if not isinstance(value, torch.Tensor):
            return {"value": value}
        if self.in_pieces(entry):
            like = value.dim() == 1 and value.numel() == entry.numel
        else:
            like = value.shape == entry.param.shape and (value.dim() > 0 or key not in scalars)
        return {"like": like, "shape": list(value.shape), "dtype": value.dtype}

    def globals(self) -> dict[str, Any]:
        """State that belongs to no parameter."""
        state: dict[Any, Any] = self.optimizer.state
        return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}

    def part(self, entry: Entry, key: str, like: bool, values: torch.Tensor) -> Part:
        """The part that `values`, this rank's state under `key`, is of the whole state tensor."""
        whole = not (like and self.in_pieces(entry))
        everywhere = not is_cut(entry) or (self.stepper.owners is None and not like)
        shape = tuple(entry.slot.shape) if like else tuple(values.shape)
        return Part(state_name(entry.name, key), shape, 0 if whole else entry.start, values.reshape(-1), everywhere)


def _stepper(optimizer: Any, runtime: Runtime) -> Stepper:
    if isinstance(optimizer, optim.Optimizer):
        for hook in optimizer._optimizer_step_pre_hooks.values():
            stepper = getattr(hook, "__self__", None)
            if isinstance(stepper, Stepper) and stepper.runtime is runtime:
                return stepper
    raise ShardError(
        f"optimizer is a {type(optimizer).__name__} that was not given to zeroshard.shard together with this model; pass the "
        "very optimizer, or the list of them"
    )


def state_name(parameter: str, key: str) -> str:
    return f"optim.state.{parameter}.{key}"


def views(optimizer: Any, runtime: Runtime) -> list[OptimizerView]:
    return [OptimizerView(each, runtime, index) for index, each in enumerate(listed(optimizer))]


def merged(states: list[dict[str, dict[str, dict[str, Any]]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """What all ranks have of one optimizer's state. It is cut where every rank says that it is."""
    total: dict[str, dict[str, dict[str, Any]]] = {}
    for state in states:
        for name, keys in state.items():
            for key, what in keys.items():
                seen = total.setdefault(name, {}).setdefault(key, dict(what))
                if seen.get("like") and what.get("like"):
                    continue
                if "value" in seen or "value" in what or seen["shape"] == what["shape"]:
                    seen.update(like=False) if "like" in seen else None
                    continue
                raise ShardError(
                    f"optimizer state {key!r} of {name} has shapes {seen['shape']} and {what['shape']} on different ranks: it "
                    "is neither cut like the parameter nor the same everywhere, so it cannot be saved"
                )
    return total


# ------------------------------------------------------------------------------------------ values that are no tensors


def pack(what: str, value: Any) -> bytes:
    """`value` as bytes that `unpack` reads without running anything. Raises ShardError naming `what`."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream, _use_new_zipfile_serialization=False)  # a tenth of the newer format's size
        unpack(stream.getvalue())
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ShardError(
            f"{what} cannot be saved: it holds something that torch.load(weights_only=True) does not read; use tensors, "
            f"arrays, numbers, strings, lists, tuples, dicts, sets ({type(error).__name__}: {reason[:200]})"
        ) from error
    return stream.getvalue()


def unpack(data: bytes) -> Any:
    with torch.serialization.safe_globals(_array_types()):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _array_types() -> list[Any]:
    """What numpy arrays and numbers are pickled with: RNG states hold some."""
    if numpy is None:
        return []
    kinds = [type(numpy.dtype(code)) for code in "?bhilqBHILQefdgFDU"]
    array, number = numpy.zeros(1).__reduce__()[0], numpy.float64(0).__reduce__()[0]
    return [numpy.ndarray, numpy.dtype, array, number, *dict.fromkeys(kinds)]
