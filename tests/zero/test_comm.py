"""Channels: what every collective delivers, in which order it sums, what it sends, and that misuse raises."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankPools
from zeroshard.comm import Channel, topology
from zeroshard.config import ShardError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def world_channel() -> Channel:
    return topology(None).shard


def collectives(rank: int, world: int) -> dict[str, Any]:
    channel = world_channel()
    seen: dict[str, Any] = {"gather": [], "reduce_scatter": []}
    for dtype in DTYPES:
        full = torch.full((3 * world,), 99).to(dtype)
        full.chunk(world)[rank].fill_(rank + 1)
        seen["gather"].append(channel.gather(f"g{dtype}", full).wait())
    for dtype in DTYPES[:4]:
        flat = torch.arange(2 * world).to(dtype) * (rank + 1)
        seen["reduce_scatter"].append(channel.reduce_scatter(f"r{dtype}", flat, torch.float32).wait())
    seen["all_reduce"] = channel.all_reduce("sum", torch.arange(5.0) + rank)
    seen["exchange_all"] = channel.exchange_all("small", torch.tensor([rank, 7 * rank]))
    seen["exchange_bytes"] = channel.exchange_bytes("texts", b"x" * rank + b"end")
    told = torch.arange(3.0) if rank == 0 else torch.zeros(3)
    channel.broadcast("values", told)
    seen["broadcast"] = told
    return seen


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_collectives_deliver(ranks: RankPools, world: int) -> None:
    total = sum(range(1, world + 1))
    for rank, seen in enumerate(ranks(world).run(collectives)):
        want = torch.arange(1, world + 1).repeat_interleave(3)
        assert all(torch.equal(got, want.to(dtype)) for got, dtype in zip(seen["gather"], DTYPES, strict=True))
        part = torch.arange(2.0 * world).chunk(world)[rank] * total
        assert all(got.dtype == torch.float32 and torch.equal(got, part) for got in seen["reduce_scatter"])
        assert torch.equal(seen["all_reduce"], torch.arange(5.0) * world + sum(range(world)))
        assert [t.tolist() for t in seen["exchange_all"]] == [[r, 7 * r] for r in range(world)]
        assert seen["exchange_bytes"] == [b"x" * r + b"end" for r in range(world)]
        assert torch.equal(seen["broadcast"], torch.arange(3.0))


def rank_order(rank: int, world: int) -> torch.Tensor:
    """Numbers whose sum depends on the order: 1, 1e8, -1e8 in fp32."""
    flat = torch.full((world * 4,), [1.0, 1e8, -1e8][rank])
    return world_channel().reduce_scatter("order", flat, torch.float32).wait()


def test_sums_run_in_rank_order(ranks: RankPools) -> None:
    want = (torch.tensor(1.0) + 1e8) + -1e8
    for part in ranks(3).run(rank_order):
        assert torch.equal(part, want.expand(4))


def low_precision(rank: int, world: int) -> torch.Tensor:
    flat = torch.full((world * 2,), 1.0 + rank / 128).bfloat16()
    return world_channel().reduce_scatter("low", flat, torch.float32).wait()


def test_low_precision_travels_and_is_summed_in_fp32(ranks: RankPools) -> None:
    want = sum(torch.tensor(1.0 + rank / 128).bfloat16().float() for rank in range(3))
    for part in ranks(3).run(low_precision):
        assert torch.equal(part, want.expand(2)) and part.dtype == torch.float32


def sent(rank: int, world: int) -> list[int]:
    channel, counts = world_channel(), []

    def count(pending: Any) -> None:
        counts.append(channel.bytes_sent)

    count(channel.gather("a", torch.zeros(12 * world)).wait())
    count(channel.reduce_scatter("b", torch.zeros(12 * world), torch.float32).wait())
    count(channel.all_reduce("c", torch.zeros(12 * world)))
    count(channel.broadcast("d", torch.zeros(12)))
    return [after - before for before, after in zip([0, *counts], counts, strict=False)]


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_sent_are_the_minimum(ranks: RankPools, world: int) -> None:
    share = 12 * 4 * (world - 1)
    for rank, counts in enumerate(ranks(world).run(sent)):
        assert counts == [share, share, 2 * share, share if rank == 0 else 0]


def misuse(rank: int, world: int) -> str:
    pending = world_channel().gather("twice", torch.zeros(2 * world))
    pending.wait()
    try:
        pending.wait()
    except ShardError as error:
        return str(error)
    return ""


def test_waiting_twice_raises(ranks: RankPools) -> None:
    assert all("twice" in text for text in ranks(2).run(misuse))


def interleaved(rank: int, world: int) -> list[torch.Tensor]:
    """Two collectives in flight; the ranks wait for them in opposite orders."""
    channel = world_channel()
    fulls = [torch.full((world,), float(10 * k + rank)) for k in range(2)]
    pending = [channel.gather(f"flight {k}", full) for k, full in enumerate(fulls)]
    for k in (0, 1) if rank else (1, 0):
        pending[k].wait()
    return fulls


def test_several_in_flight(ranks: RankPools) -> None:
    for fulls in ranks(2).run(interleaved):
        assert [full.tolist() for full in fulls] == [[0.0, 1.0], [10.0, 11.0]]


def meshes(rank: int, world: int) -> dict[str, Any]:
    square = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    two = topology(square)
    found: dict[str, Any] = {"shard": two.shard.ranks, "replicate": two.replicate.ranks, "ranks": two.ranks}
    found["exchange"] = [int(t) for t in two.exchange_all("all", torch.tensor([rank]))]
    found["bytes"] = two.exchange_bytes("named", str(rank).encode())
    value = torch.tensor([float(rank)])
    two.broadcast("zero", value)
    found["broadcast"] = float(value)
    found["flat"] = topology(square._flatten("all")).shard.ranks
    found["group"] = topology(square["shard"].get_group()).shard.ranks
    for wrong in (dist.init_device_mesh("cpu", (1, 2, 2)), 3):
        try:
            topology(wrong)
        except ShardError as error:
            found[f"refused {type(wrong).__name__}"] = "mesh" in str(error)
    return found


def test_meshes(ranks: RankPools) -> None:
    for rank, found in enumerate(ranks(4).run(meshes)):
        row, column = divmod(rank, 2)
        assert found["shard"] == found["group"] == [2 * row, 2 * row + 1]
        assert found["replicate"] == [column, column + 2] and found["ranks"] == 4
        assert found["exchange"] == found["flat"] == [0, 1, 2, 3] and found["broadcast"] == 0
        assert found["bytes"] == [(r, str(r).encode()) for r in range(4)]
        assert found["refused DeviceMesh"] and found["refused int"]
