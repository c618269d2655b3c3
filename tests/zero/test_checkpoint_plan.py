"""Boxes of flat pieces, turns, safetensors headers: everything about checkpoints that needs no process group."""

import math
import pathlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard import ShardError
from zeroshard.checkpoint import files
from zeroshard.checkpoint.plan import Turns, boxes
from zeroshard.checkpoint.tensorfile import Shape, Writer, stored_in

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_are_the_piece(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    count = data.draw(st.integers(0, numel - start))
    whole = torch.arange(numel).view(shape)
    seen, place = [], start
    for box in boxes(shape, start, count):
        assert box.start == place
        place += box.numel
        cut = whole[tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))]
        assert tuple(cut.shape) == box.sizes
        seen += cut.flatten().tolist()
    assert seen == list(range(start, start + count))
    assert len(boxes(shape, start, count)) <= max(1, 2 * len(shape) - 1)


def test_turns_are_balanced_and_agreed() -> None:
    sizes = [50, 40, 30, 20, 10, 10, 10, 10]
    told = [[Turns(3, rank).mine(0) for _ in range(1)] for rank in range(3)]
    assert told == [[True], [False], [False]]
    turns = [Turns(3, rank) for rank in range(3)]
    loads = [0, 0, 0]
    for size in sizes:
        mine = [turn.mine(size) for turn in turns]
        assert mine.count(True) == 1
        loads[mine.index(True)] += size
    assert max(loads) - min(loads) <= 20


def test_safetensors_files_are_those_of_the_library(tmp_path: pathlib.Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 4),
        "codes": torch.arange(9, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
    }
    writer = Writer(tmp_path / "ours.safetensors", [Shape(n, tuple(t.shape), t.dtype) for n, t in tensors.items()])
    for tensor in tensors.values():
        writer.add(tensor)
    writer.close()
    save_file(tensors, tmp_path / "theirs.safetensors")
    read = load_file(tmp_path / "ours.safetensors")
    stored = stored_in(tmp_path / "theirs.safetensors")
    assert list(read) and set(read) == set(stored) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
        middle = tensor.flatten()[1:-1]
        out = torch.empty_like(middle)
        stored[name].read(1, out)
        assert torch.equal(out, middle) and stored[name].shape == tuple(tensor.shape)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, (20).to_bytes(8, "little") + b"{" * 20])
def test_a_damaged_safetensors_file_is_named(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ShardError, match=r"model\.safetensors"):
        stored_in(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64, torch.bool, torch.int64])
def test_what_is_written_is_the_memory_itself(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    """The middle of a buffer is saved without a copy and without the rest of the buffer."""
    buffer = torch.arange(4096).to(dtype)
    for values in (buffer[1000:3000].view(40, 50), buffer[7], buffer[:0]):
        alone = files._alone(values)
        assert alone.data_ptr() == values.data_ptr() or not values.numel()
        assert alone.untyped_storage().nbytes() == values.nbytes
    item = files.Item("x", (0,), buffer[1000:3000].view(40, 50))
    written = files.write(tmp_path, "file", {}, [item])
    assert written.nbytes < item.values.nbytes + 1000
    assert torch.equal(torch.load(tmp_path / "file"), item.values)
