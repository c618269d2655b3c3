"""Unit: one flat buffer, cut over the ranks. Owns the shard, the full buffer and the gradients of its parameters.

    shard   the master values this rank keeps                     [held_numel]  master dtype, always there
    full    the whole values, which parameters are views of       [numel]       compute dtype
    local, grad: see gradients.py

Where nothing is cast and full stays, the shard is a view of full: an update of one is an update of the other.
Storage under a parameter is exchanged here and nowhere else. No storage is ever emptied: a released full buffer lives on
for as long as somebody looks at it.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .comm import Channel, Pending, Topology
from .config import Options, ShardError
from .entry import Entry
from .gradients import Gradients
from .layout import FlatLayout
from .parameter import ShardedParameter
from .partition import UnitPlan

if TYPE_CHECKING:
    from .memory.ledger import Ledger

ALIGN_BYTES = 64
LOOKS = 2  # uses of a unit, the first forward and its backward, whose weights are compared with the masters afterwards


class State(enum.Enum):
    """Where the whole values are, and what that costs."""

    SHARDED = "only the shard: nothing beyond it"
    GATHERING = "on their way into full: one full buffer, which the Pending owns too"
    FULL = "in full: one full buffer"


_MOVES = {
    (State.SHARDED, State.GATHERING),
    (State.GATHERING, State.FULL),
    (State.FULL, State.GATHERING),
    (State.FULL, State.SHARDED),
}


class Unit(Gradients):
    """See the top of the file. `index` orders units on all ranks alike."""

    def __init__(
        self, plan: UnitPlan, index: int, topology: Topology, options: Options, device: torch.device, ledger: Ledger
    ):
        self.name, self.index, self.topology, self.ledger = plan.name, index, topology, ledger
        self.dtype, self.compute, self.trainable = plan.dtype, plan.compute, plan.trainable
        world, stage = topology.shard.size, options.stage
        align = max(1, ALIGN_BYTES // plan.dtype.itemsize)
        self.layout = FlatLayout.of([tuple(param.shape) for param in plan.params], world, align)
        held_by_all = stage.shards and world > 1
        self.holders = topology.shard if held_by_all else Channel(None, topology.shard.watch, topology.shard.device)
        self.held_numel = self.layout.shard_numel if held_by_all else self.layout.numel
        self.releases = stage.release_params and held_by_all
        self.alias = plan.compute == plan.dtype and not self.releases
        self.plain = self.alias and not held_by_all
        self.alone = self.plain and topology.ranks == 1  # no other rank: gradients stay where autograd leaves them
        self.mean = options.reduce == "mean"
        precision = options.precision
        low = plan.dtype.itemsize < 4 and plan.dtype.is_floating_point
        self.reduce_dtype = precision.reduce if precision is not None else torch.float32 if low else plan.dtype
        self.state, self.stale, self.users = State.SHARDED, False, 0
        self._versions: list[int] = []
        self._looks = LOOKS
        self.use: Any = None
        self.full: torch.Tensor | None = None
        self.full_storage = 0
        super().__init__({i for i, param in enumerate(plan.params) if param.requires_grad})
        self._gathering: Pending | None = None
        self.runtime: weakref.ref[Any] = lambda: None  # type: ignore[assignment]
        self.gather_label, self.reduce_label = f"gather {self.name}", f"reduce {self.name}"
        named = enumerate(zip(plan.params, plan.names, strict=True))
        self.entries = [Entry(self, i, param, names) for i, (param, names) in named]
        self._take_over(device)

    # ---- layout

    def held_piece(self, index: int) -> tuple[int, int, int]:
        """(first element of the parameter, elements, offset in the held buffer)."""
        if self.held_numel == self.layout.numel:
            slot = self.layout.slots[index]
            return 0, slot.numel, slot.offset
        piece = self.layout.piece(index, self.holders.rank)
        return piece.start, piece.numel, piece.shard_offset

    def held_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's share of a [numel] buffer: a view."""
        return flat.narrow(0, self.held_numel * self.holders.rank, self.held_numel)

    @property
    def whole_bytes(self) -> int:
        """Of the whole values, as gathered."""
        return self.layout.numel * self.compute.itemsize

    @property
    def shard(self) -> torch.Tensor:
        """The master values this rank keeps."""
        self.reclaim()
        return self._shard

    # ---- the start

    def _take_over(self, device: torch.device) -> None:
        """Rank 0's values become everybody's; parameters become views of full, or sharded."""
        on_meta = [entry.param.device.type == "meta" for entry in self.entries]
        if any(on_meta) and not all(on_meta):
            raise ShardError(f"{self.name}: some parameters are on the meta device, some are not; build all of them there")
        flat = torch.zeros(self.layout.numel, dtype=self.dtype, device=device)
        if not any(on_meta):
            for entry in self.entries:
                entry.view_of(flat).copy_(entry.param.detach())
            self.topology.broadcast(f"initial values of {self.name}", flat)
        self._nan = torch.full((), float("nan") if self.compute.is_floating_point else 0, dtype=self.compute, device=device)
        if self.alias:
            self._shard, self.full, self.state = self.held_of(flat), flat, State.FULL
        else:
            self._shard = flat if self.held_numel == flat.numel() else self.held_of(flat).clone()
        for entry in self.entries:
            if entry.param.grad is not None:
                raise ShardError(f"{entry.name} has a gradient already: shard the model between steps, after zero_grad()")
            data = entry.view_of(flat) if self.alias else self._nan.expand(entry.slot.shape)
            if entry.param.device.type == data.device.type:
                entry.param.data = data
            else:
                _replace_storage(entry.param, data)
            entry.param._zeroshard = weakref.ref(entry)  # type: ignore[attr-defined]
            if not self.alias:
                entry.param.__class__ = ShardedParameter
        if not (self.alias or self.releases):
            self.full = torch.empty(self.layout.numel, dtype=self.compute, device=device)
            self.full_storage = self.full.untyped_storage()._cdata
            self._show_data()
            self.stale = True
            self.ledger.hold("parameters", self.full)
        self.ledger.hold("parameters", self.shard)

    def _show_data(self) -> None:
        assert self.full is not None
        with torch._C.DisableTorchFunctionSubclass():
            for entry in self.entries:
                entry.param.data = entry.view_of(self.full)

    # ---- gather and release

    def _move(self, to: State) -> None:
        if (self.state, to) not in _MOVES:
            raise ShardError(f"{self.name} is {self.state.name} and cannot become {to.name}")
        self.state = to

    @property
    def needs_gather(self) -> bool:
        return self.state is State.SHARDED or (self.stale and self.state is State.FULL)

    def gather(self) -> None:
        """Starts to gather. Until `finish_gather` the Pending writes into full."""
        self._move(State.GATHERING)
        if self.full is None:
            self.full = torch.empty(self.layout.numel, dtype=self.compute, device=self.shard.device)
            self.full_storage = self.full.untyped_storage()._cdata
            self.ledger.hold("gathered", self.full)
        own = self.held_of(self.full)
        if own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)
        self.stale = False
        self._gathering = self.holders.gather(self.gather_label, self.full)

    @property
    def gathering(self) -> bool:
        return self._gathering is not None

    def finish_gather(self) -> None:
        assert self._gathering is not None
        pending, self._gathering = self._gathering, None
        try:
            pending.wait()
        except BaseException:  # what has arrived is not whole: the next use gathers anew
            self.state, self.stale = (State.SHARDED if self.releases else State.FULL), True
            raise
        self._move(State.FULL)

    def publish(self) -> None:
        """Starts to send the stepped shard to everybody, where full stays; elsewhere the next use gathers anyway."""
        if self.releases:
            self.stale = True
        elif self.plain:
            torch.autograd.graph.increment_version([entry.param for entry in self.entries])
        else:
            self.stale = True
            self.gather()

    def release(self) -> None:
        """Forgets full, if this unit releases it and nobody uses it."""
        if self.releases and self.users == 0 and self.state is not State.SHARDED:
            if self.state is State.GATHERING:
                self.finish_gather()
            self._move(State.SHARDED)
            self.full, self.full_storage = None, 0

    def expose(self) -> None:
        """The first user comes: parameters are plain and whole."""
        if self.users == 0 and not self.alias:
            for entry in self.entries:
                entry.check_param()
            for entry in self.entries:
                entry.param.__class__ = nn.Parameter
            if self.releases:
                self._show_data()
            self._versions = [entry.param._version for entry in self.entries]
        self.users += 1

    def conceal(self) -> None:
        """The last user goes: parameters are sharded again. Does not release."""
        lost = self._keep_writes() if self.users == 1 and not self.alias else ""
        self.users -= 1
        if self.users == 0 and not self.alias:
            with torch._C.DisableTorchFunctionSubclass():
                for entry in self.entries:
                    if self.releases:
                        entry.param.data = self._nan.expand(entry.slot.shape)
                    entry.param.__class__ = ShardedParameter
        if lost:
            raise ShardError(f"{lost}. Write outside of forward, or inside `with zeroshard.gathered(model, write=True):`")

    def _keep_writes(self) -> str:
        """What a module wrote into its weights while they were whole goes to the masters; says what cannot.

        Writes count versions up, but not those through `.data`: these are looked for after the first uses alone.
        """
        assert self.full is not None
        own, moved = self.held_of(self.full), self.reclaim()
        written = [e for e, seen in zip(self.entries, self._versions, strict=True) if e in moved or e.param._version != seen]
        if self.compute != self.dtype:
            names = ", ".join(entry.name for entry in written)
            return f"forward wrote into {names}, a copy in {self.compute} of masters in {self.dtype}" if written else ""
        for entry in written:
            entry.piece_of(self._shard).copy_(entry.piece_of(own))
        if self.stale or not self._looks:  # stale: the masters have been stepped meanwhile
            return ""
        self._looks -= 1
        behind = [e.name for e in self.entries if not _same_bits(e.piece_of(own), e.piece_of(self._shard))]
        return f"forward wrote through .data into {', '.join(behind)}, which is not noticed each time" if behind else ""

    def reclaim(self) -> list[Entry]:
        """Where the user has given a whole parameter other storage (`p.data = ...`), its values move into the flat buffer.

        Raises:
            ShardError: it has another dtype or device, or had one since: that cuts it from the hooks on its gradient.
        """
        moved: list[Entry] = []
        if self.full is not None and (self.alias or self.users > 0):
            begin, size = self.full.data_ptr(), self.full.element_size()
            for entry in self.entries:
                if entry.slot.numel and entry.param.data_ptr() != begin + entry.slot.offset * size:
                    entry.check_param()
                    entry.check_conversion(self.full)
                    home = entry.view_of(self.full)
                    home.copy_(entry.param.detach())
                    entry.param.data = home
                    moved.append(entry)
        return moved

    @contextlib.contextmanager
    def whole_masters(self, label: str = "whole values of") -> Iterator[torch.Tensor]:
        """A [numel] buffer of master values, for reading. Collective where shards are cut."""
        if self.held_numel == self.layout.numel:
            yield self.shard
        elif self.alias and not self.stale:
            self.reclaim()
            assert self.full is not None
            yield self.full
        else:
            whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self.shard.device)
            self.ledger.hold("gathered", whole)
            self.held_of(whole).copy_(self.shard)
            yield self.holders.gather(f"{label} {self.name}", whole).wait()

    @contextlib.contextmanager
    def masters_exposed(self) -> Iterator[None]:
        """Parameters are plain, whole and of the master dtype, in a buffer that is unit.full for the time being."""
        if self.alias and not self.stale:
            yield
            return
        before = self.full, self.full_storage, self.state
        with self.whole_masters("edits of") as masters:
            self.full, self.full_storage, self.state = masters.clone(), 0, State.FULL
            self.ledger.hold("gathered", self.full)
            self.users += 1
            for entry in self.entries:
                entry.param.__class__ = nn.Parameter
            self._show_data()
            try:
                yield
            finally:
                self.full, self.full_storage, self.state = before
                self.users -= 1
                self.stale = True
                with torch._C.DisableTorchFunctionSubclass():
                    for entry in self.entries:
                        entry.param.data = self._nan.expand(entry.slot.shape) if self.full is None else entry.view_of(self.full)
                        entry.param.__class__ = ShardedParameter

    def on_the_spot(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls `func` with this unit's parameters whole: a weight read outside its module's forward."""
        runtime = self.runtime()
        if runtime is None:
            raise ShardError(f"the model that {self.name} belonged to is gone")
        return runtime.on_the_spot(self, func, args, kwargs)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _replace_storage(param: nn.Parameter, data: torch.Tensor) -> None:
    """A meta parameter cannot be given data of another device: the whole tensor behind the same object is exchanged."""
    other = nn.Parameter(data, requires_grad=param.requires_grad)
    other.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, other)
