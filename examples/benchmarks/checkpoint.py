"""Memory while checkpoints, exports and files are written and read, on each rank, and what they take on disk.

    python -m torch.distributed.run --nproc-per-node 2 examples/benchmarks/checkpoint.py --megabytes 1000

Each operation's extra memory is the highest resident set of the process while it runs, above what it was before. The bound
is two of the largest tensors. Rank 0 prints one line of JSON; the exit status is 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import pathlib
import shutil
import sys
from collections.abc import Iterator

import psutil
import torch
import torch._dynamo  # torch.optim imports it at its first step
import torch.distributed as dist
from torch import nn

import zeroshard

MB = 1 << 20


def build(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def peak_bytes() -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM"))


@contextlib.contextmanager
def measured(extra: dict[str, int], name: str) -> Iterator[None]:
    """The highest resident set inside the block above the one before it, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free already does not hide what is taken
    dist.barrier()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts again from here
    before = psutil.Process().memory_info().rss
    yield
    extra[name] = peak_bytes() - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="of states: parameters and two moments in fp32")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--slack-megabytes", type=float, default=4.0, help="what libraries may take beside the bound")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/checkpoint-benchmark"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    depth = -(-args.megabytes * MB // (12 * args.width * (args.width + 1)))
    model = build(args.width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeroshard.shard(model, optimizer, stage=3)
    model(torch.ones(1, args.width)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    warm = small()  # what libraries import and allocate once
    zeroshard.save(args.folder / "warm", warm)
    zeroshard.load(args.folder / "warm", warm)
    zeroshard.export(warm, args.folder / "warm-model")
    extra: dict[str, int] = {}
    with measured(extra, "save"):
        zeroshard.save(args.folder / "checkpoint", model, optimizer)
    with measured(extra, "load"):
        zeroshard.load(args.folder / "checkpoint", model, optimizer)
    with measured(extra, "export"):
        zeroshard.export(model, args.folder / "model")
    del model, optimizer
    with torch.device("meta"):
        model = build(args.width, depth)
    zeroshard.shard(model, stage=3)
    with measured(extra, "materialize"):
        zeroshard.materialize(model, args.folder / "model")
    with measured(extra, "materialize from scratch"):
        zeroshard.materialize(model)
    states = 12 * sum(p.numel() for p in model.parameters())
    on_disk = sum(file.stat().st_size for file in (args.folder / "checkpoint").rglob("*") if file.is_file())
    per_rank: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(per_rank, extra)
    bound = 2 * 4 * args.width * args.width
    worst = {name: max(each[name] for each in per_rank) for name in extra}
    within = all(value <= bound + args.slack_megabytes * MB for value in worst.values()) and on_disk <= 1.01 * states
    if dist.get_rank() == 0:
        shutil.rmtree(args.folder)
        megabytes = {name: round(value / MB, 1) for name, value in worst.items()}
        told = {"states": round(states / MB, 1), "bound": round(bound / MB, 1), "extra": megabytes}
        print(json.dumps({**told, "on_disk": round(on_disk / states, 5), "within": within}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if within else 1


def small() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    return model


if __name__ == "__main__":
    sys.exit(main())
