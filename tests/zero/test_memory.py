"""estimate, the ledger and the storages that are really alive agree; nothing grows, nothing is left behind."""

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.harness import RankPools
from tests.models import CASES, adamw, sgd, trainable
from tests.zero.runs import collect
from zeroshard.memory.ledger import CATEGORIES, Ledger, storage_bytes

adafactor = functools.partial(torch.optim.Adafactor, lr=0.01)
WIDTH, BLOCKS = 96, 8


def wide() -> nn.Module:
    """Blocks of 73,824 elements behind a smaller layer: no unit but a block is the largest."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 4))


def live_bytes() -> int:
    """Of all storages that Python can reach on this rank, tensors inside tensors included."""
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        plain = [getattr(x, "piece", x) for x in found]
        return storage_bytes(x for x in plain if x.device.type == "cpu" and type(x) is not zeroshard.sharded.Partial)


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------ the plan and the fact


def planned_and_held(rank: int, item: tuple[int, str, bool, bool]) -> dict[str, Any]:
    stage, kind, low, no_sync = item
    make = {"adamw": adamw, "adafactor": adafactor, "sgd": sgd}[kind]
    precision = zeroshard.Precision(compute=torch.bfloat16) if low else None
    start = live_bytes()
    model = wide()
    world = torch.distributed.get_world_size()
    plan = zeroshard.estimate(model, stage=stage, world_size=world, optimizer=make, precision=precision)
    model, optimizer = zeroshard.shard(model, make(model.parameters()), stage=stage, precision=precision)
    for _ in range(3):
        for sync in (not no_sync, True):
            with contextlib.nullcontext() if sync else model.no_sync():
                model(torch.ones(2, WIDTH)).float().pow(2).mean().backward()
        with_gradients = zeroshard.stats(model).resident_bytes
        optimizer.step()
        optimizer.zero_grad()
    stats = zeroshard.stats(model)
    return {
        "plan": dict(plan) | {"total": plan.total},
        "with gradients": dict(with_gradients),
        "after": dict(stats.resident_bytes) | {"total": stats.resident_bytes.total},
        "peak": dict(stats.peak_bytes) | {"total": stats.peak_bytes.total},
        "alive": live_bytes() - start,
    }


LOOPS = [(stage, kind, False, stage < 2) for stage in (0, 1, 2, 3) for kind in ("adamw", "adafactor", "sgd")]
LOOPS += [(stage, "adamw", True, stage < 2) for stage in (1, 2, 3)]


@pytest.mark.parametrize("world", [1, 2])
def test_the_ledger_the_estimate_and_what_is_alive_agree(ranks: RankPools, world: int) -> None:
    for item, of_ranks in zip(LOOPS, collect(ranks(world), planned_and_held, LOOPS), strict=True):
        for got in of_ranks:
            assert got["after"]["total"] == pytest.approx(got["alive"], rel=0.02, abs=4096), item
            for category in ("parameters", "buffers"):
                assert got["plan"][category] == got["after"][category], (item, category)
            assert got["after"]["gradients"] == got["after"]["gathered"] == got["after"]["reducing"] == 0, item
        peak = {name: max(got["peak"][name] for got in of_ranks) for name in CATEGORIES}
        for category in ("parameters", "optimizer", "gathered"):
            assert peak[category] == of_ranks[0]["plan"][category], (item, category)
        stage, _, low, _ = item
        if world > 1 and stage > 1 and not low:
            assert peak["reducing"] == of_ranks[0]["plan"]["reducing"], item
            assert peak["gradients"] == of_ranks[0]["plan"]["gradients"], item
            total = max(got["peak"]["total"] for got in of_ranks)
            assert total == pytest.approx(of_ranks[0]["plan"]["total"], rel=0.05), item
        for name, peak_bytes in peak.items():
            assert peak_bytes <= 1.35 * of_ranks[0]["plan"][name], (item, name)


def test_states_are_16_bytes_a_parameter_over_the_ranks() -> None:
    """Parameters, gradients and two moments in fp32 at stage 3."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    numel = sum(p.numel() for p in model.parameters())
    for world in (1, 2, 3, 8, 64):
        plan = zeroshard.estimate(model, stage=3, world_size=world)
        assert plan["parameters"] + plan["gradients"] + plan["optimizer"] == pytest.approx(16 * numel / world, rel=0.02)
    assert zeroshard.estimate(model, stage=3, world_size=2, optimizer=None)["gradients"] == 0


@pytest.mark.parametrize("case", CASES)
def test_the_meta_device_gives_the_same_plan(case: str) -> None:
    for stage in (1, 3):
        with torch.device("meta"):
            meta = zeroshard.estimate(CASES[case].build(), stage=stage, world_size=3)
        real = zeroshard.estimate(CASES[case].build(), stage=stage, world_size=3)
        assert dict(real) == dict(meta) and real.total == sum(real.values())


