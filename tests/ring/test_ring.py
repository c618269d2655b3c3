"""The loop: what is sent, when, and how much is held. Counted, not timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ring_attention as ra
from ring_attention import comm, plan, ring, strategies
from ring_attention.kernels.cpu import CpuKernel
from ring_attention.strategies import Sizes
from tests.harness import RankPools
from tests.ring.problems import Problem


class Recorder:
    """Events of this rank in order: sends and receives posted, transfers waited for, kernels called. Bytes sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.sent = 0
        post, wait, forward, backward = comm.Ring.post, comm.Ring.wait, CpuKernel.forward, CpuKernel.backward

        def posted(this: comm.Ring, sends: Any, receives: Any) -> None:
            self.events.append("post" if this._tag == comm.KEYS else "home")
            self.sent += sum(x.nbytes for x, _ in sends)
            post(this, sends, receives)

        def waited(this: comm.Ring) -> Any:
            self.events.append("wait" if this._tag == comm.KEYS else "arrive")
            return wait(this)

        def called(original: Any) -> Any:
            return lambda *a: (self.events.append("compute"), original(*a))[1]

        monkeypatch.setattr(comm.Ring, "post", posted)
        monkeypatch.setattr(comm.Ring, "wait", waited)
        monkeypatch.setattr(CpuKernel, "forward", called(forward))
        monkeypatch.setattr(CpuKernel, "backward", called(backward))

    def take(self) -> tuple[list[str], int]:
        taken = self.events, self.sent
        self.events, self.sent = [], 0
        return taken


def recorded(rank: int, world: int, problem: Problem, strategy: str = "ring") -> list[tuple[list[str], int]]:
    """(events, bytes) of forward and of backward."""
    layout, x = problem.layouts(world)[0], problem.tensors()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        q, k, v = (layout.shard(x[n], rank, 2).requires_grad_() for n in "qkv")
        options = {"group": dist.group.WORLD, "layout": layout, "mask": problem.mask_of(), "strategy": strategy}
        out = ra.ring_attention(q, k, v, **options)
        forward = recorder.take()
        out.backward(layout.shard(x["dout"], rank, 2))
        return [forward, recorder.take()]


def test_the_next_block_travels_while_the_current_one_is_computed(ranks: RankPools) -> None:
    for forward, backward in ranks(3).run(recorded, Problem(S=48)):
        assert forward[0] == ["post", "compute", "wait", "post", "compute", "wait", "compute"]
        keys = [event for event in backward[0] if event in ("post", "wait", "compute")]
        assert keys == forward[0]
        # gradients of a step go home while the next is computed
        assert [e for e in backward[0] if e in ("home", "arrive")] == ["home", "arrive", "home", "arrive"]
        assert backward[0].index("arrive") > [i for i, e in enumerate(backward[0]) if e == "compute"][2]


def test_gather_posts_everything_first(ranks: RankPools) -> None:
    for forward, _ in ranks(3).run(recorded, Problem(S=48), "gather"):
        assert forward[0] == ["post", "post", "compute", "wait", "compute", "wait", "compute"]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_the_lower_bound(ranks: RankPools, world: int, dtype: torch.dtype) -> None:
    """Forward (N-1)/N of all keys and values; backward the same again and their gradients, wide; Hkv heads only."""
    problem = Problem(S=16 * world, heads=(8, 2), dims=(8, 8), dtype=dtype, mask={}, layout="Contiguous")
    elements = 2 * (world - 1) * 16 * 2 * 8
    for forward, backward in ranks(world).run(recorded, problem):
        assert forward[1] == elements * dtype.itemsize
        assert backward[1] == elements * (dtype.itemsize + 4)


def test_a_window_sends_what_it_reaches(ranks: RankPools) -> None:
    """Bytes follow the window, not the length, and one neighbour is enough."""
    sent = {}
    for share in (32, 64):
        problem = Problem(S=4 * share, mask={"causal": True, "window": (9, 0)}, layout="Contiguous", dtype=torch.float32)
        found = ranks(4).run(recorded, problem)
        sent[share] = [forward[1] for forward, _ in found]
        reached = 9 * 2 * 2 * 8 * 4
        assert sent[share] == [reached, reached, reached, 0]  # the last rank's keys are seen by nobody else
        assert all(forward[0].count("wait") <= 2 for forward, _ in found)
    assert sent[32] == sent[64]


def test_documents_inside_shares_send_nothing(ranks: RankPools) -> None:
    problem = Problem(S=32, mask={"causal": True, "documents": [0] * 16 + [1] * 16}, layout="Contiguous")
    for forward, backward in ranks(2).run(recorded, problem):
        assert forward[1] == backward[1] == 0 and "post" not in forward[0] + backward[0]


