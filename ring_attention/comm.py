"""All communication of this package: who takes part, whether they agree, and moving tensors between them.

Every collective call of the package starts with `agree`: a few integers from everybody to everybody. If they differ,
all ranks see it, tell each other in words what they were asked for, and raise. Only then does data move, in shapes that
both ends know, so nothing waits for a message of another size or one that never comes.

On gloo all of it is direct send/receive: a rank that dies is noticed by whoever waits for it, and whoever gives up
breaks its connections, so that nobody is left waiting for it either.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attention.errors import DivergenceError, PeerError, UsageError

Group = dist.ProcessGroup | DeviceMesh

AGREE, KEYS, GRADIENTS, HEADS, SHARDS, HANG_UP = range(1, 7)  # tags: messages of different kinds never meet
NAMES = {AGREE: "agreement", KEYS: "keys", GRADIENTS: "gradients", HEADS: "heads", SHARDS: "shards"}

EVENTS = logging.getLogger("ring_attention.events")  # what messages and steps do, for those who trace


# ------------------------------------------------------------------------------------------------ who takes part
def group_names(group: Group | None) -> str:
    """The process groups behind a handle as text: one name, or two, ring and heads, for a 2-D mesh."""
    if group is None:
        raise UsageError("group is None: pass the process group or device mesh that the sequence is split over")
    if not (isinstance(group, dist.ProcessGroup) or (isinstance(group, DeviceMesh) and group.get_coordinate() is not None)):
        raise UsageError(f"group={group!r}: expected a ProcessGroup or a DeviceMesh that this rank is part of")
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise UsageError(f"the device mesh has {group.ndim} dims; pass the one (or two, for hybrid) to split over")
        return "|".join([group.get_group(dim).group_name for dim in range(group.ndim)])
    return group.group_name


class Team:
    """One process group as this package uses it. Ranks are those inside the group."""

    def __init__(self, name: str) -> None:
        self.group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        self.rank, self.size = self.group.rank(), self.group.size()
        config = str(dist.get_backend_config(self.group))
        self.speaks_cpu = "cpu:" in config
        self.on_gloo = "cpu:gloo" in config

    def named(self, rank: int) -> str:
        return f"rank {dist.get_process_group_ranks(self.group)[rank]}"

    def start(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int) -> Pending:
        """Starts sending to and receiving into contiguous tensors; the result owns them until it is waited for."""
        pending = self._start(sends, receives, tag)
        if EVENTS.handlers:  # nobody listens: one attribute is read
            sources = ", ".join(self.named(peer) for peer in dict.fromkeys(peer for _, peer in receives))
            pending.label, pending.nbytes = f"{NAMES[tag]} from {sources or 'nobody'}", sum(x.nbytes for x, _ in receives)
            pending.tell("posted")
        return pending

    def _start(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int) -> Pending:
        held = [x for x, _ in [*sends, *receives]]
        if not held:
            return Pending(self, [], held)
        if held[0].device.type == "cpu":
            works: list[tuple[dist.Work | None, int | None]] = []
            for moves, call, side in ((receives, dist.irecv, "group_src"), (sends, dist.isend, "group_dst")):
                for x, peer in moves:
                    with self.watching(peer):
                        works.append((call(x, group=self.group, tag=tag, **{side: peer}), peer))
            return Pending(self, works, held)
        ops = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for x, peer in receives]
        ops += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for x, peer in sends]
        return Pending(self, [(work, None) for work in dist.batch_isend_irecv(ops)], held)

    def spread(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, a small CPU tensor of the same shape everywhere."""
        if self.size == 1:
            return [x]
        if not self.speaks_cpu:
            device = torch.device("cuda", torch.cuda.current_device())
            parts = [torch.empty_like(x, device=device) for _ in range(self.size)]
            dist.all_gather(parts, x.to(device), group=self.group)
            return [part.cpu() for part in parts]
        parts = [torch.empty_like(x) if peer != self.rank else x for peer in range(self.size)]
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        self.start([(x, peer) for peer in others], [(parts[peer], peer) for peer in others], AGREE).wait()
        return parts

    @contextlib.contextmanager
    def watching(self, peer: int | None) -> Iterator[None]:
        """Turns a failure of the transport into a `PeerError` on every rank that waits for this one too."""
        try:
            yield
        except RuntimeError as error:
            self.hang_up()
            who = "a rank" if peer is None else self.named(peer)
            raise PeerError(
                f"{who} died, gave up because another rank did, or did not answer within the group's timeout: {error}"
            ) from error

    def hang_up(self) -> None:
        """Breaks the connections to all others, so that whoever waits for this rank raises as well."""
        if not self.on_gloo:
            self.group.abort()
            return
        for peer in range(self.size):
            if peer != self.rank:
                # a receive that runs into its time limit closes the connection
                with contextlib.suppress(RuntimeError):
                    never = dist.irecv(torch.empty(1), group=self.group, group_src=peer, tag=HANG_UP)
                    assert never is not None
                    never.wait(timedelta(milliseconds=1))


