"""What this machine is like for ranks that train on it, and what of it to change."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import platform
import resource
import shutil
import socket
from typing import Any

import psutil
import torch

from ..config import communication_settings
from .comm import backends

PACKAGES = (
    "zeroshard", "torch", "accelerate", "transformers", "trl", "peft", "lightning", "safetensors", "flash-attn",
    "matplotlib", "rich", "click", "psutil",
)  # fmt: skip
OLDEST_TORCH = (2, 11)
MIN_FILES = 4096  # a socket per pair of ranks, workers of data loaders, files of a checkpoint
MIN_SHM_BYTES = 1 << 30  # batches of data loaders' workers and NCCL's buffers go through it


@dataclasses.dataclass(frozen=True)
class Finding:
    """level: "error" (training will fail), "warning" (it will be slow, or fail on several nodes) or "note"."""

    level: str
    what: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """packages: name -> version, `None` if not installed. memory_bytes: what this process may use at most.

    interface: the network interface that gloo takes; `None` if this host's name leads to none.
    """

    python: str
    packages: dict[str, str | None]
    backends: list[str]
    devices: list[str]
    cores: int
    physical_cores: int
    threads: int
    memory_bytes: int
    available_bytes: int
    shm_bytes: int | None
    open_files: int
    locked_bytes: int | None
    host: str
    interface: str | None
    environment: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def look() -> Machine:
    """Reads all of it; nothing is changed."""
    environment = communication_settings()
    memory = psutil.virtual_memory()
    shm = pathlib.Path("/dev/shm")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    process = psutil.Process()
    return Machine(
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        backends=backends(),
        devices=_devices(),
        cores=len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count() or 1,
        physical_cores=psutil.cpu_count(logical=False) or 1,
        threads=torch.get_num_threads(),
        memory_bytes=min(memory.total, _limit_of_container() or memory.total),
        available_bytes=memory.available,
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        host=socket.gethostname(),
        interface=environment.get("GLOO_SOCKET_IFNAME") or _interface(),
        environment=environment,
    )


def judge(machine: Machine) -> list[Finding]:
    """What is wrong or could be better, the worst first."""
    found: list[Finding] = []

    def add(level: str, what: str, remedy: str) -> None:
        found.append(Finding(level, what, remedy))

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        add("error", f"torch {torch.__version__} is too old", "pip install -U 'torch>=2.11'")
    if not machine.backends:
        add("error", "this torch has no torch.distributed", "install an official build of torch")
    elif machine.devices and "nccl" not in machine.backends and torch.cuda.is_available():
        add("error", "there are GPUs, but this torch has no NCCL", "install a build of torch for CUDA")
    if machine.packages["accelerate"] is None:
        add("warning", "accelerate is not installed", "pip install accelerate; until then start ranks with torchrun")
    if machine.interface is None:
        add(
            "warning",
            f"the name of this host, {machine.host}, leads to none of its network interfaces: ranks on other nodes cannot "
            "reach it over gloo",
            "export GLOO_SOCKET_IFNAME=... (one of: " + ", ".join(sorted(psutil.net_if_addrs())) + ")",
        )
    elif machine.interface.startswith("lo"):
        add(
            "note",
            f"gloo takes the interface {machine.interface}, which other nodes cannot reach",
            "for several nodes: export GLOO_SOCKET_IFNAME=... (one of: " + ", ".join(sorted(psutil.net_if_addrs())) + ")",
        )
    if machine.shm_bytes is not None and machine.shm_bytes < MIN_SHM_BYTES:
        add(
            "warning",
            f"/dev/shm has {machine.shm_bytes / 2**20:,.0f} MiB free: workers of data loaders and NCCL may run out of it",
            "give a container more (docker run --shm-size=8g), or use DataLoader(num_workers=0)",
        )
    if machine.open_files < MIN_FILES:
        add("warning", f"a process may open {machine.open_files} files and sockets", f"ulimit -n {MIN_FILES}")
    if not machine.devices and machine.environment.get("OMP_NUM_THREADS") == "1" and machine.physical_cores > 2:
        add(
            "note",
            f"OMP_NUM_THREADS=1: each rank computes on one of {machine.physical_cores} cores",
            "export OMP_NUM_THREADS = cores / ranks on this machine, or torch.set_num_threads",
        )
    if machine.packages["matplotlib"] is None:
        add("note", "matplotlib is not installed: `estimate --plot` and `report` draw with it", "pip install 'zeroshard[cli]'")
    return sorted(found, key=lambda each: ("error", "warning", "note").index(each.level))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    if not torch.accelerator.is_available():
        return []
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return names or [str(torch.accelerator.current_accelerator())] * torch.accelerator.device_count()


def _limit_of_container() -> int | None:
    """The limit of this process's control group, which `free` does not show."""
    try:
        text = pathlib.Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _interface() -> str | None:
    """As gloo does: the interface that holds the address of this host's name."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return None
    for name, held in psutil.net_if_addrs().items():
        if any(str(each.address).split("%")[0] in addresses for each in held):
            return name
    return None