def test_causal_contiguous_sends_forward_only(ranks: RankPools) -> None:
    """The first rank needs nobody, the last serves nobody."""
    found = ranks(4).run(recorded, Problem(S=32, layout="Contiguous", dtype=torch.float32))
    share = 2 * 8 * 2 * 8 * 4
    assert [forward[1] for forward, _ in found] == [3 * share, 2 * share, share, 0]


def frozen(rank: int, world: int) -> int:
    problem = Problem(S=16, mask={}, dtype=torch.float32)
    layout, x = problem.layouts(world)[0], problem.tensors()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        q, k, v = (layout.shard(x[n], rank, 2).requires_grad_(n == "q") for n in "qkv")
        out = ra.ring_attention(q, k, v, group=dist.group.WORLD, layout=layout, mask=ra.Mask())
        recorder.take()
        out.sum().backward()
        return recorder.take()[1]


def test_gradients_of_frozen_keys_do_not_travel(ranks: RankPools) -> None:
    assert ranks(2).run(frozen) == [2 * 8 * 2 * 8 * 4] * 2  # the keys and values again, nothing else


# ------------------------------------------------------------------------------------------------ memory
def peak_bytes(rank: int, world: int, share: int, strategy: str) -> tuple[int, int, int]:
    """Peak of live bytes above the inputs in forward and backward, and the bytes of this rank's inputs."""
    problem = Problem(S=share * world, heads=(4, 4), dims=(32, 32), dtype=torch.float32)
    layout, x = problem.layouts(world)[0], problem.tensors()
    q, k, v, dout = (layout.shard(x[n], rank, 2) for n in ("q", "k", "v", "dout"))
    for leaf in (q, k, v):
        leaf.requires_grad_()
    options = {"group": dist.group.WORLD, "layout": layout, "mask": problem.mask_of(), "strategy": strategy}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as first:
        out = ra.ring_attention(q, k, v, **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as second:
        out.backward(dout)
    return peak_of(first), peak_of(second), q.nbytes


def peak_of(profile: Any) -> int:
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return int(np.max(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])))


@pytest.mark.parametrize("world", [2, 4])
def test_memory_is_results_and_a_few_portions(ranks: RankPools, world: int) -> None:
    """In units of one tensor [B, H, S_local, D], with one of four heads going round at a time.

    Forward: the output, and of a portion the block in use (2), the one arriving (2), what is sent (2), a block's output.
    Backward: three gradients, and of a portion the same six, gradients that the kernel answers (3), those found for the
    source (2), those on their way (4).
    """
    for forward, backward, unit in ranks(world).run(peak_bytes, 2048, "ring"):
        assert forward <= (1.1 + 7 / 4) * unit, forward / unit
        assert backward <= (3.1 + 15 / 4) * unit, backward / unit


@pytest.mark.parametrize("heads", [4, 8])
def test_portions_are_worth_a_message(heads: int) -> None:
    """Portions get smaller with the share only as long as a message is worth sending; threads want heads to work on."""
    cpu = torch.device("cpu")

    def portion(seq_len: int, together: int = 1, **mask: Any) -> int:
        sizes = Sizes(1, heads, heads, 64, 64, 4)
        return strategies.portion(sizes, ra.ZigZag(seq_len, 4), ra.Mask(causal=True, **mask), cpu, together)

    assert [portion(S) for S in (64, 2048, 65536)] == [heads, 2, 1]
    assert portion(65536, together=2) == 2
    assert portion(65536, window=(1023, 0)) == portion(65536, documents=torch.arange(65536) // 1000) == heads  # little travels


def test_one_rank_holds_results_only(ranks: RankPools) -> None:
    ((forward, backward, unit),) = ranks(1).run(peak_bytes, 4096, "ring")
    assert forward <= 1.4 * unit and backward <= 4.8 * unit, (forward / unit, backward / unit)


def test_one_device_can_play_every_rank() -> None:
    """The plan and the kernels need no process group: a ring of one plays all ranks in turn."""
    problem = Problem(S=33, heads=(4, 2), dims=(8, 6))
    layout, x, mask = ra.ZigZag(33, 3), problem.tensors(), problem.mask_of()
    outs = []
    for rank in range(3):
        q, total = layout.shard(x["q"], rank, 2), None
        for step in plan.make(layout, layout, mask, rank).steps:
            alone = plan.Plan(rank, layout, layout, mask, (plan.replace(step, distance=0),))
            k, v = (layout.shard(x[n], step.source, 2) for n in "kv")
            part = ring.forward(ring.Rounds(None, alone, CpuKernel(8**-0.5)), q, k, v)
            if total is None:
                total = part
            else:
                ring.lse.merge_(*total, *part)
        outs.append(total[0])
    assert torch.allclose(layout.unshard(outs, 2), problem.dense()["out"], atol=1e-12)
