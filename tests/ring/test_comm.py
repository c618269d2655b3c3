"""Agreement and moving data, on one group and on meshes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ring_attention as ra
from ring_attention import comm
from ring_attention.comm import Call, Ring, Team
from tests.harness import RankPools


def teams_of(handle: comm.Group) -> list[Team]:
    return [Team(name) for name in comm.group_names(handle).split("|")]


def moved(rank: int, world: int, two_axes: bool) -> None:
    handle = dist.init_device_mesh("cpu", (2, world // 2)) if two_axes else dist.group.WORLD
    teams = teams_of(handle)
    assert (comm.place(teams), comm.total(teams)) == (rank, world)
    lengths = [3, 0, 2, 4][:world]
    part = torch.arange(lengths[rank]) + 10 * rank
    whole = torch.cat([torch.arange(length) + 10 * r for r, length in enumerate(lengths)])
    assert torch.equal(comm.gather(teams, part, lengths), whole)
    weighted = whole.double() * (rank + 1)
    assert torch.equal(comm.sum_parts(teams, weighted, lengths), part.double() * sum(range(world + 1)))
    values = [torch.randn(5, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    total = comm.sum_over(teams, values[rank])
    assert torch.allclose(total, sum(values), atol=1e-6)
    assert all(torch.equal(told, total) for told in comm.everyones(teams, total))  # the same bits everywhere
    answer = comm.agree(teams, Call({"call": "test"}, (rank, 7)))
    assert answer.lengths == [(r, 7, 0) for r in range(world)]


@pytest.mark.parametrize(("world", "two_axes"), [(1, False), (2, False), (3, False), (4, False), (4, True)])
def test_parts_arrive_in_rank_order(ranks: RankPools, world: int, two_axes: bool) -> None:
    ranks(world).run(moved, two_axes)


def disagreeing(rank: int, world: int) -> list[str]:
    said = []
    for handle in (dist.group.WORLD, dist.init_device_mesh("cpu", (2, 2))):
        teams = teams_of(handle)
        for call in (
            Call({"call": "a", "colour": "red" if rank in (1, 3) else "blue"}),
            Call({"call": "b" if rank == 2 else "a", "colour": "red"}),
            Call({"call": "a"}, problem="nothing works" if rank == 3 else None),
            Call({"call": "a"}, problem="nothing works"),
        ):
            with pytest.raises(ra.RingError) as error:
                comm.agree(teams, call)
            said.append(f"{type(error.value).__name__}: {error.value}")
        comm.agree(teams, Call({"call": "a"}))
    return said


def test_all_say_the_same_and_name_ranks(ranks: RankPools) -> None:
    answers = ranks(4).run(disagreeing)
    assert all(said == answers[0] for said in answers)
    for said in (answers[0][:4], answers[0][4:]):
        assert said[0].startswith("DivergenceError") and "colour: blue on ranks 0, 2, red on ranks 1, 3" in said[0]
        assert "call: a on ranks 0, 1, 3, b on rank 2" in said[1] and "colour" not in said[1]
        assert said[2] == "UsageError: rank 3: nothing works" and said[3] == "UsageError: nothing works"


def misused(rank: int, world: int) -> None:
    team = teams_of(dist.group.WORLD)[0]
    x, y = torch.full((3,), rank), torch.empty(3, dtype=torch.int64)
    pending = team.start([(x, 1 - rank)], [(y, 1 - rank)], comm.KEYS)
    pending.wait()
    assert y.tolist() == [1 - rank] * 3
    with pytest.raises(AssertionError, match="waited for already"):
        pending.wait()
    with pytest.raises(AssertionError, match="ring of one"):
        Ring(None, comm.KEYS).post([], [])
    two = dist.init_device_mesh("cpu", (1, 1, 2))
    with pytest.raises(ra.UsageError, match="3 dims"):
        comm.group_names(two)
    with pytest.raises(ra.UsageError, match="group is None"):
        comm.group_names(None)


def test_misuse_raises(ranks: RankPools) -> None:
    ranks(2).run(misused)


def stalled(rank: int, world: int) -> str:
    if rank == 1:
        import time

        time.sleep(4)
        return ""
    with pytest.raises(ra.PeerError) as error:
        comm.agree(teams_of(dist.group.WORLD), Call({"call": "a"}))
    return str(error.value)


def test_a_rank_that_does_not_come_is_named_when_the_groups_timeout_passes(ranks: RankPools) -> None:
    assert "rank 1" in ranks(2).run(stalled, group_timeout=2, dirty=True)[0]
