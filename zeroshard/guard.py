"""Do all ranks ask for the same thing? If not, every rank raises the same error, naming ranks and modules.

Messages are tagged with what they are for, so ranks that disagree stall; nothing wrong is ever delivered. A rank that has
stalled for a second says in the group's store what it waits for, from whom, and what it has posted itself. It is
deadlocked when somebody it waits for is stalled too, has not posted what it waits for, and is deadlocked itself: the
greatest such set, seen twice, is a divergence. A rank that merely computes for long is in no such set.
While all goes well this costs two clock readings a wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from . import comm
from .config import DivergenceError, StallError

States = dict[int, dict[str, Any]]
"""What stalled ranks have published, by global rank: label, since, channel, waits, posted."""

STALL_S = 1.0
POLL_S = 0.3
LINGER_S = 120.0

EVENTS = logging.getLogger("zeroshard.events")  # what collectives do, for `trace`; nobody listens: one attribute is read


class Guard:
    """Watches the waits of one runtime. One daemon thread; it holds the guard weakly and ends with it."""

    def __init__(self) -> None:
        self.rank = comm.own_rank()
        self.store: Any = None
        self.prefix = ""
        self.members: list[int] = []
        self.verdict: str | None = None
        self.place: Callable[[], str] = str  # where this rank is in its loop
        self._posted: Counter[str] = Counter()
        self._current: tuple[comm.Pending, float] | None = None
        self._published = ""
        self._last_seen: dict[int, str] = {}
        self._channels: list[weakref.ref[comm.Channel]] = []  # a channel owns its guard
        self._kept: list[comm.Channel | None] = []
        self._released: dict[tuple[int, str], Any] = {}
        self._lingers = False

    def start(self, token: str, members: list[int], channels: tuple[comm.Channel, ...]) -> None:
        """`token` is the same on all ranks of the runtime and on no other runtime; `members` are its global ranks."""
        self.store, self.prefix, self.members = comm.whole_world_store(), f"zeroshard/{token}", members
        self._channels = [weakref.ref(channel) for channel in channels]
        if self.store is not None and len(members) > 1:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="zeroshard-guard", daemon=True).start()

    # ---- told by Pending

    def posted(self, pending: comm.Pending) -> None:
        self._posted[pending.label] += 1
        if EVENTS.handlers:
            _tell("posted", pending)

    def waiting(self, pending: comm.Pending) -> None:
        self._raise_verdict()
        self._current = (pending, time.monotonic())
        if EVENTS.handlers:
            _tell("waiting", pending)

    def finished(self, pending: comm.Pending) -> None:
        since, self._current = self._current[1] if self._current else 0.0, None
        if EVENTS.handlers:
            _tell("finished", pending)
        self._posted[pending.label] -= 1
        if not self._posted[pending.label]:
            del self._posted[pending.label]
        if since and time.monotonic() - since >= STALL_S:
            self.verdict = self.verdict or self._read("verdict")  # what woke us may have been another rank's guard
        self._raise_verdict()

    def failed(self, label: str, peer: int, error: Exception) -> Exception:
        """The transport gave up on `peer`: it is gone, too slow, or has already raised the verdict of a divergence.

        A rank that gave up is soon gone itself: what the first one said counts for all who wait for it.
        """
        self.verdict = self.verdict or self._read("verdict")
        self._raise_verdict()
        first = self._read(f"gave up/{peer}")
        if first:
            return StallError(first)
        seen = self._last_seen.get(peer)
        waited = f"; it was waiting in {seen!r}" if seen else ""
        who = f"rank {peer}" if peer != self.rank else f"one of ranks {self.members}"
        text = (
            f"{who} did not arrive at {label!r}{self.place()} (rank {self.rank} waited for it there){waited}. It is dead, "
            f"stuck, or slower than the group's timeout allows: {_first_line(error)}"
        )
        with contextlib.suppress(Exception):  # the store may be gone with its host
            if not self._read(f"gave up/{self.rank}"):  # what fails later fails for the same reason
                self.store.set(f"{self.prefix}/gave up/{self.rank}", text)
        return StallError(text)

    def _raise_verdict(self) -> None:
        """The others may still wait for this rank: somebody goes on answering them, though the model may be gone."""
        if self.verdict is not None:
            if not self._lingers:
                self._lingers, self._kept = True, [channel() for channel in self._channels]
                threading.Thread(target=_linger, args=(self,), name="zeroshard-guard", daemon=True).start()
            raise DivergenceError(self.verdict)

    # ---- the thread

    def _read(self, name: str) -> str | None:
        key = f"{self.prefix}/{name}"
        try:
            return self.store.get(key).decode() or None if self.store is not None and self.store.check([key]) else None
        except Exception:  # the store's host is gone: the transport's own error says more
            return None

    def look(self, seen: States) -> States:
        """One poll. `seen` is the deadlocked set of the last poll; returns this poll's."""
        current = self._current
        if current is not None and time.monotonic() - current[1] >= STALL_S:
            self._publish(json.dumps(self._state(*current)))
        elif self._published:
            self._publish("")
        if not (self._published or self.verdict):
            return {}
        states: States = {rank: json.loads(t) for rank in self.members if (t := self._read(str(rank)))}
        self._last_seen.update({rank: state["label"] for rank, state in states.items()})
        stuck = deadlocked(states)
        self.verdict = self.verdict or self._read("verdict")
        if self.verdict is None and stuck and stuck == seen and self.rank == min(stuck):
            self.verdict = describe(states)
            self.store.set(f"{self.prefix}/verdict", self.verdict)
        if self.verdict is not None:
            self._release(states)
        return stuck

    def _state(self, pending: comm.Pending, since: float) -> dict[str, Any]:
        return {
            "label": pending.label,
            "since": since,
            "channel": self._channels.index(weakref.ref(pending.channel)),
            "waits": [[peer, nbytes] for peer, _, nbytes in list(pending.receives)],
            "posted": sorted(self._posted),
        }

    def _publish(self, text: str) -> None:
        if text != self._published:
            self.store.set(f"{self.prefix}/{self.rank}", text)
            self._published = text

    def _release(self, states: States) -> None:
        """Every stalled rank gets the bytes it waits for from here: it wakes, and reads the verdict instead of them.

        What was sent is kept: the transport reads it whenever the other side is ready.
        """
        for rank, state in states.items():
            label, channel = state["label"], self._channels[state["channel"]]()
            if channel is None:
                continue
            due = [nbytes for peer, nbytes in state["waits"] if peer == self.rank]
            transport = channel.transport
            missing = bool(due) and label not in self._posted and (rank, label) not in self._released
            if missing and isinstance(transport, comm.Messages) and rank in channel.ranks:
                self._released[rank, label] = transport.poison(rank, comm.tag_of(label), due[0])


