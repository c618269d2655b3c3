"""`zeroshard.trace`: what is on which lane under which name, in which order, and inside of what; never how long it took."""

import json
import logging
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from ring_attention import ContextParallel
from tests.harness import RankPools, assert_equal
from zeroshard.layout import FlatLayout

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
LOGGERS = [logging.getLogger(f"{package}.events") for package in ("zeroshard", "ring_attention")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in BLOCKS)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")


def sharded(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def left_over() -> int:
    """Global hooks and listeners."""
    module, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    hooks = [module._global_forward_hooks, module._global_forward_pre_hooks]
    hooks += [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    return sum(map(len, hooks)) + sum(len(logger.handlers) for logger in LOGGERS)


def steps_traced(rank: int, world: int, stage: int, folder: str) -> dict:
    model, optimizer = sharded(stage)
    step(model, optimizer, rank)
    before, hooks = zeroshard.stats(model), left_over()
    with zeroshard.trace(pathlib.Path(folder, "trace.json")):
        step(model, optimizer, rank)
    assert left_over() == hooks
    after, values = zeroshard.stats(model), zeroshard.full_state_dict(model)
    plain, plain_optimizer = sharded(stage)
    for _ in range(2):
        step(plain, plain_optimizer, rank)
    assert_equal(values, zeroshard.full_state_dict(plain))
    return {"gathers": after.gathers - before.gathers, "reductions": after.reductions - before.reductions}


class Trace:
    """A trace file, checked as it is read: lanes are named, events are in order and nest."""

    def __init__(self, path: pathlib.Path):
        content = json.loads(path.read_text())
        events = content["traceEvents"]
        self.rank = content["otherData"]["rank"]
        self.lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.events = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in events} == {self.rank}
        assert [event["ts"] for event in self.events] == sorted(event["ts"] for event in self.events)
        for lane in self.lanes.values():
            for inner, outers in self.nested(lane):
                assert all(inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] for outer in outers), (inner, outers)

    def on(self, lane: str) -> list[dict]:
        """Events of a lane and of its further rows."""
        return [e for e in self.events if self.lanes[e["tid"]].split()[0] == lane]

    def nested(self, lane: str) -> Iterator[tuple[dict, list[dict]]]:
        """Each event of one row with those around it, the outermost first."""
        around: list[dict] = []
        for event in (e for e in self.events if self.lanes[e["tid"]] == lane):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            yield event, list(around)
            around.append(event)

    def names(self, start: str) -> list[str]:
        return [e["name"] for e in self.on("compute") if e["name"].startswith(start)]


@pytest.mark.parametrize("stage", [1, 3])
def test_lanes_names_order_and_nesting(ranks: RankPools, tmp_path: pathlib.Path, stage: int) -> None:
    counts = ranks(2).run(steps_traced, stage, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.rank0.json", "trace.rank1.json"]
    for rank, count in enumerate(counts):
        trace = Trace(tmp_path / f"trace.rank{rank}.json")
        assert trace.rank == rank
        assert {lane.split()[0] for lane in trace.lanes.values()} == {"compute", "gather", "reduce", "other"}
        assert trace.names("forward") == ["forward Net", *(f"forward {name}" for name in BLOCKS)]
        assert trace.names("backward") == ["backward", "backward Net", *(f"backward {name}" for name in reversed(BLOCKS))]
        assert trace.names("step") == ["step AdamW"]
        for event, around in trace.nested("compute"):
            kind, _, unit = event["name"].partition(" ")
            inside = [outer["name"] for outer in around]
            if kind == "forward" and unit in BLOCKS:
                assert inside == ["forward Net"]
            elif (kind == "backward" and unit) or event["name"] == "wait: end of backward":
                assert inside == ["backward"]
        gathers, reduces = (Counter(e["args"]["unit"] for e in trace.on(lane)) for lane in ("gather", "reduce"))
        assert gathers.total() == count["gathers"] and reduces.total() == count["reductions"]
        assert set(gathers) == set(reduces) == {"Net", *BLOCKS}
        if stage == 3:
            assert {gathers[name] for name in BLOCKS} == {2}, "once for forward, once for backward"
            waits = [around[-1]["name"] for e, around in trace.nested("compute") if e["name"] == "wait: gather blocks.1"]
            assert waits == ["forward blocks.1", "backward blocks.1"]
        else:
            waits = [around[0]["name"] for e, around in trace.nested("compute") if e["name"].startswith("wait: gather")]
            assert waits == ["step AdamW"] * 4, "stepped shards are sent to everybody"


def test_exposed_and_hidden_make_up_a_transfer(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(steps_traced, 3, str(tmp_path))
    trace = Trace(tmp_path / "trace.rank1.json")
    moved = [event for lane in ("gather", "reduce") for event in trace.on(lane)]
    sizes = _half_units()
    for event in moved:
        told = event["args"]
        assert told["exposed_us"] >= 0 and told["hidden_us"] >= 0
        assert told["exposed_us"] + told["hidden_us"] == pytest.approx(event["dur"], abs=0.01)
        assert told["bytes_received"] == sizes[told["unit"]], "the other rank's half"
        waits = [e for e in trace.on("compute") if e["name"] == f"wait: {event['name']}" and e["ts"] >= event["ts"]]
        assert waits[0]["dur"] == pytest.approx(told["exposed_us"], abs=0.01)


def _half_units() -> dict[str, int]:
    """Bytes of half a unit, padded to 64 bytes a parameter and to whole shards."""
    model = Net()
    shapes = {name: [tuple(p.shape) for p in model.get_submodule(name).parameters()] for name in BLOCKS}
    shapes["Net"] = [tuple(p.shape) for p in model.head.parameters()]
    return {name: FlatLayout.of(each, 2, 16).shard_numel * 4 for name, each in shapes.items()}


def ring_traced(rank: int, world: int, folder: str) -> None:
    model, _ = sharded(3)
    cp = ContextParallel(torch.distributed.group.WORLD, strategy="ring")
    with zeroshard.trace(f"{folder}/trace.json"):
        x = cp.shard(torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0)))
        with cp:
            loss = model(x).square().mean()
        loss.backward()