def test_optimizers_of_the_plan() -> None:
    model = wide()
    numel = sum(p.numel() for p in model.parameters())

    def state(optimizer: Any, world: int = 1) -> int:
        return zeroshard.estimate(model, stage=1, world_size=world, optimizer=optimizer)["optimizer"]

    assert state(torch.optim.SGD) == 0
    assert state(sgd) == 4 * numel
    assert state(torch.optim.SGD(model.parameters(), momentum=0.9)) == 4 * numel
    assert state(torch.optim.AdamW) == state(functools.partial(torch.optim.AdamW, fused=True)) > 8 * numel
    assert state(functools.partial(torch.optim.Adam, amsgrad=True)) > 12 * numel
    assert state(torch.optim.Adagrad) > 4 * numel
    assert 0 < state(adafactor, 2) < numel // 8
    with pytest.raises(zeroshard.ShardError, match="optimizer"):
        zeroshard.estimate(model, stage=1, world_size=2, optimizer=lambda params: "adam")
    with pytest.raises(zeroshard.ShardError, match="Muon"):
        zeroshard.estimate(model, stage=1, world_size=2, optimizer=torch.optim.Muon)


def test_wrong_arguments_of_the_plan() -> None:
    for options, word in [({"stage": 4}, "stage"), ({"world_size": 0}, "world_size"), ({"units": ["nothing"]}, "units")]:
        with pytest.raises(zeroshard.ShardError, match=word):
            zeroshard.estimate(wide(), **({"stage": 3, "world_size": 2} | options))


# ------------------------------------------------------------------------------------------ the ledger by itself


def test_a_buffer_counts_until_its_storage_is_gone() -> None:
    ledger = Ledger()
    buffer = torch.empty(100)
    ledger.hold("gathered", buffer)
    view = buffer[3:]
    del buffer
    assert ledger.resident()["gathered"] == 400
    ledger.hold("reducing", view, beside=50)  # the same storage under another name
    assert ledger.resident()["gathered"] == 0 and ledger.resident()["reducing"] == 450
    del view
    assert ledger.resident().total == 0
    assert ledger.peaks()["gathered"] == 400 and ledger.peaks().total == 450


def test_the_peak_of_the_sum_is_not_the_sum_of_peaks() -> None:
    ledger = Ledger()
    for category in ("gathered", "reducing"):
        buffer = torch.empty(25)
        ledger.hold(category, buffer)
        del buffer
    assert ledger.peaks()["gathered"] == ledger.peaks()["reducing"] == ledger.peaks().total == 100


# ------------------------------------------------------------------------------------------ growth and leftovers


def growth(rank: int, stage: int) -> list[int]:
    model = CASES["net"].build()
    model, optimizer = zeroshard.shard(model, adamw(trainable(model)), stage=stage)
    seen = []
    for step in range(200):
        x = torch.ones(3, 7)
        with model.no_sync() if step % 3 == 0 else contextlib.nullcontext():
            model(x).pow(2).mean().backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 5 == 0:
            with torch.no_grad():
                model(x)
        if step % 50 == 49:
            seen.append((live_bytes(), zeroshard.stats(model).resident_bytes.total, len(gc.get_objects())))
    return seen


def test_nothing_grows(ranks: RankPools) -> None:
    for of_ranks in collect(ranks(2), growth, [1, 3]):
        for seen in of_ranks:
            live, held, objects = zip(*seen, strict=True)
            assert len(set(live)) == len(set(held)) == 1, seen
            assert max(objects) - min(objects) < 200, seen


def leftovers(rank: int, item: tuple[str, int]) -> int:
    name, stage = item
    case = CASES[name]
    before = live_bytes()
    model = case.build()
    optimizer = adamw(trainable(model))
    zeroshard.shard(model, optimizer, stage=stage)
    for step in range(2):
        loss = case.loss(model, case.batch(step, 0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not step:
            optimizer.zero_grad()
    with zeroshard.gathered(model):
        pass
    zeroshard.full_state_dict(model)
    with without_gc():
        del model, optimizer, loss
        found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            held = storage_bytes(getattr(x, "piece", x) for x in found)
    return held - before


def test_deleting_model_and_optimizer_frees_everything(ranks: RankPools) -> None:
    """By reference counts alone: the garbage collector is off."""
    items = [(name, stage) for name in ("net", "tied", "lora") for stage in (0, 1, 2, 3)]
    for item, of_ranks in zip(items, collect(ranks(2), leftovers, items), strict=True):
        assert of_ranks == [0, 0], item


def graph_outlives(rank: int, world: int) -> tuple[int, int]:
    model, _ = zeroshard.shard(wide(), None, stage=3)
    kept = model(torch.ones(2, WIDTH))  # a graph that nobody runs backward through
    held = zeroshard.stats(model).resident_bytes["gathered"]
    del kept
    return held, zeroshard.stats(model).resident_bytes["gathered"]


def test_a_kept_graph_keeps_no_whole_values(ranks: RankPools) -> None:
    assert ranks(2).run(graph_outlives) == [(0, 0), (0, 0)]
