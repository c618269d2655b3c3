"""One call's request as text, and what is settled once all ranks have told their lengths."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ring_attention as ra
from ring_attention import layouts
from ring_attention.plan import MaskTensors
from ring_attention.setting import Asked, Request
from tests.harness import RankPools


def asked(strategy: str = "ring", layout: str | None = None, heads: tuple[int, int] = (4, 2)) -> Asked:
    spec = layout or ra.ZigZag.pending(1)
    text = "\n".join((dist.group.WORLD.group_name, spec, spec, ra.Mask(causal=True).spec, strategy, "None"))
    q, k = torch.zeros(1, heads[0], 6, 8), torch.zeros(1, heads[1], 6, 8)
    return Asked.of((q, k, k), None, MaskTensors(None, None), None, text, None, None)


def settled(rank: int, world: int) -> None:
    told = asked()
    assert told.problem is None and told.lengths == (6, 6, 1) and told.scores.scale == 8**-0.5
    assert told.settle([(6, 6, 1)]).rounds.plan.layout == ra.ZigZag(6, 1)  # the length was pending
    assert asked("gather").settle([(6, 6, 1)]).rounds.ahead == 1
    assert "heads must divide" in str(asked(heads=(4, 3)).problem)
    assert "world_size 2, the group has 1" in str(asked(layout=ra.ZigZag(6, 2).spec).problem)
    with pytest.raises(ra.UsageError, match=r"local query lengths of the ranks are \[6\].*\[7\]"):
        asked(layout=ra.ZigZag(7, 1).spec).settle([(6, 6, 1)])
    # the plan is made once: layers, and forward and backward, share it
    first, second = asked().settle([(6, 6, 1)]), asked().settle([(6, 6, 1)])
    assert first.rounds.plan is second.rounds.plan


def test_a_call_is_settled(ranks: RankPools) -> None:
    ranks(1).run(settled)


def test_a_request_goes_through_text() -> None:
    request = Request("g|h", "ZigZag:4:2", "Striped:?:2", "causal=True window=None", "auto", "None")
    fields = (request.groups, request.layout, request.key_layout, request.mask, request.strategy, request.mask_mod)
    assert Request.parse("\n".join(fields)) == request
    assert layouts.is_pending(request.key_layout) and not layouts.is_pending(request.layout)


def test_masks_are_told_apart_by_their_values() -> None:
    a, b = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    assert MaskTensors(a, None) == MaskTensors(a.clone(), None) != MaskTensors(b, None)
    assert hash(MaskTensors(a, None)) == hash(MaskTensors(a.clone(), None))
    assert MaskTensors(a, None) != MaskTensors(None, a)
