"""One attention, forward and backward, by one contender, as one rank: started by attention.py, prints one line of JSON.

    python -m torch.distributed.run --nproc-per-node 2 examples/benchmarks/attention_worker.py ring --seq-len 8192

Every contender gets the same whole inputs (from a seed), cuts out what its rank holds, and times the same call. Peak bytes
are those of live tensors above the inputs, in a run of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ring_attention as ra

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls, after one that is not")
    parser.add_argument("--window", type=int, help="keys that a query sees, its own included")
    parser.add_argument("--documents", type=int, help="mean length of packed documents")
    parser.add_argument("--memory", action="store_true", help="peak bytes instead of times")
    return parser.parse_args()


def document_ids(seq_len: int, mean: int) -> Tensor:
    """Packed documents of lengths between none and twice the mean. int64 [seq_len]"""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 2 * mean, (2 * seq_len // mean + 2,), generator=generator)
    return torch.repeat_interleave(lengths)[:seq_len]


def mask_of(args: argparse.Namespace) -> ra.Mask:
    window = None if args.window is None else (args.window - 1, 0)
    documents = None if args.documents is None else document_ids(args.seq_len, args.documents)
    return ra.Mask(causal=True, window=window, documents=documents)


def fused(args: argparse.Namespace) -> tuple[ra.Contiguous, Attention]:
    """torch's own fused kernel on the whole sequence, causal."""
    return ra.Contiguous(args.seq_len, 1), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ring(args: argparse.Namespace) -> tuple[Any, Attention]:
    mask, world = mask_of(args), dist.get_world_size()
    kind = ra.Balanced if args.documents else ra.Contiguous if args.window else ra.ZigZag
    layout = kind.build(mask, args.seq_len, world)
    return layout, lambda q, k, v: ra.ring_attention(q, k, v, group=dist.group.WORLD, layout=layout, mask=mask)


def ringmaster(args: argparse.Namespace) -> tuple[ra.Contiguous, Attention]:
    from ringmaster.ring.p2p_attn import ring_p2p_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_p2p_attention(q, k, v, group=dist.group.WORLD, causal=True, scaling=None).transpose(1, 2)

    return ra.Contiguous(args.seq_len, dist.get_world_size()), attend


def ringmaster_balanced(args: argparse.Namespace) -> tuple[ra.Contiguous, Attention]:
    from ringmaster.ring.distflash import distflash_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return distflash_attention(q, k, v, group=dist.group.WORLD, scaling=None, attn_implementation="math").transpose(1, 2)

    return ra.Contiguous(args.seq_len, dist.get_world_size()), attend


def ring_attention_pytorch(args: argparse.Namespace) -> tuple[ra.Contiguous, Attention]:
    from ring_attention_pytorch import ring_flash_attn

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ring_flash_attn(q, k, v, causal=True, ring_reduce_col=True).transpose(1, 2)

    return ra.Contiguous(args.seq_len, dist.get_world_size()), attend


CONTENDERS: dict[str, Callable[[argparse.Namespace], tuple[Any, Attention]]] = {
    "fused": fused,
    "ring": ring,
    "ringmaster": ringmaster,
    "ringmaster-balanced": ringmaster_balanced,
    "ring-attention-pytorch": ring_attention_pytorch,
}


def peak_of(work: Callable[[], Any]) -> int:
    """The most bytes of tensors that were alive at a time, above what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = work()
    del kept
    held = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(args: argparse.Namespace, rank: int, barrier: Callable[[], None]) -> dict[str, Any]:
    layout, attend = CONTENDERS[args.contender](args)
    generator = torch.Generator().manual_seed(1)
    shape = (1, args.heads, args.seq_len, args.head_dim)
    inputs = []
    for _ in range(4):
        whole = torch.randn(shape, generator=generator).to(getattr(torch, args.dtype))
        inputs.append(layout.shard(whole.transpose(1, 2), rank, 1).transpose(1, 2))  # [B, S, H, D] in memory, as models have it
        del whole
    q, k, v, dout = inputs
    for leaf in (q, k, v):
        leaf.requires_grad_()

    def step() -> list[Tensor | None]:
        out = attend(q, k, v)
        out.backward(dout)
        grads = [leaf.grad for leaf in (q, k, v)]
        for leaf in (q, k, v):
            leaf.grad = None
        return [out.detach(), *grads]

    seen: dict[str, Any] = {"tokens": q.shape[2], "visible_pairs": int(mask_of(args).row_work(args.seq_len).sum())}
    if args.memory:
        return seen | {"peak_bytes": peak_of(step), "input_bytes": sum(x.nbytes for x in inputs)}
    results = step()
    seen["checksum"] = float(sum(x.double().abs().sum() for x in results if x is not None))
    del results
    seconds = []
    for _ in range(args.repeats):
        barrier()
        start = time.perf_counter()
        step()
        barrier()
        seconds.append(time.perf_counter() - start)
    return seen | {"seconds": seconds}


def main() -> None:
    args = options()
    torch.set_num_threads(args.threads)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if args.contender != "fused":
        dist.init_process_group("gloo")
    seen = measure(args, rank, dist.barrier if world > 1 else lambda: None)
    of_ranks: list[Any] = [seen]
    if world > 1:
        of_ranks = [None] * world
        dist.all_gather_object(of_ranks, seen)
    if rank == 0:
        print(json.dumps({"contender": args.contender, "world": world, "ranks": of_ranks}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
