"""Both packages on one device: correctness, overhead against plain torch, memory. Under three minutes on one GPU.

    python examples/benchmarks/gpu_check.py
    python examples/benchmarks/gpu_check.py --device cpu --small      # the same checks without a GPU

zeroshard runs as the only rank: every stage must give plain torch's bits, in its time and memory. For ring_attention one
device plays all ranks, each a thread: the ring's own forward and backward with the kernel that a rank would call, messages
handed over on the device. The result is compared with fp64 attention over the whole sequence, beside torch's own fused
kernel in the same dtype.
Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import pathlib
import queue
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from model import build

import zeroshard
from ring_attention import Contiguous, Mask, Striped, ZigZag, ring
from ring_attention.comm import GRADIENTS, KEYS
from ring_attention.kernels import BlockKernel, Scores, choose
from ring_attention.plan import make
from ring_attention.ring import Rounds

MAX_ERROR_RATIO = 1.5  # of the fused kernel's own error


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--ranks", type=int, default=4, help="how many ranks of a ring are played")
    parser.add_argument("--out", type=pathlib.Path, help="writes the figures as JSON")
    return parser.parse_args()


class Clock:
    """Seconds and peak bytes of a call; bytes are 0 where the device does not count them."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def __call__(self, work: Callable[[], Any], repeats: int) -> tuple[float, int]:
        work()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times), torch.cuda.max_memory_allocated() if self.cuda else 0


# ---------------------------------------------------------------------------------------------------------- zeroshard


