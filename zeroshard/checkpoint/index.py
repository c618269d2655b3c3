"""The index of a checkpoint, in the format of torch.distributed.checkpoint, and the reading of what it says is there.

What other tools read comes first. Behind it, ignored by them, stand the sizes and checksums of all files and of the index
itself. Nothing is unpickled without a list of allowed types.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import pathlib
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

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
from .contents import Part, unpack
from .files import Written, crc_name, items_of

INDEX = ".metadata"
VERSION = 1
_MAGIC = b"zeroshard-index "
_FOOTER_NUMEL = len(_MAGIC) + 8 + 8  # magic, length of the JSON text, crc32 of all before it; hexadecimal


# ------------------------------------------------------------------------------------------ writing


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

    def groups(self) -> list[dict[str, Any]]:
        """The options of all parameter groups; `params` are names."""
        groups: dict[int, dict[str, Any]] = {}
        for (number, key), name in self.index.under("optim", "param_groups").items():
            packed, stored = self.read_bytes(name), self.index.tensor(name)
            if packed is not None:
                groups.setdefault(number, {})[key] = unpack(packed)
            elif stored is not None:  # another tool has written an option that is a tensor by itself
                value = torch.empty(stored.size, dtype=stored.properties.dtype)
                self.read_parts([Part(name, tuple(stored.size), 0, value.view(-1), True)])
                groups.setdefault(number, {})[key] = value
        return [groups[number] for number in sorted(groups)]

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
