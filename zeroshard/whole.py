"""Owners: for optimizers that need whole tensors (Adafactor, LAMB, Muon, 8-bit states), each parameter has one rank.

Before the step every rank sends its pieces of gradient and value to the owners; an owner steps its whole parameters, and
sends the pieces of the new values back. State lives with the owner alone. Replicas of a shard group do the same side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from .entry import Entry
from .unit import Unit

if TYPE_CHECKING:
    from .runtime import Runtime


class Owners:
    """Who steps what."""

    def __init__(self, runtime: Runtime):
        self.runtime, self.channel = runtime, runtime.topology.shard
        self._owner: dict[int, int] = {}
        self._wholes: dict[int, tuple[Entry, nn.Parameter]] = {}
        self._stepped: dict[int, Entry] = {}
        entries = [entry for unit in runtime.units for entry in unit.entries]
        owners = balanced([entry.slot.numel for entry in entries], self.channel.size)
        self._owner.update({id(entry): owner for entry, owner in zip(entries, owners, strict=True)})

    def owner(self, entry: Entry) -> int:
        """Rank of the shard group; this one where the unit is not cut."""
        return self._owner[id(entry)] if entry.unit.holders.size > 1 else self.channel.rank

    def owns(self, entry: Entry) -> bool:
        return self.owner(entry) == self.channel.rank

    def collect(self, entries: list[Entry], grads: dict[int, torch.Tensor | None]) -> dict[int, nn.Parameter]:
        """The whole parameters this rank owns, with whole gradients, by entry. Collective."""
        with_grad = [entry for entry in entries if grads[id(entry)] is not None]
        self._stepped = {id(entry): entry for entry in with_grad}
        cut = [entry for entry in with_grad if entry.unit.holders.size > 1]
        whole_grads = self._to_owners("gradients", cut, [entry.grad_piece() for entry in cut])
        whole_values = self._to_owners("values", cut, [entry.piece_of(entry.unit.shard) for entry in cut])
        parts = {}
        for entry in entries:
            if not self.owns(entry):
                continue
            if id(entry) in whole_values:
                part = nn.Parameter(whole_values[id(entry)].view(entry.slot.shape))
                part.grad = whole_grads[id(entry)].view(entry.slot.shape)
            elif entry.unit.holders.size == 1:
                part = nn.Parameter(entry.view_of(entry.unit.shard))
                part.grad = None if grads[id(entry)] is None else entry.view_of(entry.unit.grad_buffer())
            else:
                part = nn.Parameter(torch.empty(0))
            parts[id(entry)] = part
            self._wholes[id(entry)] = (entry, part)
        return parts

    def _to_owners(self, what: str, entries: list[Entry], pieces: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Every piece goes to its parameter's owner; -> whole flat tensors of the entries owned here."""
        wholes = {
            id(e): torch.empty(e.slot.numel, dtype=e.unit.dtype, device=e.unit.shard.device) for e in entries if self.owns(e)
        }
        for whole in wholes.values():
            self.runtime.ledger.hold("reducing" if what == "gradients" else "gathered", whole)
        for dtype in sorted({entry.unit.dtype for entry in entries}, key=str):
            mine = [(entry, piece) for entry, piece in zip(entries, pieces, strict=True) if entry.unit.dtype == dtype]
            sends = {p: _packed([x for e, x in mine if self.owner(e) == p]) for p in self.channel.peers}
            owned = [entry for entry, _ in mine if self.owns(entry)]
            receives = {p: self._buffer(owned, p, dtype) for p in self.channel.peers}
            label = f"{what} of {dtype} to their owners"
            self.channel.route(label, _some(sends), _some(receives)).wait()
            for entry, piece in mine:
                if self.owns(entry):
                    wholes[id(entry)][entry.start : entry.start + entry.numel] = piece
            for peer, buffer in receives.items():
                self._unpack(owned, peer, buffer, wholes)
        return wholes

    def _buffer(self, entries: list[Entry], rank: int, dtype: torch.dtype) -> torch.Tensor:
        count = sum(entry.unit.layout.piece(entry.index, rank).numel for entry in entries)
        return torch.empty(count, dtype=dtype, device=entries[0].unit.shard.device if entries else None)

    @staticmethod
    def _unpack(entries: list[Entry], rank: int, buffer: torch.Tensor, wholes: dict[int, torch.Tensor]) -> None:
        begin = 0
        for entry in entries:
            piece = entry.unit.layout.piece(entry.index, rank)
            wholes[id(entry)][piece.start : piece.start + piece.numel] = buffer[begin : begin + piece.numel]
            begin += piece.numel

    def return_values(self) -> dict[int, Unit]:
        """Owners send the pieces of the stepped values home. -> the units that changed. Collective."""
        entries = [entry for entry in self._stepped.values() if entry.unit.holders.size > 1]
        for dtype in sorted({entry.unit.dtype for entry in entries}, key=str):
            mine = [entry for entry in entries if entry.unit.dtype == dtype]
            owned = [entry for entry in mine if self.owns(entry)]
            sends = {p: _packed([self._piece_for(entry, p) for entry in owned]) for p in self.channel.peers}
            receives = {}
            for peer in self.channel.peers:
                numel = sum(entry.numel for entry in mine if self.owner(entry) == peer)
                receives[peer] = torch.empty(numel, dtype=dtype, device=mine[0].unit.shard.device)
            self.channel.route(f"stepped values of {dtype} from their owners", _some(sends), _some(receives)).wait()
            begins = dict.fromkeys(self.channel.peers, 0)
            for entry in mine:
                home = entry.piece_of(entry.unit.shard)
                owner = self.owner(entry)
                if owner == self.channel.rank:
                    home.copy_(self._piece_for(entry, owner))
                else:
                    home.copy_(receives[owner][begins[owner] : begins[owner] + entry.numel])
                    begins[owner] += entry.numel
        self._wholes.clear()
        return {entry.unit.index: entry.unit for entry in self._stepped.values()}

    def _piece_for(self, entry: Entry, rank: int) -> torch.Tensor:
        piece = entry.unit.layout.piece(entry.index, rank)
        return self._wholes[id(entry)][1].detach().reshape(-1)[piece.start : piece.start + piece.numel]


def balanced(numels: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter: the largest first, to the rank that has least."""
    load, owners = [0] * ranks, [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owners[index] = min(range(ranks), key=load.__getitem__)
        load[owners[index]] += numels[index]
    return owners


def _packed(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if pieces else torch.empty(0)


def _some(buffers: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {rank: buffer for rank, buffer in buffers.items() if buffer.numel()}
