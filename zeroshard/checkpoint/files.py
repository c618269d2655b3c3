"""The files a rank writes, their checksums, and what makes writing them safe.

    <path>/.metadata                 which tensor is where (index.py)
    <path>/data-<id>/__<rank>_0.distcp    what one rank has written in one save

A save writes a new data folder beside the old one and then replaces .metadata by one rename: whoever opens the path finds
a complete checkpoint, the old one or the new.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO

import torch

from .contents import Part
from .plan import boxes

_BLOCK_BYTES = 1 << 20


def crc_name(crc: int) -> str:
    return f"{crc & 0xFFFFFFFF:08x}"


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


def write(root: pathlib.Path, file: str, packed: dict[str, bytes], items: Iterable[Item]) -> Written:
    """Writes all of it to one file and forces it to disk. From a GPU one item is copied at a time, on the CPU none."""
    entries: list[list[Any]] = []
    with open(root / file, "wb") as raw:
        out = _Summing(raw)
        for name, content in packed.items():
            entries.append([name, None, None, out.place, len(content)])
            out.write(content)
        for item in items:
            begin, values = out.place, _alone(item.values.detach().cpu())
            # The older of torch's two formats, which every torch.load reads: 0.3 kB around a tensor instead of 1.6.
            torch.save(values, out, _use_new_zipfile_serialization=False)  # type: ignore[arg-type]
            entries.append([item.name, list(item.offsets), list(values.shape), begin, out.place - begin])
            del values  # before the next one is fetched
        raw.flush()
        os.fsync(raw.fileno())
    return Written(file, out.place, crc_name(out.crc), entries)


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The same memory under a storage that ends where `values` does: torch.save writes whole storages."""
    if not values.numel():
        return torch.empty_like(values)
    flat = values.reshape(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(values.dtype).view(values.shape)


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """All or nothing: written beside it, forced to disk, renamed over it."""
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def sync_folder(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(root: pathlib.Path, files: dict[str, tuple[int, str]]) -> list[str]:
    """What is wrong with `files`: one text for each that is not as it was written."""
    found = []
    block = memoryview(bytearray(_BLOCK_BYTES))
    for name, (size, crc) in sorted(files.items()):
        try:
            actual, total = 0, 0
            with open(root / name, "rb", buffering=0) as file:
                while nbytes := file.readinto(block):
                    total, actual = total + nbytes, zlib.crc32(block[:nbytes], actual)
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        if total != size:
            found.append(f"{name} has {total} bytes, it was written with {size}")
        elif crc_name(actual) != crc:
            found.append(f"{name} has checksum {crc_name(actual)}, it was written with {crc}")
    return found
