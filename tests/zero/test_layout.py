"""FlatLayout: pieces tile every parameter, shards are equal, and padding alone depends on ranks and alignment."""

import math

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.layout import FlatLayout

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)
worlds = st.integers(1, 9)
aligns = st.sampled_from([1, 4, 16, 32])


@given(shapes, worlds, aligns)
def test_pieces_of_all_ranks_tile_every_slot(shapes: list[tuple[int, ...]], world: int, align: int) -> None:
    layout = FlatLayout.of(shapes, world, align)
    for index, slot in enumerate(layout.slots):
        assert slot.shape == shapes[index] and slot.numel == math.prod(shapes[index])
        covered = []
        for rank in range(world):
            piece = layout.piece(index, rank)
            covered += range(piece.start, piece.start + piece.numel)
        assert covered == list(range(slot.numel))


@given(shapes, worlds, aligns)
def test_a_piece_lies_where_the_flat_buffer_has_it(shapes: list[tuple[int, ...]], world: int, align: int) -> None:
    layout = FlatLayout.of(shapes, world, align)
    flat = [None] * layout.numel
    for index, slot in enumerate(layout.slots):
        for element in range(slot.numel):
            assert flat[slot.offset + element] is None, "slots overlap"
            flat[slot.offset + element] = (index, element)
    for rank in range(world):
        shard = flat[layout.shard_numel * rank : layout.shard_numel * (rank + 1)]
        for index in range(len(layout.slots)):
            piece = layout.piece(index, rank)
            held = shard[piece.shard_offset : piece.shard_offset + piece.numel]
            assert held == [(index, piece.start + k) for k in range(piece.numel)]
            assert piece.shard_offset >= 0 and piece.shard_offset + piece.numel <= layout.shard_numel


@given(shapes, worlds, aligns)
def test_alignment_and_padding(shapes: list[tuple[int, ...]], world: int, align: int) -> None:
    layout = FlatLayout.of(shapes, world, align)
    assert layout.numel == layout.shard_numel * world
    assert layout.shard_numel % align == 0 and all(slot.offset % align == 0 for slot in layout.slots)
    logical = sum(slot.numel for slot in layout.slots)
    assert logical <= layout.numel < logical + align * (len(layout.slots) + world) + world


@given(shapes, worlds, worlds, aligns)
def test_slots_do_not_depend_on_the_number_of_ranks(
    shapes: list[tuple[int, ...]], one: int, other: int, align: int
) -> None:
    assert FlatLayout.of(shapes, one, align).slots == FlatLayout.of(shapes, other, align).slots
