"""Memory of each rank: what the closed form says, what the engine holds, what the process really takes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import psutil
import torch

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. `predicted` and `held` are by category and have the same ones where both know them."""

    rank: int
    predicted: dict[str, int]  # zeroshard.estimate, before anything was sharded
    held: dict[str, int]  # zeroshard.stats: the most held at one time
    process: int  # the most the process took while training, above what it took before there was a model

    @property
    def rest(self) -> int:
        """Activations, logits, communication, allocator: what the closed form does not speak of."""
        return self.process - sum(self.held.values())

    def as_text(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def by_category(estimate: Mapping[str, int]) -> dict[str, int]:
    """The categories of an estimate or of stats that hold anything, without their sum."""
    return {name: int(size) for name, size in estimate.items() if size and name != "total"}


class ProcessMemory:
    """The most memory this process takes while the `with` block runs, and what it takes now, in bytes.

    On CPU the resident set, looked at 20 times a second, for gradients and gathered units come and go within a step. On
    a GPU what torch's allocator handed out at most.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._process = psutil.Process()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self.before = self.now()  # called before there is a model
        self.peak = 0

    def now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._process.memory_info().rss

    def __enter__(self) -> ProcessMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self._done.set()
            self._watch.join()

    def _look(self) -> None:
        while not self._done.wait(0.05):
            self.peak = max(self.peak, self.now())
