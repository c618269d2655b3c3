"""How fast bytes move between ranks: those this command was started with, or some of its own on this machine.

Measured is the engine's own transport (`zeroshard.comm.Channel`): a gather, a reduce-scatter, and a small exchange.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from ..comm import Channel
from ..config import ShardError, launched_ranks

NUM_NUMBERS = 1 << 24  # fp32 numbers in a buffer, 64 MiB
ROUNDS = 5
PINGS = 200
LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Speed:
    """Between `ranks` ranks. Bytes sent by each rank per second, best of some rounds; latency: median of a small exchange."""

    ranks: int
    backend: str
    device: str
    gather_bytes_per_s: float
    reduce_bytes_per_s: float
    latency_s: float


def backends() -> list[str]:
    """What this build of torch can talk with."""
    if not dist.is_available():
        return []
    named = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, there in named.items() if there()]


def measure() -> tuple[Speed, bool]:
    """What was measured, and whether this rank is to tell it. Collective where several ranks were started.

    Raises ShardError if the ranks do not meet or do not answer.
    """
    if launched_ranks() == 1:
        return _own_ranks(2), True
    try:
        device = _device(launched_ranks())
        dist.init_process_group(_backend(device), timeout=timedelta(seconds=LIMIT_S))
        try:
            return _measured(device), dist.get_rank() == 0
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        raise ShardError(f"the {launched_ranks()} ranks could not talk: {_first_line(error)}") from error


def _own_ranks(ranks: int) -> Speed:
    with tempfile.TemporaryDirectory() as folder:
        try:
            started = multiprocessing.start_processes(_rank, (ranks, folder), ranks, join=False, start_method="spawn")
            assert started is not None
            deadline = time.monotonic() + LIMIT_S
            try:
                while not started.join(timeout=1):
                    if time.monotonic() > deadline:
                        raise ShardError(f"{ranks} ranks on this machine did not answer each other within {LIMIT_S:.0f} s")
            finally:
                for process in started.processes:
                    if process.is_alive():
                        process.kill()
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            raise ShardError(f"{ranks} ranks on this machine could not talk: {_last_line(error)}") from error
        return Speed(**json.loads(pathlib.Path(folder, "speed.json").read_text()))


def _rank(rank: int, ranks: int, folder: str) -> None:
    """One of the command's own ranks."""
    torch.set_num_threads(1)
    device = _device(ranks, rank)
    dist.init_process_group(
        _backend(device), init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT_S)
    )
    speed = _measured(device)
    if rank == 0:
        pathlib.Path(folder, "speed.json").write_text(json.dumps(dataclasses.asdict(speed)))
    dist.barrier()
    dist.destroy_process_group()


def _device(ranks: int, rank: int | None = None) -> torch.device:
    """An accelerator of one's own where there are enough of them, else the CPU."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available() or (rank is not None and torch.accelerator.device_count() < ranks):
        return torch.device("cpu")
    index = torch.accelerator.current_device_index() if rank is None else rank
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _measured(device: torch.device) -> Speed:
    channel = Channel(dist.group.WORLD, device=device)
    numel = NUM_NUMBERS // channel.size * channel.size
    flat, sent = torch.ones(numel, device=device), numel * 4 // channel.size * (channel.size - 1)
    gather = _fastest(lambda: channel.gather("gather", flat).wait(), device)
    reduce = _fastest(lambda: channel.reduce_scatter("reduce", flat, flat.dtype).wait(), device)
    pings = []
    for _ in range(PINGS):
        started = time.perf_counter()
        channel.exchange_all("ping", torch.zeros(1, dtype=torch.int64))
        pings.append(time.perf_counter() - started)
    return Speed(channel.size, dist.get_backend(), str(device), sent / gather, sent / reduce, sorted(pings)[PINGS // 2])


def _fastest(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest round; the first one only warms up."""
    seconds = []
    for _ in range(1 + ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
