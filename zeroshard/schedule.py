"""Learns in which order things are used, and answers what comes next. A hint: another order costs time, never correctness.

One list of the last pass and one of the running pass for each phase ("train", "eval", "backward"). All ranks make the same
calls, so all ranks give the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence


class Schedule:
    def __init__(self) -> None:
        self._last: dict[str, list[int]] = {}
        self._running: dict[str, list[int]] = {}
        self._place: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """A new pass starts; what ran before is the prediction."""
        if self._running.get(phase):
            self._last[phase] = self._running[phase]
        self._running[phase], self._place[phase] = [], 0

    def begin_reversed(self, phase: str, of: str) -> None:
        """A backward starts; if none has run yet it is predicted to go the running pass of `of` in reverse."""
        self.begin(phase)
        self._last.setdefault(phase, self._running.get(of, [])[::-1])

    def use(self, phase: str, key: int, ahead: int) -> Sequence[int]:
        """`key` is used now; the `ahead` keys after it in the last pass."""
        self._running.setdefault(phase, []).append(key)
        last, place = self._last.get(phase, []), self._place.get(phase, 0)
        try:
            found = last.index(key, place)
        except ValueError:
            found = last.index(key) if key in last else -1
        if found < 0:
            return ()
        self._place[phase] = found + 1
        return last[found + 1 : found + 1 + ahead]
