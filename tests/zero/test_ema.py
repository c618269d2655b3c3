"""EMA: the average of the weights, at every stage; it communicates nothing, and a swap leaves no trace."""

import pathlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import zeroshard
from tests.harness import RankPools, assert_equal
from tests.models import CASES
from tests.zero.checkpoints import pair, steps
from zeroshard import EMA, Precision, ShardError


@contextmanager
def silent(model: torch.nn.Module) -> Iterator[None]:
    """Nothing is sent inside."""
    channels = model.__dict__["_zeroshard"].topology.channels
    before = [channel.bytes_sent for channel in channels]
    yield
    assert [channel.bytes_sent for channel in channels] == before


def average(rank: int, world: int, case: str) -> None:
    for stage in (0, 1, 2, 3):
        for precision in (None, Precision(compute=torch.bfloat16)):
            model, opt = pair(case, "sgd", stage=stage, precision=precision)
            ema = EMA(model, 0.75)
            want = zeroshard.full_state_dict(model)
            for step in range(3):
                steps(model, opt, case, range(step, step + 1), rank)
                with silent(model):
                    ema.update()
                for name, value in zeroshard.full_state_dict(model).items():
                    want[name] = want[name] * 0.75 + value * 0.25 if value.is_floating_point() else value
            before = zeroshard.full_state_dict(model)
            with ema.applied():
                now = zeroshard.full_state_dict(model)
                assert_equal(
                    {n: now[n] for n, _ in model.named_parameters()}, {n: want[n] for n, _ in model.named_parameters()}, 1e-6
                )
                with torch.no_grad():
                    seen = CASES[case].loss(model, CASES[case].batch(9, 0))
            assert_equal(zeroshard.full_state_dict(model), before)
            plain = CASES[case].build(5)
            plain.load_state_dict(want)
            if precision is None:
                assert_equal(seen, CASES[case].loss(plain, CASES[case].batch(9, 0)).detach(), 1e-5)
            steps(model, opt, case, range(3, 4), rank)


@pytest.mark.parametrize("case", ["tied", "frozen", "lora"])
def test_the_average_and_its_swap(ranks: RankPools, case: str) -> None:
    ranks(2).run(average, case)


def comes_back(rank: int, world: int, path: str) -> None:
    model, opt = pair("net", "adamw", stage=3)
    ema = EMA(model, 0.5)
    for step in range(2):
        steps(model, opt, "net", range(step, step + 1), rank)
        ema.update()
    zeroshard.save(path, model, opt, ema=ema)
    other, other_opt = pair("net", "adamw", seed=5, stage=1)
    other_ema = EMA(other, 0.5)
    zeroshard.load(path, other, other_opt, ema=other_ema)
    for each, each_opt, each_ema in ((model, opt, ema), (other, other_opt, other_ema)):
        steps(each, each_opt, "net", range(2, 3), rank)
        each_ema.update()
    with ema.applied(), other_ema.applied():
        assert_equal(zeroshard.full_state_dict(other), zeroshard.full_state_dict(model))


def test_the_average_comes_back_from_a_checkpoint(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(comes_back, str(tmp_path / "checkpoint"))


def in_low_precision(rank: int, world: int) -> None:
    model = torch.nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zeroshard.shard(model, optimizer, stage=3)
    with zeroshard.gathered(model, write=True):
        model.weight.data.fill_(1.0)
    ema = EMA(model, 0.999)
    with zeroshard.gathered(model, write=True):
        model.weight.data.fill_(2.0)
    for _ in range(1000):
        ema.update()
    with ema.applied():
        value = zeroshard.full_state_dict(model)["weight"]
    assert value.dtype == torch.bfloat16 and torch.all((value - 1.632).abs() < 0.01), value


def test_the_average_of_low_precision_weights_is_kept_in_fp32(ranks: RankPools) -> None:
    ranks(2).run(in_low_precision)


def misuse(rank: int, world: int) -> None:
    model, _ = pair("net", "sgd", stage=3)
    ema = EMA(model, 0.5)
    with ema.applied():
        with pytest.raises(ShardError, match=r"inside applied"):
            ema.update()
        with pytest.raises(ShardError, match=r"inside applied"), ema.applied():
            pass
    with pytest.raises(ShardError, match=r"from 0 to 1"):
        EMA(model, 1.5)
    with pytest.raises(ShardError, match=r"EMA takes a model that zeroshard.shard"):
        EMA(torch.nn.Linear(2, 2), 0.5)


def test_misuse_raises(ranks: RankPools) -> None:
    ranks(1).run(misuse)