def train(stage: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """A few steps of one engine; `stage=None` is plain torch."""
    device = torch.device(args.device)
    width, depth, vocabulary, seq_len = (64, 2, 256, 64) if args.small else (1024, 12, 32768, 1024)
    model = build(width, depth, vocabulary, seq_len, lora=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    if stage is not None:
        zeroshard.shard(model, optimizer, stage=stage)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(0, vocabulary, (2, seq_len + 1), generator=generator).to(device)
    losses: list[Tensor] = []

    def step() -> None:
        loss = model(batch[:, :-1], batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    seconds, peak = Clock(device)(step, 8)
    values = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    return {"seconds": seconds, "peak_bytes": peak, "losses": [float(loss) for loss in losses], "values": values}


def check_zeroshard(args: argparse.Namespace) -> list[dict[str, Any]]:
    plain = train(None, args)
    rows = []
    for stage in range(4):
        seen = train(stage, args)
        same = seen["losses"] == plain["losses"] and all(
            torch.equal(value, plain["values"][name]) for name, value in seen["values"].items()
        )
        rows.append(
            {
                "check": f"zeroshard stage {stage}",
                "passed": same,
                "time_ratio": seen["seconds"] / plain["seconds"],
                "memory_ratio": seen["peak_bytes"] / plain["peak_bytes"] if plain["peak_bytes"] else None,
            }
        )
    return rows


# ----------------------------------------------------------------------------------------------------- ring_attention

Triple = tuple[Tensor, Tensor, Tensor]
Moves = Sequence[tuple[Tensor, int]]


class Handed:
    """Messages between ranks that are threads on one device: handed over in order, copied by whoever receives them."""

    def __init__(self, rank: int, mail: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]]) -> None:
        self.rank, self.mail = rank, mail

    def start(self, sends: Moves, receives: Moves, tag: int) -> Arriving:
        for x, peer in sends:
            self.mail[tag, self.rank, peer].put(x)
        return Arriving([(x, self.mail[tag, peer, self.rank]) for x, peer in receives])


class Arriving:
    def __init__(self, expected: list[tuple[Tensor, queue.SimpleQueue[Tensor]]]) -> None:
        self.expected = expected

    def wait(self) -> None:
        for x, sent in self.expected:
            x.copy_(sent.get(timeout=60))


def play(layout: Any, mask: Mask, kernel: BlockKernel, dout: Tensor, qkv: Triple) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of the whole sequence, from the ring's own forward and backward on every rank."""
    ranks = range(layout.world_size)
    mail = {(tag, a, b): queue.SimpleQueue[Tensor]() for tag in (KEYS, GRADIENTS) for a in ranks for b in ranks}

    def one(rank: int) -> tuple[Tensor, ...]:
        q, k, v, grad = (layout.shard(x, rank, 2).contiguous() for x in (*qkv, dout))
        mine = layout.positions(rank)
        table = mask.mod_table(mine, torch.arange(layout.seq_len), *q.shape[:2])
        plan = make(layout, layout, mask, rank, dense=table is not None)
        rounds = Rounds(Handed(rank, mail), plan, kernel, table=table, heads=max(1, k.shape[1] // 2))
        out, norm = ring.forward(rounds, q, k, v)
        out = out.to(dout.dtype)
        return (out, *ring.backward(rounds, grad, q, k, v, out, norm, (True, True)))

    with concurrent.futures.ThreadPoolExecutor(layout.world_size) as threads:
        found = list(threads.map(one, ranks))
    return tuple(layout.unshard(list(parts), 2) for parts in zip(*found, strict=True))


def two_of_three(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k) % 3 < 2


def dense(seen: Tensor | None, dout: Tensor, qkv: Triple) -> tuple[Tensor, ...]:
    """The same by torch; `seen` [S, S] says who sees whom, `None` stands for causal."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=seen, is_causal=seen is None)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def check_ring(args: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(args.device)
    seq_len, dtype = (193, torch.float32) if args.small else (4096, torch.bfloat16)
    position = torch.arange(seq_len, device=device)
    documents = torch.div(position * 5, seq_len, rounding_mode="floor")
    distance = position[:, None] - position[None]
    window = seq_len // 8
    causal = distance >= 0
    cases = {
        "causal": (Mask(causal=True), causal),
        "window": (Mask(causal=True, window=(window, 0)), causal & (distance <= window)),
        "documents": (Mask(causal=True, documents=documents.cpu()), causal & (documents[:, None] == documents[None])),
        "mask_mod": (Mask(causal=True, mask_mod=two_of_three), causal & (distance % 3 < 2)),
    }
    generator = torch.Generator().manual_seed(2)
    q, k, v, dout = (torch.randn(1, 8, seq_len, 64, generator=generator).to(device, dtype) for _ in range(4))
    kernel = choose(device, dtype, Scores(64**-0.5), 64)
    rows, clock = [], Clock(device)
    for name, (mask, seen) in cases.items():
        exact = dense(seen, dout.double(), (q.double(), k.double(), v.double()))
        whole = functools.partial(dense, None if name == "causal" else seen, dout, (q, k, v))
        fused = whole()
        full_seconds, full_peak = clock(whole, 5)
        for make_layout in (Contiguous, ZigZag, Striped):
            layout = make_layout(seq_len, args.ranks)
            in_turn = functools.partial(play, layout, mask, kernel, dout, (q, k, v))
            played = in_turn()
            worst = max(
                float((a.double() - x).abs().max() / (b.double() - x).abs().max().clamp_min(1e-6 * x.abs().max()))
                for a, b, x in zip(played, fused, exact, strict=True)
            )
            seconds, peak = clock(in_turn, 5)
            rows.append(
                {
                    "check": f"{args.ranks} ranks, {name}, {make_layout.__name__}",
                    "passed": worst <= MAX_ERROR_RATIO,
                    "error_ratio": worst,
                    "time_ratio": seconds / full_seconds,
                    "memory_ratio": peak / full_peak if full_peak else None,
                }
            )
    return rows


def main() -> None:
    args = options()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = check_zeroshard(args) + check_ring(args)
    print(f"{'check':<36}{'':>8}{'time':>8}{'memory':>8}{'error':>8}   ratios to plain torch")
    for row in rows:
        figures = (row.get(name) for name in ("time_ratio", "memory_ratio", "error_ratio"))
        shown = "".join(f"{'-' if figure is None else f'{figure:.2f}':>8}" for figure in figures)
        print(f"{row['check']:<36}{'passed' if row['passed'] else 'FAILED':>8}{shown}")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()
    sys.exit(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    main()
