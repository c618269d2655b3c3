"""save: every rank writes what it holds into a new folder; when all have, rank 0 renames one index into place.

    begin     the ranks agree on what is saved; rank 0 makes the folder
    write     each rank its own file; in the background if asked, from copies made at the call
    publish   the ranks tell what they have written; rank 0 renames the index into place and clears what it replaced

What fails on one rank before the rename is raised on all, and the checkpoint that was there is still there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import secrets
import threading
import weakref
import zlib
from typing import Any

import torch
from torch import nn

from ..ema import EMA
from ..runtime import Runtime, runtime_of
from . import contents, files, index
from .contents import OptimizerView, Part
from .files import Item
from .folder import Folder, Series, writing
from .plan import Turns
from .together import place_of, same, together


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    extra: Any = None,
    ema: EMA | None = None,
    blocking: bool = True,
    keep: int | None = None,
    trainable_only: bool = False,
) -> Saving | None:
    """Writes a checkpoint that `load` reads at any stage, on any number of ranks, bit for bit. Collective.

    Args:
        path: a folder on a file system that all ranks share. A checkpoint that is there is replaced in one instant: if
            anything fails, or the job is killed at any moment, `load(path)` finds the old one or the new one, complete.
        optimizer: the sharded optimizer, the list of them, or `None` to save no optimizer state.
        extra: anything made of tensors, arrays, numbers, strings, lists, tuples, dicts and sets: scheduler and loss scaler
            states, random states, the position in the data. Each rank may give its own.
        ema: an `EMA` of the model.
        blocking: `False` copies this rank's values and returns a handle; they are written while training goes on. The
            checkpoint is published by the handle's `wait()`, which all ranks must call, or by their next `save` or `load`.
        keep: how many checkpoints of a run stay, when each has a path of its own that ends in a number, like `step-200`.
            Those beside `path` whose names differ in the number alone are the run's. When the new one is published, the
            ones with the lowest numbers go, each by one rename first, so that what still has its name is complete. Also
            cleared is what broken-off saves of the run have left. `None` touches no other path.
        trainable_only: of the model only parameters with `requires_grad` (adapters); `load` leaves the others as they are.

    Memory beyond the model's own: on a GPU the largest piece of one tensor, on the CPU none; with `blocking=False` a copy of
    what this rank writes.

    Raises:
        ShardError: on all ranks, when any rank cannot write (its text says which and why), or something cannot be saved.
        DivergenceError: the ranks were called with different paths, optimizers or averages.
    """
    runtime = runtime_of(model, "save")
    finish_earlier(runtime)
    target = pathlib.Path(os.path.abspath(path))
    saving = _begin(target, model, runtime, optimizer, extra, ema, keep, trainable_only)
    if blocking:
        saving.write()
        saving.wait()
        return None
    saving.write_in_background()
    runtime.unpublished = saving
    return saving


def finish_earlier(runtime: Runtime) -> None:
    """Waits for a save in the background that nobody has waited for; its error is raised here."""
    if runtime.unpublished is not None:
        runtime.unpublished.wait()


# ------------------------------------------------------------------------------------------ begin


def _begin(
    path: pathlib.Path,
    model: nn.Module,
    runtime: Runtime,
    optimizer: Any,
    extra: Any,
    ema: EMA | None,
    keep: int | None,
    trainable_only: bool,
) -> Saving:
    topology, place = runtime.topology, place_of(runtime.topology)
    views: list[OptimizerView] = []
    packed, message, error = b"", b"", None
    folder = Folder(path, secrets.token_hex(4))
    try:
        series = None if keep is None else Series(path, keep)
        views = contents.views(optimizer, runtime)
        packed = contents.pack("extra", extra)
        if ema is not None:
            ema.belongs_to(runtime)
        if place == 0:
            if series is not None:
                series.clear_leftovers()
            with writing(path):
                folder.prepare()
        about = {"path": str(path), "optimizers": [view.label for view in views], "ema": ema is not None}
        about |= {"keep": keep, "trainable_only": trainable_only}
        states = [view.describe() for view in views]
        mine = {"about": about, "folder": [folder.save_id, folder.exists], "extra": zlib.crc32(packed), "states": states}
        message = contents.pack("the state of the optimizer", mine)
    except Exception as problem:
        error = problem
    try:
        told = [contents.unpack(text) for text in together(topology, "save: begin", message, error)]
        same(topology, "save", [each["about"] for each in told])
        states = [contents.merged([each["states"][index] for each in told]) for index in range(len(views))]
        folder = Folder(path, *told[0]["folder"])
        things = _gather_up(model, runtime, views, states, ema, place, trainable_only)
    except Exception:
        folder.discard(place)
        raise
    if place == 0 or told[place]["extra"] != told[0]["extra"]:
        name = contents.EXTRA if place == 0 else f"{contents.EXTRA}.{place}"
        things.packed[name] = packed
    return Saving(runtime, folder, things, series)


@dataclasses.dataclass
class _Things:
    """What this rank writes, and what all ranks together do."""

    items: list[Item]
    packed: dict[str, bytes]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    aliases: dict[str, str]


def _gather_up(
    model: nn.Module,
    runtime: Runtime,
    views: list[OptimizerView],
    states: list[Any],
    ema: EMA | None,
    place: int,
    trainable_only: bool,
) -> _Things:
    buffers, extra_state = ({}, {}) if trainable_only else contents.buffers(model, runtime)
    parts = contents.parameters(runtime, trainable_only) + (contents.averages(ema, runtime) if ema is not None else [])
    tensors = {part.name: (part.shape, part.values.dtype) for part in parts}
    for view, state in zip(views, states, strict=True):
        for name in (name for name in view.entries if name in state):
            entry = view.entries[name]
            own = view.optimizer.state.get(entry.param, {})
            for key, what in sorted(state[name].items()):
                if "value" in what:
                    continue
                shape = tuple(entry.slot.shape) if what["like"] else tuple(what["shape"])
                tensors[contents.state_name(name, key)] = (shape, what["dtype"])
                if view.holds(entry) and key in own:
                    parts.append(view.part(entry, key, what["like"], own[key].detach()))
    topology = runtime.topology
    everywhere, replicas = Turns(topology.ranks, place), Turns(topology.replicate.size, topology.replicate.rank)
    mine = [part for part in parts if (everywhere if part.everywhere else replicas).mine(part.values.nbytes)]
    for name, buffer in buffers.items():
        tensors[f"model.{name}"] = (tuple(buffer.shape), buffer.dtype)
        if place == 0:
            mine.append(Part(f"model.{name}", tuple(buffer.shape), 0, buffer.detach().reshape(-1), True))
    packed: dict[str, bytes] = {}
    if place == 0:
        whole = {
            "parameters": [list(entry.names) for entry in contents.kept(runtime, trainable_only)],
            "trainable_only": trainable_only,
            "buffers": list(buffers),
            "extra_state": extra_state,
            "ema": ema is not None,
            "optimizers": [
                {
                    "class": type(view.optimizer).__name__,
                    "num_groups": len(view.optimizer.param_groups),
                    "state": state,
                    "globals": view.globals(),
                }
                for view, state in zip(views, states, strict=True)
            ],
        }
        packed[contents.CONTENTS] = contents.pack("what a module or the optimizer keeps beside tensors", whole)
        for number, group in enumerate(group for view in views for group in view.groups()):
            for key, value in group.items():
                packed[f"optim.param_groups.{number}.{key}"] = contents.pack(f"option {key!r} of a parameter group", value)
    return _Things(files.items_of(mine), packed, tensors, contents.aliases(runtime, trainable_only))


# ------------------------------------------------------------------------------------------ write and publish


class Saving:
    """A save under way. `wait()` ends it, on all ranks."""

    def __init__(self, runtime: Runtime, folder: Folder, things: _Things, series: Series | None):
        self._runtime, self._topology = weakref.ref(runtime), runtime.topology
        self._folder, self._things, self._series = folder, things, series
        self._place = place_of(runtime.topology)
        self._thread: threading.Thread | None = None
        self._written: files.Written | None = None
        self._error: Exception | None = None
        self._done = False

    def write(self) -> None:
        try:
            file = f"{self._folder.data_folder}/__{self._place}_0.distcp"
            with writing(self._folder.path):
                self._written = files.write(self._folder.root, file, self._things.packed, self._things.items)
        except Exception as problem:
            self._error = problem
        self._things.items.clear()

    def write_in_background(self) -> None:
        self._things.items = [dataclasses.replace(item, values=item.values.to("cpu", copy=True)) for item in self._things.items]
        self._thread = threading.Thread(target=self.write, name="zeroshard-save")
        self._thread.start()

    def wait(self) -> None:
        """Returns when the checkpoint is published. Collective, once; raises what went wrong on any rank, on all."""
        if self._done:
            return
        self._done = True
        runtime = self._runtime()
        if runtime is not None and runtime.unpublished is self:
            runtime.unpublished = None
        if self._thread is not None:
            self._thread.join()
        try:
            message = b"" if self._written is None else json.dumps(dataclasses.astuple(self._written)).encode()
            told = together(self._topology, "save: what was written", message, self._error)
            error: Exception | None = None
            if self._place == 0:
                try:
                    self._publish([files.Written(*json.loads(text)) for text in told])
                except Exception as problem:
                    error = problem
            together(self._topology, "save: published", error=error)
        except Exception:
            self._folder.discard(self._place)
            raise
        if self._place == 0:
            self._folder.clear_replaced()

    def _publish(self, written: list[files.Written]) -> None:
        things = self._things
        with writing(self._folder.path):
            self._folder.publish(index.index_of(written, things.tensors, things.aliases, self._folder.save_id))
        if self._series is not None:
            self._series.remove_oldest()
