"""`ContextParallel`: what a batch leaves for the attention that follows, layouts, and what it explains."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ring_attention as ra
from tests.harness import RankPools

S = 20


def attended(rank: int, world: int, batch: dict[str, torch.Tensor], layout: str, strategy: str) -> float:
    """Largest error of causal attention inside `with cp`, against dense attention within the documents."""
    cp = ra.ContextParallel(dist.group.WORLD, getattr(ra, layout), strategy)
    part = cp.shard(batch)
    mine = cp.positions(S)
    assert torch.equal(part["input_ids"], batch["input_ids"][:, mine])
    q, k, v = (torch.randn(2, 4, S, 8, dtype=torch.float64) for _ in range(3))
    ids = torch.tensor([0] * 6 + [1] * 9 + [2] * 5).expand(2, S).clone()
    if "attention_mask" in batch:
        ids = ids.masked_fill(batch["attention_mask"] == 0, -1)
    allow = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None] & torch.ones(S, S).tril().bool()
    scores = (q @ k.transpose(-1, -2) * 8**-0.5).masked_fill(~allow[:, None], -torch.inf)
    want = scores.softmax(-1).nan_to_num() @ v
    with cp:
        out = F.scaled_dot_product_attention(*(cp.shard(x, 2) for x in (q, k, v)), is_causal=True)
    return (out - want[:, :, mine]).abs().max().item()


@pytest.mark.parametrize("told", ["documents", "positions", "positions and padding"])
@pytest.mark.parametrize("layout", ["ZigZag", "Striped", "Balanced"])
def test_packing_and_padding_of_the_batch_hold_inside(ranks: RankPools, layout: str, told: str) -> None:
    batch = {"input_ids": torch.arange(2 * S).view(2, S)}
    if told == "documents":
        batch["documents"] = torch.tensor([7] * 6 + [3] * 9 + [5] * 5).expand(2, S)
    else:
        batch["position_ids"] = torch.cat([torch.arange(6), torch.arange(9), torch.arange(5)]).expand(2, S)
    if told == "positions and padding":
        batch["attention_mask"] = torch.ones(2, S).long()
        batch["attention_mask"][1, -3:] = 0
    for strategy in ("auto", "ulysses"):
        assert max(ranks(3).run(attended, batch, layout, strategy)) < 1e-12


def forgotten(rank: int, world: int) -> None:
    """The next batch decides anew; a sequence of another length does not get the documents of this one."""
    cp = ra.ContextParallel(dist.group.WORLD)
    ids = torch.zeros(1, S).long()
    cp.shard({"input_ids": ids, "documents": torch.arange(S) // 5})
    x = torch.randn(1, 2, S + 4, 8)
    with pytest.raises(ra.UsageError, match="documents have length 20"), cp:
        F.scaled_dot_product_attention(*[cp.shard(x, 2)] * 3, is_causal=True)
    cp.shard({"input_ids": ids})
    with cp:
        got = F.scaled_dot_product_attention(*[cp.shard(x, 2)] * 3, is_causal=True)
    want = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert torch.allclose(got, cp.shard(want, 2), atol=1e-5)


def test_documents_belong_to_their_batch(ranks: RankPools) -> None:
    ranks(2).run(forgotten)


def explained(rank: int, world: int) -> list[str]:
    said = []
    for strategy in ("ring", "auto"):
        cp = ra.ContextParallel(dist.group.WORLD, strategy=strategy)
        said.append(cp.explain())
        x = torch.randn(1, 4, S, 8)
        cp.shard({"input_ids": torch.zeros(1, S).long()})
        with cp:
            F.scaled_dot_product_attention(*[cp.shard(x, 2)] * 3, is_causal=True)
        said.append(cp.explain())
    mesh = dist.init_device_mesh("cpu", (2, 1))
    cp = ra.ContextParallel(mesh)
    with cp:
        F.scaled_dot_product_attention(*[cp.shard(x, 2)] * 3)
    return [*said, cp.explain()]


def test_the_choice_is_explained(ranks: RankPools) -> None:
    for said in ranks(2).run(explained):
        assert said[0] == said[1] == "ring: asked for" and "chosen at each attention call" in said[2]
        assert said[3].startswith("ring: estimated forward time ring") and "MiB" in said[3]
        assert said[4] == "hybrid: the mesh has two axes"


def misused(rank: int, world: int) -> None:
    for arguments, words in (
        ((None,), "group is None"),
        ((dist.group.WORLD, ra.ZigZag, "rnig"), "'rnig'"),
        ((dist.group.WORLD, ra.ZigZag, "hybrid"), "2-D"),
    ):
        with pytest.raises(ra.UsageError, match=words):
            ra.ContextParallel(*arguments)


def test_mistakes_are_named(ranks: RankPools) -> None:
    ranks(1).run(misused)


def uneven(rank: int, world: int) -> str:
    """Local tensors that are no layout's parts are refused with all lengths."""
    x: Any = torch.randn(1, 2, 3 + 5 * (rank == 0), 8)
    with pytest.raises(ra.UsageError) as error, ra.ContextParallel(dist.group.WORLD):
        F.scaled_dot_product_attention(x, x, x)
    return str(error.value)


def test_lengths_that_no_layout_gives_are_refused(ranks: RankPools) -> None:
    assert all(("[8, 3]" in text and "[5, 6]" in text) or "[6, 5]" in text for text in ranks(2).run(uneven))


def activity(rank: int, world: int) -> list[bool]:
    cp, other, seen = ra.ContextParallel(dist.group.WORLD), ra.ContextParallel(dist.group.WORLD), []
    with cp:
        seen += [cp.active, not other.active]
        thread = threading.Thread(target=lambda: seen.append(not cp.active))
        thread.start()
        thread.join()
        with cp:
            pass
        seen.append(cp.active)
    return [*seen, not cp.active]


def test_a_context_knows_whether_it_is_active(ranks: RankPools) -> None:
    assert all(map(all, ranks(1).run(activity)))
