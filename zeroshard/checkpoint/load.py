"""load: every rank reads its own pieces out of whatever boxes a checkpoint consists of.

open      the index is read; each rank checks the checksums of its share of the files
match     names, shapes, groups: everything that can be wrong is found before anything is overwritten
read      straight into shards, optimizer state and averages
show      where whole values stay, the new ones are sent to everybody
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..comm import Topology
from ..config import ShardError
from ..ema import EMA
from ..entry import Entry
from ..optimizer import SCALARS, publish
from ..partition import clean
from ..runtime import Runtime, runtime_of
from . import contents, files
from .contents import OptimizerView, Part
from .index import INDEX, Index, Reader, read_index
from .save import finish_earlier
from .together import place_of, same, together

_MAX_NAMED = 40
_ATTEMPTS = 3


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, ema: EMA | None = None) -> Any:
    """Overwrites model, optimizer and average with a checkpoint of any stage and number of ranks; -> its `extra`.

    Args:
        path: what was given to `save`.
        optimizer: the sharded optimizer, or the list of them in any order; `None` leaves optimizers as they are. Groups are
            matched by the names of their parameters, and all their options come back.
        ema: an `EMA` of the model.

    A rank gets the `extra` it gave to `save`; one that had no counterpart then gets rank 0's. Collective.
    Memory beyond the model's own: the largest stored box of a tensor.

    Raises:
        ShardError: on all ranks, naming it: a damaged, missing or foreign file; missing or unexpected names, other shapes,
            groups or optimizers. Nothing has been overwritten then.
        DivergenceError: the ranks were called with different paths, optimizers or averages.
    """
    runtime = runtime_of(model, "load")
    finish_earlier(runtime)
    root = pathlib.Path(os.path.abspath(path))
    for attempt in range(_ATTEMPTS):
        before = _identity(root)
        try:
            return _load(root, model, runtime, optimizer, ema)
        except ShardError as problem:
            last = attempt + 1 == _ATTEMPTS
            if type(problem) is not ShardError or last or not _replaced(root, before, runtime.topology):
                raise
    raise AssertionError("the last attempt returns or raises")


def _identity(root: pathlib.Path) -> tuple[int, int] | None:
    """Another one when the checkpoint is replaced, files included, as another job may do while it is read here."""
    try:
        found = (root / INDEX).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _replaced(root: pathlib.Path, before: tuple[int, int] | None, topology: Topology) -> bool:
    """Whether any rank finds another checkpoint there by now. Collective."""
    told = topology.exchange_bytes("load: look again", b"old" if _identity(root) == before else b"new")
    return any(text == b"new" for _, text in told)


def _load(root: pathlib.Path, model: nn.Module, runtime: Runtime, optimizer: Any, ema: EMA | None) -> Any:
    index = _open(root, runtime.topology)
    loading = _Loading(Reader(root, index), model, runtime)
    error: Exception | None = None
    message = b""
    try:
        loading.match(optimizer, ema)
        about = {"path": str(root), "optimizers": [view.label for view in loading.views], "ema": ema is not None}
        message = contents.pack("", {**about, "checkpoint": index.save_id})
    except Exception as problem:
        error = problem
    told = together(runtime.topology, "load: match", message, error)
    same(runtime.topology, "load", [contents.unpack(text) for text in told])
    extra = None
    try:
        extra = loading.extra(place_of(runtime.topology))
        loading.read()
    except Exception as problem:
        error = problem
    together(runtime.topology, "load: read", error=error)
    publish(runtime.units, runtime)
    return extra


def _open(root: pathlib.Path, topology: Topology) -> Index:
    """The index, once all ranks have read the same one and its files are sound: each rank checks its share of them."""
    index: Index | None = None
    error: Exception | None = None
    try:
        index = read_index(root)
        share = sorted(index.files or ())[place_of(topology) :: topology.ranks]
        problems = files.damage(root, {name: index.files[name] for name in share}) if index.files is not None else []
        if problems:
            raise ShardError(f"{root} is damaged: {'; '.join(problems)}. Nothing has been loaded")
    except Exception as problem:
        error = problem
    ids = together(topology, "load: open", b"" if index is None else index.save_id.encode(), error)
    if len(set(ids)) > 1:
        raise ShardError(f"{root} holds different checkpoints for different ranks: {sorted(i.decode() for i in ids)}")
    assert index is not None
    return index


class _Loading:
    """One call of load. `match` finds out what goes where; `read` does it."""

    def __init__(self, reader: Reader, model: nn.Module, runtime: Runtime):
        self.reader, self.model, self.runtime = reader, model, runtime
        self.parts: list[Part] = []
        self.views: list[OptimizerView] = []
        self.contents: dict[str, Any] = {}
        self._states: list[tuple[OptimizerView, Entry, dict[str, Any], dict[str, Any]]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._globals: list[tuple[OptimizerView, dict[str, Any]]] = []

    def match(self, optimizer: Any, ema: EMA | None) -> None:
        packed = self.reader.read_bytes(contents.CONTENTS)
        self.contents = _of_another_tool(self.reader, self.runtime) if packed is None else contents.unpack(packed)
        self._match_model()
        self.views = contents.views(optimizer, self.runtime)
        if self.views:
            self._match_optimizers()
        if ema is not None:
            ema.belongs_to(self.runtime)
            self._add(contents.averages(ema, self.runtime), "no average was saved for it; call load without ema=")

    # ---- the model

    def _match_model(self) -> None:
        trainable_only = self.contents.get("trainable_only", False)
        self._buffers, self._extra_state = ({}, {}) if trainable_only else contents.buffers(self.model, self.runtime)
        there = {n.removeprefix("model.") for n in self.reader.index.metadata.state_dict_metadata if n.startswith("model.")}
        here = {name for entry in contents.kept(self.runtime, trainable_only) for name in entry.names} | set(self._buffers)
        missing, unexpected = sorted(here - there), sorted(there - here)
        if missing or unexpected:
            raise ShardError(
                f"the checkpoint {self.reader.root} is of another model: "
                + "; ".join(
                    f"{what} {_some(names)}"
                    for what, names in (("it has no", missing), ("the model has no", unexpected))
                    if names
                )
            )
        self._add(contents.parameters(self.runtime, trainable_only), "")
        for name, buffer in self._buffers.items():
            if buffer.device.type == "meta":
                buffer = self._buffers[name] = torch.empty_like(buffer, device=self.runtime.units[0].shard.device)
            if not buffer.is_contiguous():
                buffer = torch.empty_like(buffer, memory_format=torch.contiguous_format)
            self._add([Part(f"model.{name}", tuple(buffer.shape), 0, buffer.detach().view(-1), True)], "")
            self._buffers[name] = buffer
        absent = sorted(set(self._extra_state) ^ set(self.contents.get("extra_state", self._extra_state)))
        if absent:
            raise ShardError(f"the extra state of modules differs between model and checkpoint: {_some(absent)}")

    def _add(self, parts: Iterable[Part], if_absent: str) -> None:
        """Parts to be read, once their shapes and dtypes are known to fit."""
        for part in parts:
            stored = self.reader.index.tensor(part.name)
            if stored is None:
                raise ShardError(f"the checkpoint {self.reader.root} has no {part.name}: {if_absent}")
            if tuple(stored.size) != part.shape:
                raise ShardError(f"{part.name} has shape {tuple(stored.size)} in the checkpoint and {part.shape} in the model")
            dtype = stored.properties.dtype
            if dtype != part.values.dtype and torch.promote_types(dtype, part.values.dtype) != part.values.dtype:
                raise ShardError(
                    f"{part.name} is {dtype} in the checkpoint and {part.values.dtype} in the model, which cannot hold it "
                    "exactly"
                )
            self.parts.append(part)

    # ---- optimizers

    def _match_optimizers(self) -> None:
        saved = self.contents.get("optimizers", [])
        if not saved:
            raise ShardError(f"the checkpoint {self.reader.root} holds no optimizer; call load without one")
        owners = [each for each in saved for _ in range(each["num_groups"])]
        left = list(zip(owners, self.reader.groups(), strict=True))
        for view in self.views:
            taken = []
            for group, mine in zip(view.optimizer.param_groups, view.groups(), strict=True):
                names = set(mine["params"])
                found = next((pair for pair in left if set(pair[1]["params"]) == names), None)
                if found is None:
                    raise ShardError(_other_groups(view, mine["params"], [theirs["params"] for _, theirs in left]))
                left.remove(found)
                taken.append(found[0])
                self._groups.append((group, {key: value for key, value in found[1].items() if key != "params"}))
                for name in mine["params"]:
                    self._match_state(view, view.entries[name], found[1], found[0]["state"].get(name, {}))
            self._check_class(view, taken)
        if left:
            unused = _some([name for _, group in left for name in group["params"]]) or "an empty one"
            raise ShardError(f"a parameter group of the checkpoint is in no optimizer given to load: {unused}")

    def _check_class(self, view: OptimizerView, saved: list[dict[str, Any]]) -> None:
        classes = {each["class"] for each in saved if each["class"] is not None}
        if classes and classes != {type(view.optimizer).__name__}:
            raise ShardError(
                f"the checkpoint's groups are of {' and '.join(sorted(classes))}, the optimizer is {view.label}; load the "
                "model alone to start its state afresh"
            )
        self._globals += [(view, each["globals"]) for each in saved[:1]]

    def _match_state(
        self, view: OptimizerView, entry: Entry, options: dict[str, Any], saved: dict[str, dict[str, Any]]
    ) -> None:
        """Plans the state of one parameter: tensors that fit are overwritten, others are made when they are read."""
        self._states.append((view, entry, options, saved if view.holds(entry) else {}))
        for key, what in saved.items():
            if "value" not in what and self.reader.index.tensor(contents.state_name(entry.name, key)) is None:
                raise ShardError(f"the checkpoint {self.reader.root} lacks state {key!r} of {entry.name}")

    def _state_tensor(self, view: OptimizerView, entry: Entry, key: str, like: bool, old: Any, on_cpu: bool) -> torch.Tensor:
        """A tensor for this rank's part of a state: the old one, if it fits."""
        stored = self.reader.index.tensor(contents.state_name(entry.name, key))
        assert stored is not None
        shape = (entry.numel,) if like and view.in_pieces(entry) else tuple(stored.size)
        dtype = stored.properties.dtype
        device = torch.device("cpu") if on_cpu else entry.unit.shard.device
        fits = isinstance(old, torch.Tensor) and (tuple(old.shape), old.dtype, old.device) == (shape, dtype, device)
        return old if fits and old.is_contiguous() else torch.empty(shape, dtype=dtype, device=device)

    # ---- reading

    def read(self) -> None:
        self.reader.read_parts(self.parts)
        for view, entry, options, saved in self._states:
            self._read_state(view, entry, options, saved)
        for group, options in self._groups:
            group.update(options)
        for view, saved in self._globals:
            state: dict[Any, Any] = view.optimizer.state
            state.update(saved)
        self._put_buffers()

    def _read_state(self, view: OptimizerView, entry: Entry, options: dict[str, Any], saved: dict[str, Any]) -> None:
        """One parameter's, so that at no time more than one has both its old tensors and new ones."""
        old = view.optimizer.state.pop(entry.param, {})
        state: dict[str, Any] = {}
        parts = []
        for key, what in saved.items():
            if "value" in what:
                state[key] = what["value"]
                continue
            on_cpu = key == "step" and not (options.get("capturable") or options.get("fused"))
            state[key] = self._state_tensor(view, entry, key, what["like"], old.get(key), on_cpu)
            parts.append(view.part(entry, key, what["like"], state[key]))
        self.reader.read_parts(parts)
        if state:
            view.optimizer.state[entry.param] = state

    def _put_buffers(self) -> None:
        """What could not be read in place: buffers on the meta device, strided ones, extra state."""
        modules = {clean(name): module for name, module in self.model.named_modules()}
        for name, values in self._buffers.items():
            home, _, leaf = name.rpartition(".")
            buffer = modules[home]._buffers[leaf]
            if buffer is None or buffer.device.type == "meta":
                modules[home]._buffers[leaf] = values
            elif buffer.data_ptr() != values.data_ptr():
                buffer.detach().copy_(values)
        for name, value in self.contents.get("extra_state", {}).items():
            modules[name.rpartition(".")[0]].set_extra_state(value)

    def extra(self, place: int) -> Any:
        own = self.reader.read_bytes(f"{contents.EXTRA}.{place}")
        packed = own if own is not None else self.reader.read_bytes(contents.EXTRA)
        return None if packed is None else contents.unpack(packed)