def place(teams: Sequence[Team]) -> int:
    """This rank's number, row-major over the teams."""
    number = 0
    for team in teams:
        number = number * team.size + team.rank
    return number


def num_ranks() -> int:
    """How many ranks there are in all."""
    return dist.get_world_size()


def total(teams: Sequence[Team]) -> int:
    return math.prod(team.size for team in teams)


class Pending:
    """Messages in flight. Owns their tensors until `wait`, which may be called once."""

    def __init__(self, team: Team, works: list[tuple[dist.Work | None, int | None]], held: list[Tensor]) -> None:
        self._team, self._works, self._held = team, works, held
        self._waited = False
        self.label, self.nbytes = "", 0  # set while somebody traces: what arrives, in bytes

    def wait(self) -> None:
        if self._waited:
            raise AssertionError("these messages have been waited for already")
        self._waited = True
        if self.label:
            self.tell("waiting")
        for work, peer in self._works:
            if work is not None:
                with self._team.watching(peer):
                    work.wait()
        self._held.clear()
        if self.label:
            self.tell("finished")

    def tell(self, what: str) -> None:
        """(what, label, which one, bytes to be received), as `zeroshard.trace` reads it."""
        EVENTS.debug("%s %s [%d] %d bytes", what, self.label, id(self), self.nbytes)


# ------------------------------------------------------------------------------------------------ agreement
@dataclass
class Call:
    """What one rank was asked for.

    described: everything that must be the same on all ranks, by the name the user knows.
    lengths: this rank's own numbers; told to all, compared by nobody here.
    problem: why this rank cannot go on, if so.
    """

    described: dict[str, str]
    lengths: tuple[int, ...] = ()
    problem: str | None = None


@dataclass
class Answer:
    """What all ranks told: `lengths` by rank (row-major over the teams), and a number that names this very call."""

    lengths: list[tuple[int, ...]] = field(default_factory=list)
    number: int = 0


NUM_LENGTHS = 3


def agree(teams: Sequence[Team], call: Call) -> Answer:
    """Raises on all ranks, or on none.

    Raises:
        UsageError: some rank has a `problem`.
        DivergenceError: `described` is not the same on all ranks; names the ranks and what differs.
        PeerError: a rank died, or does not come within the group's timeout.
    """
    text = json.dumps(call.described)
    checksum = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
    lengths = [*call.lengths, *[0] * (NUM_LENGTHS - len(call.lengths))]
    told = everyones(teams, torch.tensor([checksum, call.problem is not None, secrets.randbits(62), dist.get_rank(), *lengths]))
    rows: list[list[int]] = told.tolist()
    if any(row[1] or row[0] != rows[0][0] for row in rows):
        _complain(teams, [row[3] for row in rows], json.dumps([call.described, call.problem]))
    return Answer([tuple(row[4:]) for row in rows], rows[0][2])


def everyones(teams: Sequence[Team], x: Tensor) -> Tensor:
    """Every rank's `x`, a small CPU tensor, row-major over the teams: the last one first, then what it gathered over
    the one before."""
    told = x[None]
    for team in reversed(teams):
        told = torch.cat(team.spread(told))
    return told


