"""Where things lie in a unit's flat buffer. Integers only.

slot    a parameter's place: offset and length in the flat buffer, in elements
shard   the equal share of the flat buffer that one rank keeps
piece   the part of one slot that lies in one shard
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat buffer."""

    shape: tuple[int, ...]
    offset: int
    numel: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of a flattened parameter, at `shard_offset` of a rank's shard."""

    start: int
    numel: int
    shard_offset: int


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """Slots one after the other, each aligned to `align` elements, padded to `world` equal shards.

    Only padding depends on `world` and `align`: the logical content of a slot never does.
    """

    slots: tuple[Slot, ...]
    world: int
    shard_numel: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], world: int, align: int = 1) -> FlatLayout:
        slots, offset = [], 0
        for shape in shapes:
            numel = math.prod(shape)
            slots.append(Slot(tuple(shape), offset, numel))
            offset += -(-numel // align) * align
        share = -(-offset // world)
        return cls(tuple(slots), world, -(-share // align) * align)

    @property
    def numel(self) -> int:
        """Length of the flat buffer, padding included."""
        return self.shard_numel * self.world

    def piece(self, index: int, rank: int) -> Piece:
        """What `rank` keeps of slot `index`; of length 0 where it keeps nothing."""
        slot, begin = self.slots[index], self.shard_numel * rank
        start = min(max(begin - slot.offset, 0), slot.numel)
        stop = min(max(begin + self.shard_numel - slot.offset, 0), slot.numel)
        return Piece(start, stop - start, slot.offset + start - begin if stop > start else 0)
