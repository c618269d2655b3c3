"""safetensors files, written and read by byte ranges: the library itself maps or holds whole files.

A file is the length of its header (8 bytes, little endian), a JSON header with dtype, shape and place of every tensor, and
the tensors' bytes. A flat piece of a tensor is one range of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch

from ..config import ShardError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_CODE = {code: dtype for dtype, code in DTYPES.items()}
_BLOCK_NUMEL = 1 << 22
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
INDEX = "model.safetensors.index.json"


# ------------------------------------------------------------------------------------------ writing


@dataclasses.dataclass(frozen=True)
class Shape:
    """Name, shape and dtype of one tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Writer:
    """One file; its tensors are added in the order in which they were announced."""

    def __init__(self, path: pathlib.Path, tensors: Sequence[Shape]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for tensor in tensors:
            places = [begin, begin + tensor.nbytes]
            header[tensor.name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
            begin += tensor.nbytes
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 (closed by close)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, tensor: torch.Tensor) -> None:
        """`tensor` is on the CPU and of the announced dtype."""
        if tensor.numel():
            self._file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


# ------------------------------------------------------------------------------------------ reading


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `begin` is its first byte in the file."""

    path: pathlib.Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int

    def read(self, start: int, out: torch.Tensor) -> None:
        """Elements [start, start + out.numel()) of the flattened tensor into `out` (1-D), cast to its dtype."""
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin + start * self.dtype.itemsize)
            for block in out.split(_BLOCK_NUMEL):
                data = bytearray(block.numel() * self.dtype.itemsize)
                if file.readinto(data) != len(data):
                    raise ShardError(f"{self.path} ends before its tensors do: it is cut off")
                if data:
                    block.copy_(torch.frombuffer(data, dtype=self.dtype))


def stored_in(source: pathlib.Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, or of a folder of them (through its index, if there is one)."""
    if source.is_file():
        paths = [source]
    elif (source / INDEX).is_file():
        index = json.loads((source / INDEX).read_text())
        paths = [source / name for name in sorted(set(index["weight_map"].values()))]
    else:
        paths = sorted(source.glob("*.safetensors"))
    if not paths:
        there = "has no *.safetensors in it" if source.is_dir() else "does not exist"
        raise ShardError(f"{source} {there}: expected a safetensors file, or a folder of them")
    found: dict[str, Stored] = {}
    for path in paths:
        found.update(_header(path))
    return found


def _header(path: pathlib.Path) -> dict[str, Stored]:
    try:
        nbytes = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(nbytes, _MAX_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, about in header.items():
            begin, end = about["data_offsets"]
            stored = Stored(path, tuple(about["shape"]), _BY_CODE[about["dtype"]], 8 + length + begin)
            if end - begin != torch.Size(stored.shape).numel() * stored.dtype.itemsize or 8 + length + end > nbytes:
                raise ValueError(f"{name} does not lie in the file")
            found[name] = stored
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(f"{path} is damaged or no safetensors file: {type(error).__name__}: {error}") from error
    return found
