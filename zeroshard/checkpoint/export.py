"""export: a folder of safetensors files under the unsharded names, written one tensor at a time.

Every rank sends its piece of a tensor to rank 0, which puts them together, casts, writes and forgets them. A safetensors
file starts with where everything is, and that follows from shapes and dtypes alone, so nothing needs to be held back.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..config import ShardError
from ..entry import Entry
from ..partition import clean
from ..runtime import Runtime, runtime_of
from .contents import is_cut
from .files import sync_folder
from .folder import writing
from .tensorfile import DTYPES, INDEX, Shape, Writer
from .together import place_of, together

T = TypeVar("T", bound=Shape)


@dataclasses.dataclass(frozen=True)
class Export(Shape):
    """One tensor to write: a parameter, or a buffer as it is here."""

    source: Entry | torch.Tensor


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    trainable_only: bool = False,
    config: Any = None,
    tokenizer: Any = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes the weights as safetensors, and what else `from_pretrained` needs. Collective; rank 0 writes.

    Args:
        model: the sharded model, or a module inside it, whose names are then relative to it.
        folder: made if need be. Files of an earlier export in it are replaced once the new ones are complete.
        dtype: what floating tensors are cast to; `None`: the dtype of the masters.
        trainable_only: only parameters with `requires_grad`, and no buffers (adapters).
        config, tokenizer: anything with `save_pretrained(folder)`. `None` takes the model's own config, if it has one.
        max_file_bytes: larger models become several files with an index.

    Tied weights are written once, under their first name. Buffers are rank 0's. Memory beyond the model's own: two tensors.

    Raises:
        ShardError: on all ranks, if rank 0 cannot write, or a dtype that safetensors does not know.
    """
    runtime = _runtime_around(model)
    topology, place = runtime.topology, place_of(runtime.topology)
    target = pathlib.Path(os.path.abspath(folder))
    staging = target.with_name(f".{target.name}.exporting")
    error: Exception | None = None
    files: dict[str, list[Export]] = {}
    try:
        files = plan_files(_tensors(model, runtime, dtype, trainable_only), max_file_bytes)
        if place == 0:
            shutil.rmtree(staging, ignore_errors=True)
            with writing(target):
                staging.mkdir(parents=True)
    except Exception as problem:
        error = problem
    together(topology, "export: begin", error=error)
    try:
        error = _write_all(files, staging, runtime)
        if place == 0:
            try:
                with writing(target):
                    if error is not None:
                        raise error
                    _write_rest(files, staging, model, dtype, config, tokenizer)
                    publish_folder(staging, target)
            except Exception as problem:
                error = problem
        together(topology, "export: written", error=error)
    finally:
        if place == 0:
            shutil.rmtree(staging, ignore_errors=True)


# ------------------------------------------------------------------------------------------ what goes where


def _runtime_around(model: nn.Module) -> Runtime:
    if isinstance(model, nn.Module) and "_zeroshard" not in model.__dict__:
        for param in model.parameters():
            entry = param._zeroshard() if hasattr(param, "_zeroshard") else None
            if entry is not None:
                runtime = entry.unit.runtime()
                assert isinstance(runtime, Runtime)
                return runtime
    return runtime_of(model, "export")


def _tensors(model: nn.Module, runtime: Runtime, dtype: torch.dtype | None, trainable_only: bool) -> list[Export]:
    """In the order of the state dict, each tied parameter once."""
    found: dict[int, Export] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        entry = runtime.entry_of.get(id(value))
        if id(value) in found or not isinstance(value, torch.Tensor):
            continue
        if trainable_only and (entry is None or not value.requires_grad):
            continue
        kept = value.dtype if entry is None else entry.unit.dtype
        cast = dtype if dtype is not None and kept.is_floating_point else kept
        if cast not in DTYPES:
            raise ShardError(f"{clean(name)} is {cast}, which safetensors files do not hold; export with dtype=")
        shape = tuple(value.shape if entry is None else entry.slot.shape)
        found[id(value)] = Export(clean(name), shape, cast, value if entry is None else entry)
    return list(found.values())