def _tell(what: str, pending: comm.Pending) -> None:
    """(what, label, which one, bytes still to be received); nothing of a channel on which nothing moves."""
    if pending.channel.size > 1:
        nbytes = sum(nbytes for _, _, nbytes in pending.receives)
        EVENTS.debug("%s %s [%d] %d bytes", what, pending.label, id(pending), nbytes)


def deadlocked(states: States) -> States:
    """The greatest set of stalled ranks of which each waits for a member that has not posted what it waits for."""
    stuck = dict(states)
    while True:
        free = [
            rank
            for rank, state in stuck.items()
            if not any(peer in stuck and state["label"] not in stuck[peer]["posted"] for peer, _ in state["waits"])
        ]
        if not free:
            return stuck
        for rank in free:
            del stuck[rank]


def describe(states: States) -> str:
    places: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        places.setdefault(state["label"], []).append(rank)
    where = "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))} in {label!r}" for label, r in places.items())
    return (
        f"the ranks ask for different things: {where}. Every rank must make the same calls in the same order; wrap work "
        "that differs between ranks in zeroshard.join(model) or zeroshard.gathered(model)"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _watch(ref: weakref.ref[Guard]) -> None:
    seen: States = {}
    while (guard := ref()) is not None:
        try:
            seen = guard.look(seen)
        except Exception:  # the store went away with its host; the waits themselves will say so
            return
        guard = None
        time.sleep(POLL_S)


def _linger(guard: Guard) -> None:
    until = time.monotonic() + LINGER_S
    while time.monotonic() < until:
        try:
            guard.look({})
        except Exception:  # the store went away with its host
            return
        time.sleep(POLL_S)