def _of_another_tool(reader: Reader, runtime: Runtime) -> dict[str, Any]:
    """What zeroshard.contents would say of {"model": ..., "optim": ...} as torch.distributed.checkpoint.save writes it."""
    groups = {number for number, _ in reader.index.under("optim", "param_groups")}
    if not groups:
        return {}
    shapes = {entry.name: tuple(entry.slot.shape) for entry in runtime.entry_of.values()}
    state: dict[str, dict[str, dict[str, Any]]] = {}
    for (parameter, key), name in reader.index.under("optim", "state").items():
        stored, packed = reader.index.tensor(name), reader.read_bytes(name)
        if stored is not None:
            like = tuple(stored.size) == shapes.get(parameter) and (len(stored.size) > 0 or key not in SCALARS)
            state.setdefault(parameter, {})[key] = {"like": like}
        elif packed is not None:
            state.setdefault(parameter, {})[key] = {"value": contents.unpack(packed)}
    return {"optimizers": [{"class": None, "num_groups": len(groups), "state": state, "globals": {}}]}


def _other_groups(view: OptimizerView, mine: list[str], theirs: list[list[str]]) -> str:
    if not theirs:
        return f"{view.label} has more parameter groups than the checkpoint: {_some(mine)}"
    nearest = max(theirs, key=lambda names: len(set(names) & set(mine)))
    more, less = sorted(set(mine) - set(nearest)), sorted(set(nearest) - set(mine))
    detail = "; ".join(f"{what} {_some(names)}" for what, names in (("it lacks", more), ("it also has", less)) if names)
    return (
        f"a parameter group of {view.label} ({_some(mine)}) is no group of the checkpoint; the nearest one there differs: "
        f"{detail}"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
