"""One training run under one engine, as one rank: started by engines.py and memory.py, prints one line of JSON.

    python -m torch.distributed.run --nproc-per-node 2 examples/benchmarks/worker.py zeroshard-3 --steps 5
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch._dynamo  # torch.optim imports it at its first step: it belongs to the bare interpreter
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from model import Block, build

adamw = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, foreach=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="single, ddp, fsdp2, deepspeed-1 to -3, zeroshard-0 to -3")
    for name, default in {"width": 512, "depth": 8, "vocabulary": 8192, "seq-len": 256, "batch": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="bf16 compute, fp32 masters where the engine has them")
    parser.add_argument("--lora", action="store_true", help="99 %% of the parameters are frozen")
    return parser.parse_args()


class Engine:
    """What differs between engines: wrapping, backward, when gradients are synchronised, the step."""

    def __init__(self, name: str, model: nn.Module, args: argparse.Namespace):
        self.name, self.args = name, args
        self.model, self.optimizer = self._wrapped(model)

    def _wrapped(self, model: nn.Module) -> tuple[Any, Any]:
        kind, _, stage = self.name.partition("-")
        trained = [p for p in model.parameters() if p.requires_grad]
        if kind == "single":
            return model, adamw(trained)
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), adamw(trained)
        if kind == "fsdp2":
            return self._fsdp2(model)
        if kind == "deepspeed":
            return self._deepspeed(model, int(stage), trained)
        import zeroshard

        precision = zeroshard.Precision(compute=torch.bfloat16) if self.args.bf16 else None
        return zeroshard.shard(model, adamw(trained), stage=int(stage), precision=precision)

    def _fsdp2(self, model: nn.Module) -> tuple[Any, Any]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = {"mp_policy": low} if self.args.bf16 else {}
        for module in [m for m in model.modules() if isinstance(m, Block)] + [model]:
            fully_shard(module, mesh=mesh, **policy)
        return model, adamw([p for p in model.parameters() if p.requires_grad])

    def _deepspeed(self, model: nn.Module, stage: int, trained: list[nn.Parameter]) -> tuple[Any, Any]:
        import deepspeed

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.args.batch,
            "gradient_accumulation_steps": self.args.accumulate,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if self.args.bf16:
            config["bf16"] = {"enabled": True}
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained), config=config)
        return engine, optimizer

    def step(self, batches: list[torch.Tensor]) -> float:
        total = 0.0
        for number, ids in enumerate(batches):
            last = number == len(batches) - 1
            low = self.args.bf16 and self.name in ("single", "ddp")
            with self._unsynchronised(last), torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = self.model(ids[:, :-1], ids[:, 1:].contiguous())
            with self._unsynchronised(last):
                if self.name.startswith("deepspeed"):
                    self.model.backward(loss)  # divides by the number of micro-batches itself
                    self.model.step()
                else:
                    (loss / len(batches)).backward()
            total += float(loss.detach()) / len(batches)
        if not self.name.startswith("deepspeed"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return total

    def _unsynchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or self.name in ("single",) or self.name.startswith("deepspeed"):
            return contextlib.nullcontext()
        if self.name == "fsdp2":
            return contextlib.nullcontext()  # reduce-scatter in each micro-batch: sharded gradients, as at our stage 3
        return self.model.no_sync()


def peak_bytes() -> int:
    """The most this process has held since `clear_peak`."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def clear_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def ledger(model: nn.Module) -> dict[str, Any]:
    if "_zeroshard" not in model.__dict__:
        return {}
    import zeroshard

    seen = zeroshard.stats(model)
    return {
        "ledger_peak": dict(seen.peak_bytes) | {"total": seen.peak_bytes.total},
        "ledger_resident": dict(seen.resident_bytes) | {"total": seen.resident_bytes.total},
        "bytes_sent": seen.bytes_sent,
    }


def measure(args: argparse.Namespace, rank: int, world: int, barrier: Callable[[], None]) -> dict[str, Any]:
    gc.collect()
    bare = psutil.Process().memory_info().rss
    engine = Engine(args.engine, build(args.width, args.depth, args.vocabulary, args.seq_len, args.lora), args)
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (args.accumulate, args.batch, args.seq_len + 1)
    data = [list(torch.randint(0, args.vocabulary, shape, generator=generator)) for _ in range(4)]
    losses = [engine.step(data[i % 4]) for i in range(args.warmup)]
    gc.collect()
    clear_peak()
    times = []
    for i in range(args.warmup, args.warmup + args.steps):
        barrier()
        start = time.perf_counter()
        losses.append(engine.step(data[i % 4]))
        barrier()
        times.append(time.perf_counter() - start)
    peak = peak_bytes() - bare
    gc.collect()
    steady = psutil.Process().memory_info().rss - bare
    return {"seconds": times, "peak_bytes": peak, "steady_bytes": steady, "losses": losses, **ledger(engine.model)}


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if args.engine.startswith("deepspeed"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    elif world > 1:
        dist.init_process_group("gloo")
    seen = measure(args, rank, world, dist.barrier if world > 1 else lambda: None)
    of_ranks: list[Any] = [seen]
    if world > 1:
        of_ranks = [None] * world
        dist.all_gather_object(of_ranks, seen)
    if rank == 0:
        print(json.dumps({"engine": args.engine, "world": world, "ranks": of_ranks}), flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