def test_steps_of_the_ring_are_inside_of_units(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(ring_traced, str(tmp_path))
    for rank in range(2):
        trace = Trace(tmp_path / f"trace.rank{rank}.json")
        steps = [(e["name"], around[-1]["name"]) for e, around in trace.nested("compute") if e["name"].startswith("ring step")]
        in_order = [f"forward {name}" for name in BLOCKS] + [f"backward {name}" for name in reversed(BLOCKS)]
        assert steps == [(f"ring step {number}", unit) for unit in in_order for number in (0, 1)]
        moved = Counter(event["name"] for event in trace.on("ring"))
        peer = f"rank {1 - rank}"
        assert moved == {f"keys from {peer}": 6, f"gradients from {peer}": 3}, "keys again for backward, gradients go home"


def profiled(rank: int, world: int) -> set[str]:
    model, optimizer = sharded(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, zeroshard.trace():
        step(model, optimizer, rank)
    return {event.name for event in profile.events()}


def test_the_profiler_has_the_same_names(ranks: RankPools) -> None:
    for names in ranks(2).run(profiled):
        assert {"forward Net", "forward blocks.1", "backward blocks.1", "wait: gather blocks.1", "step AdamW"} <= names


def test_an_error_leaves_a_whole_file_and_nothing_else(tmp_path: pathlib.Path) -> None:
    """In this process, one rank: the file has the name that was given."""
    model, optimizer = sharded(3)
    x = torch.randn(1, 4, 16)
    with pytest.raises(ZeroDivisionError), zeroshard.trace(tmp_path / "trace.json"):
        with pytest.raises(ValueError, match="on purpose"):
            Broken.apply(model.blocks[1](model.blocks[0](x))).sum().backward()
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 4, 3))  # of another width
        with pytest.raises(ValueError, match="on purpose"):
            model.blocks[1].register_full_backward_pre_hook(lambda *_: Broken.backward(None, x))
            model(x).sum().backward()
        model.blocks[1]._backward_pre_hooks.clear()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    trace = Trace(tmp_path / "trace.json")
    assert set(trace.lanes.values()) == {"compute"}, "nothing moves on one rank"
    outermost = [event["name"] for event, around in trace.nested("compute") if not around]
    assert outermost == ["forward Net", "forward Net", "backward", "forward Net", "backward", "step AdamW"]
    assert left_over() == 0


def test_a_folder_that_is_not_there_is_told_first(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"), zeroshard.trace(tmp_path / "nowhere" / "trace.json"):
        raise AssertionError("the block was entered")
    assert left_over() == 0


def logged(rank: int, world: int, stage: int) -> list[str]:
    records: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zeroshard")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        model, optimizer = sharded(stage)
        step(model, optimizer, rank)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return records


def test_debug_says_what_was_found_and_chosen(ranks: RankPools, capfd: pytest.CaptureFixture[str]) -> None:
    for records in ranks(2).run(logged, 2):
        text = "\n".join(records)
        assert "stage 2 over 2 ranks x 1 replicas: 4 units" in text and "AdamW steps pieces of parameters" in text
        assert all(f"unit {name}: 4 parameters" in text for name in BLOCKS)
    sharded(3)
    assert capfd.readouterr() == ("", ""), "quiet by default"


def test_settings_that_are_ignored_are_told() -> None:
    model, other = Net(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.warns(UserWarning) as told:
        zeroshard.shard(model, optimizer, stage=2, prefetch=3, precision=zeroshard.Precision(keep_fp32=("head",)))
    texts = [str(each.message) for each in told]
    assert len(texts) == 3 and all(each.filename == __file__ for each in told), texts
    assert "prefetch=3 is ignored" in texts[0] and "keep_fp32" in texts[1] and "SGD holds 2 parameters" in texts[2]
