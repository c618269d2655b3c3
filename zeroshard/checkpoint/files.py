"""The files of a checkpoint, in the format of torch.distributed.checkpoint, with checksums.

    <path>/.metadata                 which tensor is where; then, ignored by other readers, sizes and checksums of all files
    <path>/data-<id>/__<rank>_0.distcp    what one rank has written in one save

A save writes a new data folder beside the old one and then replaces .metadata by one rename: whoever opens the path finds
a complete checkpoint, the old one or the new. Nothing in here is unpickled without a list of allowed types.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import os
import pathlib
import pickle
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from ..config import ShardError
from .contents import Part
from .plan import boxes

INDEX = ".metadata"
VERSION = 1
_MAGIC = b"zeroshard-index "
_FOOTER_NUMEL = len(_MAGIC) + 8 + 8  # magic, length of the JSON text, crc32 of all before it; hexadecimal
_BLOCK = 1 << 22


def crc_name(crc: int) -> str:
    return f"{crc & 0xFFFFFFFF:08x}"


# ------------------------------------------------------------------------------------------ writing


@dataclasses.dataclass(frozen=True)
class Item:
    """One box of a tensor: `values` has its sizes."""

    name: str
    offsets: tuple[int, ...]
    values: torch.Tensor


@dataclasses.dataclass
class Written:
    """What one rank has written: its file, and for each item (name, offsets or None, sizes, place, length). JSON-able."""

    file: str
    nbytes: int
    crc: str
    items: list[list[Any]]


class _Summing(io.RawIOBase):
    """Writes through to a file, and counts and sums up what goes by."""

    def __init__(self, file: BinaryIO):
        self.file, self.place, self.crc = file, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self.crc = zlib.crc32(view, self.crc)
        self.place += view.nbytes
        return view.nbytes


def items_of(parts: Iterable[Part]) -> list[Item]:
    return [
        Item(part.name, box.offsets, part.values[box.start - part.start :][: box.numel].view(box.sizes))
        for part in parts
        for box in boxes(part.shape, part.start, part.values.numel())
    ]


def write(root: pathlib.Path, file: str, packed: dict[str, bytes], items: Sequence[Item]) -> Written:
    """Writes all of it to one file and forces it to disk. At most one item is copied at a time."""
    entries: list[list[Any]] = []
    with open(root / file, "wb") as raw:
        out = _Summing(raw)
        for name, content in packed.items():
            entries.append([name, None, None, out.place, len(content)])
            out.write(content)
        for item in items:
            begin, values = out.place, item.values.detach().cpu()
            if values.untyped_storage().nbytes() != values.nbytes:
                values = values.clone()  # torch.save writes whole storages
            # The older of torch's two formats, which every torch.load reads: 0.3 kB around a tensor instead of 1.6.
            torch.save(values, out, _use_new_zipfile_serialization=False)  # type: ignore[arg-type]
            entries.append([item.name, list(item.offsets), list(values.shape), begin, out.place - begin])
        raw.flush()
        os.fsync(raw.fileno())
    return Written(file, out.place, crc_name(out.crc), entries)


def index_of(
    written: Sequence[Written], tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], aliases: dict[str, str], save_id: str
) -> bytes:
    """The content of .metadata. `tensors`: shape and dtype of all; `aliases`: further names of the same bytes."""
    state: dict[str, Any] = {
        name: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        for name, (shape, dtype) in tensors.items()
    }
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for each in written:
        for name, offsets, sizes, place, length in each.items:
            info = _StorageInfo(each.file, place, length)
            if offsets is None:
                state[name] = BytesStorageMetadata()
                storage[MetadataIndex(name)] = info
            else:
                chunks = state[name].chunks
                storage[MetadataIndex(name, offsets, len(chunks))] = info
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    _check_complete(state)
    for alias, name in aliases.items():
        state[alias] = state[name]
        for index in [index for index in storage if index.fqn == name]:
            storage[MetadataIndex(alias, index.offset, index.index)] = storage[index]
    paths = {name: _path_in_state_dict(name) for name in state}
    meta = StorageMeta(save_id=save_id)
    pickled = pickle.dumps(Metadata(state, paths, storage, meta, CURRENT_DCP_VERSION))
    about = {"version": VERSION, "id": save_id, "files": {each.file: [each.nbytes, each.crc] for each in written}}
    text = json.dumps(about).encode()
    body = pickled + text
    return body + _MAGIC + f"{len(text):08x}{crc_name(zlib.crc32(body))}".encode()


def _check_complete(state: dict[str, Any]) -> None:
    for name, what in state.items():
        if isinstance(what, TensorStorageMetadata) and sum(c.sizes.numel() for c in what.chunks) != what.size.numel():
            raise ShardError(f"{name}: the ranks together hold {[tuple(c.sizes) for c in what.chunks]} of {tuple(what.size)}")


def _path_in_state_dict(name: str) -> tuple[str | int, ...]:
    """Where other tools put an entry when they rebuild nested dicts: {"optim": {"state": {parameter: {key: ...}}}}."""
    top, _, rest = name.partition(".")
    if rest.startswith("state.") and top == "optim":
        parameter, _, key = rest.removeprefix("state.").rpartition(".")
        return ("optim", "state", parameter, key)
    if rest.startswith("param_groups.") and top == "optim":
        number, _, key = rest.removeprefix("param_groups.").partition(".")
        return ("optim", "param_groups", int(number), key)
    return (top, rest)


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """All or nothing: written beside it, forced to disk, renamed over it."""
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------ reading


@dataclasses.dataclass(frozen=True)
class Index:
    """What .metadata says. `files`: name -> (bytes, checksum); `None` for a checkpoint of another tool, which has none."""

    metadata: Metadata
    save_id: str
    files: dict[str, tuple[int, str]] | None

    def under(self, *path: str | int) -> dict[tuple[Any, ...], str]:
        """rest of the path in the state dict -> name, of all entries below `path`."""
        paths: dict[str, tuple[Any, ...]] = self.metadata.planner_data or {}
        return {tuple(p[len(path) :]): name for name, p in paths.items() if tuple(p[: len(path)]) == path}

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        what = self.metadata.state_dict_metadata.get(name)
        return what if isinstance(what, TensorStorageMetadata) else None


def read_index(root: pathlib.Path) -> Index:
    """Raises ShardError, naming the file, for anything but a sound index."""
    path = root / INDEX
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        there = "is no folder" if not root.is_dir() else f"has no {INDEX}"
        raise ShardError(f"{root} is no complete checkpoint: it {there}. Give the path that was given to save") from None
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error}") from error
    footer = content[-_FOOTER_NUMEL:]
    about: dict[str, Any] | None = None
    try:
        if footer.startswith(_MAGIC):
            length, crc = int(footer[-16:-8], 16), footer[-8:].decode()
            body = content[:-_FOOTER_NUMEL]
            if crc != crc_name(zlib.crc32(body)):
                raise ShardError(f"{path} is damaged: its checksum is {crc_name(zlib.crc32(body))}, it should be {crc}")
            about = json.loads(body[len(body) - length :])
        metadata = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise ShardError(f"{path} holds a {type(metadata).__name__}, not the index of a checkpoint")
    except ShardError:
        raise
    except Exception as error:
        raise ShardError(f"{path} is damaged or no index of a checkpoint: {type(error).__name__}: {error}") from error
    if about is None:
        if any(name.startswith("zeroshard.") for name in metadata.state_dict_metadata):
            raise ShardError(f"{path} is damaged: its end, which holds the checksums, is missing or altered")
        return Index(metadata, "", None)
    if about["version"] != VERSION:
        raise ShardError(f"{path} has version {about['version']} of the format; this zeroshard reads version {VERSION}")
    return Index(metadata, about["id"], {name: (size, crc) for name, (size, crc) in about["files"].items()})


class _Unpickler(pickle.Unpickler):
    """Makes the objects an index consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.checkpoint.") or module in ("pathlib", "pathlib._local"):
            found = super().find_class(module, name) if name in _ALLOWED else None
        elif module == "torch":
            found = getattr(torch, name, None)
            found = found if found is torch.Size or isinstance(found, (torch.dtype, torch.layout)) else None
        elif (module, name) == ("torch.serialization", "_get_layout"):
            found = super().find_class(module, name)
        else:
            found = collections.OrderedDict if (module, name) == ("collections", "OrderedDict") else None
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in an index")
        return found


