"""Schedule: the last pass predicts this one. And what that does: units are gathered while the one before computes."""

import torch
from torch import nn

import zeroshard
from tests.harness import RankPools
from tests.models import Net
from zeroshard.schedule import Schedule


def test_the_first_pass_predicts_nothing_and_the_second_what_the_first_did() -> None:
    schedule = Schedule()
    for expected in ([(), (), ()], [[1], [2], []]):
        schedule.begin("train")
        assert [list(schedule.use("train", key, 1)) for key in (0, 1, 2)] == [list(e) for e in expected]


def test_depth() -> None:
    schedule = Schedule()
    for _ in range(2):
        schedule.begin("train")
        seen = [list(schedule.use("train", key, 2)) for key in (0, 1, 2, 3)]
    assert seen == [[1, 2], [2, 3], [3], []]


def test_the_first_backward_is_predicted_to_go_the_forward_in_reverse() -> None:
    schedule = Schedule()
    schedule.begin("train")
    for key in (0, 1, 2):
        schedule.use("train", key, 1)
    schedule.begin_reversed("backward", "train")
    assert [list(schedule.use("backward", key, 1)) for key in (2, 1, 0)] == [[1], [0], []]


def test_repeated_and_changed_orders() -> None:
    schedule = Schedule()
    schedule.begin("train")
    for key in (0, 1, 1, 2):
        schedule.use("train", key, 1)
    schedule.begin("train")
    assert [list(schedule.use("train", key, 1)) for key in (0, 1, 1, 2)] == [[1], [1], [2], []]
    schedule.begin("train")
    assert list(schedule.use("train", 2, 1)) == []
    assert list(schedule.use("train", 0, 1)) == [1]  # another order: found again from the start
    assert list(schedule.use("train", 7, 1)) == []  # never seen


def test_phases_are_apart() -> None:
    schedule = Schedule()
    schedule.begin("train")
    schedule.use("train", 0, 1)
    schedule.use("train", 1, 1)
    schedule.begin("eval")
    assert list(schedule.use("eval", 0, 1)) == []


def events(rank: int, world: int, prefetch: int) -> list[list[str]]:
    """Of the third step: when each block's unit is asked for and there, and when each block computes."""
    model = Net(depth=4)
    model, optimizer = zeroshard.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, prefetch=prefetch, units=[type(model.blocks[0])]
    )
    log: list[str] = []
    units = [unit for unit in model._zeroshard.units if unit.name.startswith("blocks")]
    for unit in units:
        _log_unit(unit, log)
    for index, block in enumerate(model.blocks):
        block.up.register_forward_pre_hook(lambda module, args, index=index: log.append(f"compute {index}"))
        block.up.register_full_backward_hook(lambda module, i, o, index=index: log.append(f"backward {index}"))
    steps = []
    for _ in range(3):
        log.clear()
        loss = model(torch.ones(2, 7)).pow(2).mean()
        forward = list(log)
        loss.backward()
        steps = [forward, log[len(forward) :]]
        optimizer.step()
        optimizer.zero_grad()
    return steps


def _log_unit(unit: object, log: list[str]) -> None:
    name = unit.name[-1]
    gather, release = unit.gather, unit.release

    def gathering() -> None:
        log.append(f"gather {name}")
        gather()

    def releasing() -> None:
        held = unit.full is not None
        release()
        if held and unit.full is None:
            log.append(f"release {name}")

    unit.gather, unit.release = gathering, releasing


def test_the_next_unit_is_gathered_before_this_one_computes(ranks: RankPools) -> None:
    for forward, backward in ranks(2).run(events, 1):
        assert forward == [
            *["gather 0", "gather 1", "compute 0", "release 0"],
            *["gather 2", "compute 1", "release 1"],
            *["gather 3", "compute 2", "release 2"],
            *["compute 3", "release 3"],
        ]
        asked = [event for event in backward if event.startswith("gather")]
        assert asked == ["gather 3", "gather 2", "gather 1", "gather 0"]
        assert backward.index("gather 2") < backward.index("backward 3")
        assert backward.index("gather 1") < backward.index("backward 2")


def test_without_prefetch_a_unit_is_gathered_when_it_is_used(ranks: RankPools) -> None:
    for forward, _ in ranks(2).run(events, 0):
        assert forward == [f"{what} {k}" for k in range(4) for what in ("gather", "compute", "release")]


def test_two_ahead(ranks: RankPools) -> None:
    for forward, _ in ranks(2).run(events, 2):
        assert forward[:4] == ["gather 0", "gather 1", "gather 2", "compute 0"]
        assert forward.index("gather 3") < forward.index("compute 1")


def prefetched(rank: int, world: int) -> list[int]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)))
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    seen = []
    for _ in range(3):
        before = zeroshard.stats(model)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = zeroshard.stats(model)
        seen.append((after.prefetch_hits - before.prefetch_hits, after.prefetch_misses - before.prefetch_misses))
    return seen


def test_only_the_first_unit_of_a_backward_is_a_miss(ranks: RankPools) -> None:
    """Five blocks; the first one's weight is not needed in backward: 5 uses forward and 4 backward."""
    for first, second, third in ranks(2).run(prefetched):
        assert first == (3, 6)  # the first forward has nothing to go by
        assert second == third == (8, 1)


def flights(rank: int, world: int, adapters: bool) -> list[int]:
    """How many units were on their way over the ranks after each reduction was started."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2), nn.Linear(2, 64)) for _ in range(4)))
    for block in blocks:
        block[0].requires_grad_(not adapters)
    model, optimizer = zeroshard.shard(blocks, torch.optim.SGD(blocks.parameters(), lr=0.1), stage=2)
    backward = model._zeroshard.backward
    issue, seen = backward._issue, []

    def issuing(unit: object) -> None:
        issue(unit)
        seen.append(len(backward._in_flight))

    backward._issue = issuing
    for _ in range(2):
        seen.clear()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_adapters_are_reduced_without_waiting_and_large_units_one_at_a_time(ranks: RankPools) -> None:
    assert ranks(2).run(flights, True) == [[1, 2, 3, 4]] * 2
    assert ranks(2).run(flights, False) == [[1, 1, 1, 1]] * 2