def _complain(teams: Sequence[Team], ranks: list[int], text: str) -> None:
    """Everybody tells everybody in words, and raises the same."""
    coded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = everyones(teams, torch.tensor([len(coded)]))[:, 0].tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(coded)] = coded
    texts = [bytes(row[:size].tolist()) for row, size in zip(everyones(teams, padded), sizes, strict=True)]
    told = {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}
    problems = {rank: problem for rank, (_, problem) in told.items() if problem is not None}
    if problems:
        if len(problems) == len(ranks) and len(set(problems.values())) == 1:
            raise UsageError(next(iter(problems.values())))
        raise UsageError("; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items()))
    raise DivergenceError(_difference({rank: described for rank, (described, _) in told.items()}))


def _difference(told: dict[int, dict[str, str]]) -> str:
    """Which ranks differ in what. Where the calls are not the same ones, that alone is worth saying."""
    names = list(dict.fromkeys(name for described in told.values() for name in described))
    differ = [name for name in names if len({described.get(name) for described in told.values()}) > 1]
    if "call" in differ:
        differ = ["call"]
    lines = []
    for name in differ:
        ranks: dict[str, list[int]] = {}
        for rank, described in told.items():
            ranks.setdefault(described.get(name, "nothing"), []).append(rank)
        lines.append(f"{name}: " + ", ".join(f"{value} on {_ranks(held)}" for value, held in ranks.items()))
    calls = sorted({described.get("call", "?") for described in told.values()})
    return (
        f"ranks disagree in {' and '.join(calls)}, or call in a different order. What differs: {'; '.join(lines)}. "
        "All ranks of the group have to make the same calls in the same order"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------------------------------------ moving data
class Waited(Protocol):
    def wait(self) -> None: ...


class Carrier(Protocol):
    """What a ring asks of those who carry its messages; a `Team` does it between processes."""

    def start(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int) -> Waited: ...


class Ring:
    """Transfers in the order of a ring, any number of them in flight; each is received in the order it was posted.

    A rank that is `distance` places on in the ring reads from here while this rank reads from as far back.
    """

    def __init__(self, team: Carrier | None, tag: int) -> None:
        self._team, self._tag = team, tag
        self._flying: deque[tuple[Waited, list[Tensor]]] = deque()

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Starts one transfer. The ring owns the tensors until it is waited for."""
        if self._team is None:
            raise AssertionError("a ring of one has nobody to send to")
        self._flying.append((self._team.start(sends, receives, self._tag), [x for x, _ in receives]))

    def wait(self) -> list[Tensor]:
        """Finishes the oldest transfer and hands over what arrived."""
        pending, received = self._flying.popleft()
        pending.wait()
        return received


def all_to_all(team: Team, sends: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], tag: int = HEADS) -> list[Tensor]:
    """`sends[p]` goes to rank p; what comes from rank p has shape `shapes[p]`. The own part is not copied."""
    received = [sends[p] if p == team.rank else sends[p].new_empty(shapes[p]) for p in range(team.size)]
    others = [(team.rank + distance) % team.size for distance in range(1, team.size)]
    outgoing = [(sends[p].contiguous(), p) for p in others if sends[p].numel()]
    team.start(outgoing, [(received[p], p) for p in others if received[p].numel()], tag).wait()
    return received


def sum_over(teams: Sequence[Team], x: Tensor) -> Tensor:
    """The sum of all ranks' `x`, in rank order, so that every rank has the same bits."""
    for team in reversed(teams):
        if team.size > 1:
            x = torch.stack(all_to_all(team, [x] * team.size, [tuple(x.shape)] * team.size, SHARDS)).sum(0)
    return x


def gather(teams: Sequence[Team], x: Tensor, lengths: Sequence[int]) -> Tensor:
    """All ranks' parts joined along dim 0, in rank order; `lengths` by rank, row-major over the teams."""
    x, held, first = x.contiguous(), 1, place(teams)
    for team in reversed(teams):
        first -= team.rank * held  # where this team's parts begin
        counts = [sum(lengths[first + rank * held : first + (rank + 1) * held]) for rank in range(team.size)]
        x = torch.cat(all_to_all(team, [x] * team.size, [(count, *x.shape[1:]) for count in counts], SHARDS))
        held *= team.size
    return x


def broadcast(teams: Sequence[Team], x: Tensor, source: int) -> Tensor:
    """The `x` of one rank (row-major over the teams) on all; every rank brings one of the same shape."""
    for team in reversed(teams):
        source, at = divmod(source, team.size)
        sends = [x if team.rank == at else x[:0]] * team.size
        x = all_to_all(team, sends, [tuple(x.shape) if peer == at else (0,) for peer in range(team.size)], SHARDS)[at]
    return x


def sum_parts(teams: Sequence[Team], x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The reverse of `gather`: the sum over all ranks of this rank's part of `x`, in rank order."""
    held, first = total(teams), 0
    for team in teams:
        held //= team.size
        counts = [sum(lengths[first + rank * held : first + (rank + 1) * held]) for rank in range(team.size)]
        shapes = [(counts[team.rank], *x.shape[1:])] * team.size
        x = torch.stack(all_to_all(team, [part.contiguous() for part in x.split(counts)], shapes, SHARDS)).sum(0)
        first += team.rank * held
    return x