_ALLOWED = frozenset(
    {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
        "_StorageInfo",
        "PosixPath",
        "WindowsPath",
        "PurePosixPath",
        "PureWindowsPath",
    }
)


def damage(root: pathlib.Path, files: dict[str, tuple[int, str]]) -> list[str]:
    """What is wrong with `files`: one text for each that is not as it was written."""
    found = []
    for name, (size, crc) in sorted(files.items()):
        try:
            actual, total = 0, 0
            with open(root / name, "rb") as file:
                while block := file.read(_BLOCK):
                    total, actual = total + len(block), zlib.crc32(block, actual)
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        if total != size:
            found.append(f"{name} has {total} bytes, it was written with {size}")
        elif crc_name(actual) != crc:
            found.append(f"{name} has checksum {crc_name(actual)}, it was written with {crc}")
    return found


class Reader:
    """Reads what an index says is there. Each stored box is read once, however many boxes here want parts of it."""

    def __init__(self, root: pathlib.Path, index: Index):
        self.root, self.index = root, index
        self._places: dict[MetadataIndex, _StorageInfo] = index.metadata.storage_data

    def read_bytes(self, name: str) -> bytes | None:
        info = self._places.get(MetadataIndex(name))
        if info is None:
            return None
        with open(self.root / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return file.read(info.length)

    @torch.no_grad()
    def read_parts(self, parts: Sequence[Part]) -> None:
        """Overwrites the values of `parts` with what is stored under their names."""
        targets: dict[MetadataIndex, torch.Tensor] = {}
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for part in parts:
            items = items_of([part])
            boxes_here = [ChunkStorageMetadata(torch.Size(item.offsets), item.values.shape) for item in items]
            stored = self.index.tensor(part.name)
            assert stored is not None, part.name
            for read in create_read_items_for_chunk_list(part.name, stored, boxes_here):
                wanted.setdefault(read.storage_index, []).append(read)
            targets.update({MetadataIndex(item.name, item.offsets): item.values for item in items})
        for index in sorted(wanted, key=lambda index: (self._places[index].relative_path, self._places[index].offset)):
            box = self._read_box(self._places[index])
            for read in wanted[index]:
                target = targets[read.dest_index][_slices(read.dest_offsets, read.lengths)]
                target.copy_(box[_slices(read.storage_offsets, read.lengths)])
            del box

    def _read_box(self, info: _StorageInfo) -> torch.Tensor:
        with open(self.root / info.relative_path, "rb") as file:
            view: Any = _create_file_view(file, info.offset, info.length)
            return torch.load(view, map_location="cpu", weights_only=True)


def _slices(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
