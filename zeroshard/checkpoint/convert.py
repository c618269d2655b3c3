"""Checkpoints without a model and without a process group: what is in one, and to and from safetensors, a tensor at a time."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator
from typing import Any

import torch

from ..config import ShardError
from . import contents, files
from .contents import Part
from .export import plan_files, publish_folder, write_index
from .files import Item
from .folder import Folder, writing
from .index import INDEX, Reader, index_of, read_index
from .tensorfile import DTYPES, Shape, Writer, stored_in


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `inspect` shows. tensors: name -> (shape, dtype, number of boxes). problems: what is wrong with the files."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, int]]
    optimizers: list[str]
    groups: list[dict[str, Any]]
    extra: Any
    num_files: int
    file_bytes: int
    checksums: bool
    problems: list[str]


def _reader(path: str | os.PathLike[str]) -> Reader:
    root = pathlib.Path(os.path.abspath(path))
    return Reader(root, read_index(root))


def _unpacked(reader: Reader, name: str) -> Any:
    packed = reader.read_bytes(name)
    return None if packed is None else contents.unpack(packed)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    return (pathlib.Path(path) / INDEX).is_file()


def summary(path: str | os.PathLike[str]) -> Summary:
    """Reads all of a checkpoint once. Raises ShardError if its index is damaged."""
    reader = _reader(path)
    index = reader.index
    problems = files.damage(reader.root, index.files or {})
    known = {} if problems else _unpacked(reader, contents.CONTENTS) or {}
    other_names = {f"model.{name}" for names in known.get("parameters", []) for name in names[1:]}
    tensors = {
        name: (tuple(stored.size), stored.properties.dtype, len(stored.chunks))
        for name in index.metadata.state_dict_metadata
        if (stored := index.tensor(name)) is not None and name not in other_names
    }
    names = {info.relative_path for info in index.metadata.storage_data.values()}
    sizes = [file.stat().st_size for name in names if (file := reader.root / name).is_file()]
    return Summary(
        tensors,
        [each["class"] for each in known.get("optimizers", [])],
        [] if problems else reader.groups(),
        None if problems else _unpacked(reader, contents.EXTRA),
        len(sizes),
        sum(sizes),
        index.files is not None,
        problems,
    )


def to_safetensors(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], prefix: str = "model.", max_file_bytes: int = 5 * 10**9
) -> int:
    """Writes the tensors of a checkpoint under `prefix` ("model." or "ema.") to a folder; -> how many."""
    reader, target = _reader(path), pathlib.Path(os.path.abspath(folder))
    about = summary(path)
    if about.problems:
        raise ShardError(f"{reader.root} is damaged: {'; '.join(about.problems)}")
    chosen = {name: what for name, what in about.tensors.items() if name.startswith(prefix)}
    if not chosen:
        raise ShardError(f"{reader.root} has no tensors under {prefix!r}")
    shapes = []
    for name, (shape, dtype, _) in chosen.items():
        if dtype not in DTYPES:
            raise ShardError(f"{name} is {dtype}, which safetensors files do not hold")
        shapes.append(Shape(name.removeprefix(prefix), shape, dtype))
    staging = target.with_name(f".{target.name}.exporting")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with writing(target):
            staging.mkdir(parents=True)
            planned = plan_files(shapes, max_file_bytes)
            for file, tensors in planned.items():
                writer = Writer(staging / file, tensors)
                for tensor in tensors:
                    whole = torch.empty(torch.Size(tensor.shape).numel(), dtype=tensor.dtype)
                    reader.read_parts([Part(prefix + tensor.name, tensor.shape, 0, whole, True)])
                    writer.add(whole)
                writer.close()
            write_index(planned, staging)
            publish_folder(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return len(shapes)


def from_safetensors(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Writes a checkpoint that holds the weights of a safetensors file or folder; -> how many tensors."""
    stored = stored_in(pathlib.Path(os.path.abspath(source)))
    folder = Folder(pathlib.Path(os.path.abspath(path)), secrets.token_hex(4))

    def items() -> Iterator[Item]:
        for name, tensor in stored.items():
            whole = torch.empty(torch.Size(tensor.shape).numel(), dtype=tensor.dtype)
            tensor.read(0, whole)
            yield from files.items_of([Part(f"model.{name}", tensor.shape, 0, whole, True)])

    known = {"parameters": [[name] for name in stored], "buffers": [], "extra_state": {}, "ema": False, "optimizers": []}
    packed = {contents.CONTENTS: contents.pack("names", known), contents.EXTRA: contents.pack("extra", None)}
    try:
        with writing(folder.path):
            folder.prepare()
            written = files.write(folder.root, f"{folder.data_folder}/__0_0.distcp", packed, items())
            tensors = {f"model.{name}": (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
            folder.publish(index_of([written], tensors, {}, folder.save_id))
    except BaseException:
        folder.discard(0)
        raise
    folder.clear_replaced()
    return len(stored)
