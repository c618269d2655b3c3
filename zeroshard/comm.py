"""Moves flat tensors between ranks: the only file that calls torch.distributed.

    Channel      one process group as the engine uses it
    transport    how a channel moves bytes: direct messages (gloo) or the backend's own collectives (NCCL, XCCL)
    Pending      a collective in flight; it owns its buffers until `wait()`

gloo's ring collectives copy more than direct messages do, and they match by order alone. Messages here carry a tag made
from the label, so two ranks that ask for different things never receive each other's bytes: they stall, and the
guard says why.

Shapes: [shard_numel] one rank's share, [numel] = [size * shard_numel] a whole flat buffer.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .config import ShardError, launched_ranks

ProcessGroup = dist.ProcessGroup


class Watch(Protocol):
    """What a channel tells the guard about its waits."""

    def posted(self, pending: Pending) -> None: ...

    def waiting(self, pending: Pending) -> None: ...

    def finished(self, pending: Pending) -> None: ...

    def failed(self, label: str, peer: int, error: Exception) -> Exception: ...


def tag_of(label: str) -> int:
    return zlib.crc32(label.encode()) & 0x7FFFFFFF


class Pending:
    """A collective in flight. Whoever started it must `wait()` exactly once; until then it owns every buffer.

    receives: (peer, work, nbytes) still expected, by global rank. `finish` runs after the last one and gives the result.
    """

    def __init__(
        self,
        label: str,
        channel: Channel,
        receives: Sequence[tuple[int, Any, int]],
        sends: Sequence[tuple[int, Any]],
        finish: Callable[[], Any],
    ):
        self.label, self.channel = label, channel
        self.receives, self.sends = list(receives), list(sends)
        self._finish: Callable[[], Any] | None = finish
        channel.watch.posted(self)

    def wait(self) -> Any:
        if self._finish is None:
            raise ShardError(f"{self.label}: waited for twice")
        watch = self.channel.watch
        watch.waiting(self)
        try:
            while self.receives:
                peer, work, _ = self.receives[0]
                try:
                    work.wait()
                except RuntimeError as error:
                    raise watch.failed(self.label, peer, error) from error
                self.receives.pop(0)
        finally:
            finish, self._finish = self._finish, None
            watch.finished(self)
        for peer, work in self.sends:
            try:
                work.wait()
            except RuntimeError as error:
                raise watch.failed(self.label, peer, error) from error
        self.sends.clear()
        return finish()


class Messages:
    """Direct, tagged messages between every pair of ranks: gloo."""

    def __init__(self, channel: Channel):
        self.channel = channel

    def exchange(
        self, label: str, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], finish: Callable[[], Any]
    ) -> Pending:
        """`sends` and `receives` map a rank of the channel to a contiguous tensor."""
        ranks, group, tag = self.channel.ranks, self.channel.group, tag_of(label)
        got = [(ranks[p], self._post(label, p, group.recv, b, tag), b.nbytes) for p, b in receives.items() if b.numel()]
        sent = [(ranks[p], self._post(label, p, group.send, b, tag)) for p, b in sends.items() if b.numel()]
        return Pending(label, self.channel, got, sent, finish)

    def _post(self, label: str, peer: int, call: Any, buffer: torch.Tensor, tag: int) -> Any:
        try:
            return call([buffer], peer, tag)
        except RuntimeError as error:  # the connection is known to be gone
            raise self.channel.watch.failed(label, self.channel.ranks[peer], error) from error

    def gather(self, label: str, full: torch.Tensor) -> Pending:
        channel = self.channel
        parts = full.chunk(channel.size)
        own = parts[channel.rank]
        return self.exchange(label, dict.fromkeys(channel.peers, own), {p: parts[p] for p in channel.peers}, lambda: full)

    def reduce_scatter(self, label: str, flat: torch.Tensor, dtype: torch.dtype) -> Pending:
        channel = self.channel
        parts = flat.chunk(channel.size)
        received = {peer: torch.empty_like(parts[channel.rank]) for peer in channel.peers}
        summands = [parts[rank] if rank == channel.rank else received[rank] for rank in range(channel.size)]
        return self.exchange(
            label,
            {p: parts[p] for p in channel.peers},
            received,
            lambda: _sum_in_rank_order(summands, dtype, channel.rank),
        )

    def poison(self, peer: int, tag: int, nbytes: int) -> Any:
        """Wakes a rank that waits for a message that never comes; the guard has told it why. Keep the result alive."""
        filler = torch.zeros(nbytes, dtype=torch.uint8)
        return filler, self.channel.group.send([filler], self.channel.ranks.index(peer), tag)


class Native:
    """The backend's own collectives, which run on its own stream beside the compute."""

    def __init__(self, channel: Channel):
        self.channel = channel

    def _pending(self, label: str, work: Any, finish: Callable[[], Any]) -> Pending:
        return Pending(label, self.channel, [(self.channel.ranks[self.channel.rank], work, 0)], [], finish)

    def exchange(
        self, label: str, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], finish: Callable[[], Any]
    ) -> Pending:
        channel = self.channel
        ops = [dist.P2POp(dist.irecv, b, channel.ranks[p], channel.group) for p, b in receives.items() if b.numel()]
        ops += [dist.P2POp(dist.isend, b, channel.ranks[p], channel.group) for p, b in sends.items() if b.numel()]
        works = dist.batch_isend_irecv(ops) if ops else []
        return Pending(label, channel, [(channel.ranks[channel.rank], work, 0) for work in works], [], finish)

    def gather(self, label: str, full: torch.Tensor) -> Pending:
        own = full.chunk(self.channel.size)[self.channel.rank]
        work = _all_gather(full, own, group=self.channel.group, async_op=True)
        return self._pending(label, work, lambda: full)

    def reduce_scatter(self, label: str, flat: torch.Tensor, dtype: torch.dtype) -> Pending:
        flat = flat.to(dtype)
        out = flat.new_empty(flat.numel() // self.channel.size)
        work = _reduce_scatter(out, flat, group=self.channel.group, async_op=True)
        return self._pending(label, work, lambda: out)


# torch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _sum_in_rank_order(parts: Sequence[torch.Tensor], dtype: torch.dtype, own: int) -> torch.Tensor:
    """((p0 + p1) + p2) + ..., the same bits whatever the unit split. Reuses a received part, never `parts[own]`."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    if parts[0].dtype != dtype:
        total = parts[0].to(dtype)
        rest = parts[1:]
    else:
        total = torch.add(parts[0], parts[1], out=parts[1] if own != 1 else parts[0])
        rest = parts[2:]
    for part in rest:
        total += part
    return total


class Alone:
    """A watch that watches nothing."""

    def posted(self, pending: Pending) -> None: ...

    def waiting(self, pending: Pending) -> None: ...

    def finished(self, pending: Pending) -> None: ...

    def failed(self, label: str, peer: int, error: Exception) -> Exception:
        return error


class Channel:
    """One process group: its ranks, and the collectives of flat tensors over it.

    group: the process group; `None` for this rank alone, where nothing moves. ranks: its global ranks, in order.
    rank, size: place in it. bytes_sent: by this rank. skipped_steps: how often a GradScaler found a gradient not finite.
    """

    def __init__(self, group: ProcessGroup | None, watch: Watch | None = None, device: torch.device | None = None):
        self.group: Any = group
        self.watch = watch or Alone()
        self.ranks = [own_rank()] if group is None else list(dist.get_process_group_ranks(group))
        self.rank = 0 if group is None else group.rank()
        self.size = len(self.ranks)
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self.mirror: Any = None  # inside join: what is to be told of operations on pieces
        self.bytes_sent, self.skipped_steps = 0, torch.zeros((), dtype=torch.int64)
        self.device = device or torch.device("cpu")
        self.native = self.device.type != "cpu"

    @property
    def transport(self) -> Messages | Native:
        return Native(self) if self.native else Messages(self)

    def gather(self, label: str, full: torch.Tensor) -> Pending:
        """Fills `full` [numel] with every rank's share; this rank's own must already lie in it. -> full"""
        self.bytes_sent += full.nbytes // self.size * len(self.peers)
        return self._pending_done(label, full) if self.size == 1 else self.transport.gather(label, full)

    def reduce_scatter(self, label: str, flat: torch.Tensor, dtype: torch.dtype) -> Pending:
        """-> this rank's share [shard_numel] of the sum over ranks of `flat` [numel], summed in `dtype` in rank order."""
        if self.size == 1:
            return self._pending_done(label, flat.to(dtype))
        self.bytes_sent += flat.nbytes // self.size * len(self.peers)
        return self.transport.reduce_scatter(label, flat, dtype)

    def all_reduce(self, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in rank order, the same bits on every rank. In place, blocking."""
        if self.size == 1 or not tensor.numel():
            return tensor
        flat = tensor.new_zeros(-(-tensor.numel() // self.size) * self.size)
        flat[: tensor.numel()] = tensor.flatten()
        part = self.reduce_scatter(f"{label} (sum)", flat, tensor.dtype).wait()
        flat.chunk(self.size)[self.rank].copy_(part)
        self.gather(f"{label} (share)", flat).wait()
        return tensor.copy_(flat[: tensor.numel()].view_as(tensor))

    def exchange_all(self, label: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor` (small, the same shape everywhere), in rank order. Blocking."""
        if self.size == 1:
            return [tensor]
        full = tensor.new_empty((self.size, *tensor.shape), device=self.device)
        full[self.rank] = tensor
        self.gather(label, full.view(-1)).wait()
        return list(full.to(tensor.device).unbind())

    def exchange_bytes(self, label: str, message: bytes) -> list[bytes]:
        """Every rank's message, of any length, in rank order. Blocking."""
        if self.size == 1:
            return [message]
        lengths = self.exchange_all(f"{label} (lengths)", torch.tensor([len(message)]))
        width = max(int(n) for n in lengths)
        padded = torch.frombuffer(bytearray(message.ljust(width, b"\0")), dtype=torch.uint8)
        texts = self.exchange_all(f"{label} (texts)", padded)
        return [bytes(text.numpy().tobytes()[: int(n)]) for text, n in zip(texts, lengths, strict=True)]

    def route(self, label: str, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> Pending:
        """Point to point inside the channel: both map a rank of the channel to a contiguous tensor."""
        self.bytes_sent += sum(tensor.nbytes for tensor in sends.values())
        return self.transport.exchange(label, sends, receives, lambda: None)

    def broadcast(self, label: str, tensor: torch.Tensor) -> None:
        """Rank 0's values become everybody's. `tensor` is contiguous. Blocking."""
        if self.size == 1 or not tensor.numel():
            return
        if self.rank == 0:
            self.route(label, dict.fromkeys(self.peers, tensor), {}).wait()
        else:
            self.route(label, {}, {0: tensor}).wait()

    def _pending_done(self, label: str, result: torch.Tensor) -> Pending:
        return Pending(label, self, [], [], lambda: result)


@dataclasses.dataclass(frozen=True)
class Topology:
    """The two directions of a mesh. Shards are cut over `shard` and repeated over `replicate`."""

    shard: Channel
    replicate: Channel

    @property
    def ranks(self) -> int:
        return self.shard.size * self.replicate.size

    @property
    def channels(self) -> tuple[Channel, Channel]:
        return self.shard, self.replicate

    def exchange_all(self, label: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's small tensor, replicas one after the other."""
        rows = self.replicate.exchange_all(f"{label} over replicas", torch.stack(self.shard.exchange_all(label, tensor)))
        return [tensor for row in rows for tensor in row.unbind()]

    def exchange_bytes(self, label: str, message: bytes) -> list[tuple[int, bytes]]:
        """(global rank, message) of every rank."""
        row = dict(zip(self.shard.ranks, (m.hex() for m in self.shard.exchange_bytes(label, message)), strict=True))
        rows = self.replicate.exchange_bytes(f"{label} over replicas", json.dumps(row).encode())
        return [(int(rank), bytes.fromhex(text)) for row_ in rows for rank, text in json.loads(row_).items()]

    def broadcast(self, label: str, tensor: torch.Tensor) -> None:
        self.replicate.broadcast(f"{label} over replicas", tensor)
        self.shard.broadcast(label, tensor)


def topology(mesh: Any, watch: Watch | None = None, device: torch.device | None = None) -> Topology:
    """`None` the world · a process group · a 1-D mesh (shard) · a 2-D mesh (replicate, shard). `device`: of the tensors."""

    def along(shard: ProcessGroup | None, replicate: ProcessGroup | None = None) -> Topology:
        return Topology(Channel(shard, watch, device), Channel(replicate, watch, device))

    if mesh is None:
        if not dist.is_initialized() and launched_ranks() > 1:
            raise ShardError(
                f"{launched_ranks()} ranks were launched, but there is no process group: each would train alone. Call "
                "torch.distributed.init_process_group() before zeroshard.shard"
            )
        return along(dist.group.WORLD if dist.is_initialized() else None)
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is not None:
        if mesh.ndim == 1:
            return along(mesh.get_group())
        if mesh.ndim == 2:
            return along(mesh.get_group(1), mesh.get_group(0))
        raise ShardError(
            f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}: expected one (shard) or two (replicate, shard); "
            "flatten others into one, e.g. mesh['data', 'context']._flatten()"
        )
    if isinstance(mesh, ProcessGroup):
        return along(mesh)
    raise ShardError(f"mesh={mesh!r}: expected None, or a ProcessGroup or DeviceMesh that this rank is part of")


def whole_world_store() -> Any:
    """The store all ranks share; `None` without a process group."""
    return dist.group.WORLD.get_group_store() if dist.is_initialized() else None  # type: ignore[union-attr]


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


