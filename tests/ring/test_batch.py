"""Batches: labels shifted once, positions, documents told in three ways, and the way back to whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ring_attention as ra
from ring_attention import batch as batches
from tests.harness import RankPools

B, S = 2, 14


def whole() -> dict[str, Any]:
    ids = torch.arange(B * S).view(B, S)
    return {
        "input_ids": ids, "labels": ids + 100, "token_type_ids": ids % 2, "inputs_embeds": torch.randn(B, S, 3),
        "num_items_in_batch": torch.tensor(7), "names": ["a", "b"], "flag": True, "pixel_values": torch.randn(B, 3, 4, 4),
    }  # fmt: skip


@pytest.mark.parametrize("layout", [ra.Contiguous(S, 3), ra.ZigZag(S, 3), ra.Striped(S, 3)])
def test_every_token_tensor_goes_by_one_map(layout: Any) -> None:
    batch = whole()
    kept = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    for rank in range(3):
        part, mine = batches.shard(batch, layout, rank), layout.positions(rank)
        assert "labels" not in part
        assert torch.equal(part["shift_labels"], F.pad(batch["labels"][:, 1:], (0, 1), value=-100)[:, mine])
        assert torch.equal(part["position_ids"], mine.expand(B, -1))
        for name in ("input_ids", "token_type_ids", "inputs_embeds"):
            assert torch.equal(part[name], batch[name][:, mine])
        assert all(part[name] is batch[name] for name in ("num_items_in_batch", "names", "flag", "pixel_values"))
    for name, x in kept.items():
        assert torch.equal(x, batch[name]) if isinstance(x, torch.Tensor) else x == batch[name]


def test_positions_of_several_kinds() -> None:
    layout, rows = ra.ZigZag(S, 2), torch.arange(S).expand(B, S)
    for positions, dim in ((rows.expand(3, B, S), 2), (rows, 1), (rows[:1], 1), (rows[0], 0)):
        part = batches.shard({"input_ids": rows, "position_ids": positions}, layout, 1)
        assert torch.equal(part["position_ids"], positions.index_select(dim, layout.positions(1)))


def test_labels_shifted_by_the_caller_stay() -> None:
    ids = torch.arange(S).expand(B, S)
    part = batches.shard({"input_ids": ids, "shift_labels": ids + 1, "labels": ids}, ra.Contiguous(S, 2), 0)
    assert torch.equal(part["shift_labels"], (ids + 1)[:, : S // 2]) and "labels" not in part


def found(**batch: Any) -> Any:
    documents = batches.documents_of({"input_ids": torch.zeros(B, S).long(), **batch})
    return None if documents is None else torch.atleast_2d(documents).tolist()


def test_documents_are_found_however_they_are_told() -> None:
    ids, row = torch.tensor([0] * 5 + [1] * 9), [0] * 5 + [1] * 9
    restarting = torch.cat([torch.arange(5), torch.arange(9)])
    padding = torch.ones(B, S).long()
    padding[0, :3] = 0
    assert found() is None and found(position_ids=torch.arange(S).expand(B, S)) is None
    assert found(attention_mask=torch.ones(B, S)) is None
    assert found(documents=ids) == [row] and found(documents=ids.expand(B, S)) == [row] * B
    assert found(position_ids=restarting.expand(B, S)) == [row] * B
    assert found(position_ids=restarting.expand(3, B, S)) is None  # axes of a picture, not packing
    assert found(attention_mask=padding) == [[-1] * 3 + [0] * 11, [0] * 14]
    assert found(attention_mask=padding.bool(), documents=ids) == [[-1] * 3 + row[3:], row]
    assert found(position_ids=torch.arange(5, 5 + S).expand(B, S)) is None


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"names": ["a"]}, "no input_ids"),
        ({"input_ids": torch.zeros(2, 4), "documents": torch.zeros(3).long()}, "documents are"),
        ({"input_ids": torch.zeros(2, 4), "attention_mask": torch.zeros(2, 1, 4, 4)}, "attention_mask"),
        ({"input_ids": torch.zeros(2, 4), "attention_mask": {"full_attention": None}}, "attention_mask"),
    ],
)
def test_what_cannot_be_honoured_is_refused(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(ra.UsageError, match=words):
        batches.documents_of(batch)


def unsharded(rank: int, world: int, name: str, two_axes: bool) -> None:
    handle = dist.init_device_mesh("cpu", (2, world // 2)) if two_axes else dist.group.WORLD
    cp = ra.ContextParallel(handle, getattr(ra, name), "auto")
    for length, dim in ((13, 1), (2, 1), (13, -2)):
        x = torch.randn(2, length, 3, dtype=torch.float64)
        part, mine = cp.shard(x, dim).requires_grad_(), cp.positions(length)
        assert torch.equal(cp.unshard(part, dim), x)
        couts = [
            torch.randn(2, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(world)
        ]
        cp.unshard(part, dim).backward(couts[rank])
        assert torch.allclose(part.grad, sum(couts)[:, mine], atol=1e-13)
    with pytest.raises(ra.UsageError, match="local lengths"):
        cp.unshard(torch.zeros(2, 5 + 7 * (rank == 0), 3))


@pytest.mark.parametrize(("name", "two_axes"), [("ZigZag", False), ("Striped", False), ("ZigZag", True)])
def test_unshard_is_the_whole_and_sums_gradients(ranks: RankPools, name: str, two_axes: bool) -> None:
    ranks(4).run(unsharded, name, two_axes)
