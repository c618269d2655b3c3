"""What one rank fails at, all ranks raise: the ranks' messages, or one error with what went wrong where."""

from __future__ import annotations

from typing import Any

from ..comm import Topology
from ..config import DivergenceError, ShardError


def together(topology: Topology, label: str, message: bytes = b"", error: Exception | None = None) -> list[bytes]:
    """Every rank's message, replicas one after the other. Raises the same ShardError on all if any has an error."""
    own = b"m" + message if error is None else b"e" + _text(error).encode()
    told = topology.exchange_bytes(label, own)
    texts = {rank: text[1:].decode() for rank, text in told if text[:1] == b"e"}
    if not texts:
        return [text[1:] for _, text in told]
    distinct = set(texts.values())
    if len(distinct) == 1 and (len(texts) == len(told) or len(told) == 1):
        raise ShardError(next(iter(distinct))) from error
    raise ShardError("; ".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))) from error


def same(topology: Topology, call: str, values: list[dict[str, Any]]) -> None:
    """Raises DivergenceError, naming ranks, unless every rank's `values` are rank 0's."""
    for place, theirs in enumerate(values):
        for key, value in values[0].items():
            if theirs[key] != value:
                first, second = _name(topology, 0), _name(topology, place)
                raise DivergenceError(f"{call} was called with {key} {value!r} on {first} and {theirs[key]!r} on {second}")


def _name(topology: Topology, place: int) -> str:
    if topology.replicate.size == 1:
        return f"rank {topology.shard.ranks[place]}"
    return f"rank {place} of the mesh"


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ShardError) else f"{type(error).__name__}: {error}"


def place_of(topology: Topology) -> int:
    """This rank's place among all of the mesh, replicas one after the other; rank 0 of the mesh is at 0."""
    return topology.replicate.rank * topology.shard.size + topology.shard.rank