def plan_files(tensors: Sequence[T], max_file_bytes: int) -> dict[str, list[T]]:
    """File name -> the tensors that go into it."""
    files: list[list[T]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled + tensor.nbytes > max_file_bytes and files[-1]:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{number:05}-of-{len(files):05}.safetensors": file for number, file in enumerate(files, 1)}


# ------------------------------------------------------------------------------------------ the tensors


def _write_all(files: dict[str, list[Export]], staging: pathlib.Path, runtime: Runtime) -> OSError | None:
    """-> an error of rank 0, which goes on until the ranks have done what they do together."""
    error: OSError | None = None
    writes = place_of(runtime.topology) == 0
    for name, tensors in files.items():
        writer: Writer | None = None
        for tensor in [*tensors, None]:
            whole = None if tensor is None else _whole(tensor, runtime)
            try:
                if writes and error is None:
                    writer = writer or Writer(staging / name, tensors)
                    if tensor is None:
                        writer.close()
                    elif whole is not None:
                        writer.add(whole.to(tensor.dtype))
            except OSError as problem:
                error = problem
            del whole
    return error


def _whole(tensor: Export, runtime: Runtime) -> torch.Tensor | None:
    """The whole tensor, on rank 0 alone."""
    entry, place = tensor.source, place_of(runtime.topology)
    if isinstance(entry, torch.Tensor):
        return entry.detach().cpu() if place == 0 else None
    mine = entry.piece_of(entry.unit.shard)
    if not is_cut(entry):
        return mine.detach().cpu() if place == 0 else None
    if runtime.topology.replicate.rank != 0:
        return None
    channel, label = runtime.topology.shard, f"export of {tensor.name}"
    if place != 0:
        if entry.numel:
            channel.route(label, {0: mine}, {}).wait()
        return None
    whole = torch.empty(entry.slot.numel, dtype=mine.dtype, device=mine.device)
    pieces = [entry.unit.layout.piece(entry.index, rank) for rank in range(channel.size)]
    parts = [whole[piece.start : piece.start + piece.numel] for piece in pieces]
    parts[0].copy_(mine)
    receives = {rank: parts[rank] for rank in channel.peers if parts[rank].numel()}
    if receives:
        channel.route(label, {}, receives).wait()
    return whole.cpu()


# ------------------------------------------------------------------------------------------ the rest of the folder


def _write_rest(
    files: dict[str, list[Export]],
    staging: pathlib.Path,
    model: nn.Module,
    dtype: torch.dtype | None,
    config: Any,
    tokenizer: Any,
) -> None:
    write_index(files, staging)
    if config is None and callable(getattr(getattr(model, "config", None), "save_pretrained", None)):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        if dtype is not None and hasattr(config, "dtype"):
            config.dtype = dtype
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(staging)
    for each in (config, tokenizer):
        if each is not None:
            each.save_pretrained(staging)


def write_index(files: Mapping[str, Sequence[Shape]], folder: pathlib.Path) -> None:
    """The file that says which tensor is where, if there are several."""
    if len(files) > 1:
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
        weight_map = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def publish_folder(staging: pathlib.Path, target: pathlib.Path) -> None:
    """One rename for a new folder. Into one that is there the files move one by one, then older weights are removed."""
    sync_folder(staging)
    if not target.exists():
        os.rename(staging, target)
        return
    new = sorted(path.name for path in staging.iterdir())
    for name in new:
        if (staging / name).is_dir():
            shutil.copytree(staging / name, target / name, dirs_exist_ok=True)
        else:
            os.replace(staging / name, target / name)
    for path in target.iterdir():
        if _WEIGHTS.fullmatch(path.name) and path.name not in new:
            path.unlink()


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
