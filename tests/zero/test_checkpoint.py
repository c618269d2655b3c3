"""save and load: the same bits at any stage, on any ranks, matched by name; what does not match is named on all ranks."""

import pathlib
import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.harness import RankPools, assert_equal
from tests.models import CASES, adamw, trainable
from tests.zero.checkpoints import OPTIMIZERS, comparable, content, files_in, meet, pair, steps
from zeroshard import DivergenceError, Precision, ShardError

EVERYWHERE = [(4, 3), (3, 2), (2, 1), (2, 3), (1, 3), (1, 0), (2, 0)]  # (ranks, stage)


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ShardError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ the same bits


def save_one(rank: int, world: int, path: str, case: str, optimizer: str, **options: Any) -> dict[str, torch.Tensor]:
    model, opt = pair(case, optimizer, **options)
    ema = zeroshard.EMA(model, 0.5)
    steps(model, opt, case, range(3), rank)
    ema.update()
    zeroshard.save(path, model, opt, extra={"step": 3}, ema=ema)
    return zeroshard.full_state_dict(model)


def load_and_save(rank: int, world: int, path: str, again: str, case: str, optimizer: str, **options: Any) -> Any:
    model, opt = pair(case, optimizer, seed=rank + 5, **options)
    ema = zeroshard.EMA(model, 0.5)
    steps(model, opt, case, range(7, 8), rank)  # state that must give way
    extra = zeroshard.load(path, model, opt, ema=ema)
    zeroshard.save(again, model, opt, extra=extra, ema=ema)
    return extra, zeroshard.full_state_dict(model)


CHECKED = [
    ("net", "adamw", 4, 3),
    ("tied", "nadam", 3, 1),
    ("scalars", "adamw", 2, 0),
    ("scalars", "nadam", 2, 3),
    ("scalars", "asgd", 2, 3),
    ("scalars", "amsgrad", 3, 1),
    ("lora", "sgd", 2, 3),
    ("unused", "adamw", 2, 2),
    ("batchnorm", "sgd", 2, 3),
    ("net", "adafactor", 3, 3),
    ("net", "codes", 2, 2),
    ("gpt", "list", 2, 3),
]


@pytest.mark.parametrize("case, optimizer, world, stage", CHECKED)
def test_loaded_anywhere_and_saved_again_it_is_the_same(
    ranks: RankPools, tmp_path: pathlib.Path, case: str, optimizer: str, world: int, stage: int
) -> None:
    first = str(tmp_path / "first")
    whole = ranks(world).run(save_one, first, case, optimizer, stage=stage)[0]
    want = comparable(content(first))
    for name, value in whole.items():
        assert torch.equal(want["model"][name], value), name
    assert want["optim"]["state"]
    places = EVERYWHERE if case == "net" else random.Random(case + optimizer).sample(EVERYWHERE, 2)
    for number, (other_world, other_stage) in enumerate(places):
        again = str(tmp_path / f"again{number}")
        results = ranks(other_world).run(load_and_save, first, again, case, optimizer, stage=other_stage)
        assert_equal(comparable(content(again)), want)
        for extra, values in results:
            assert extra == {"step": 3}
            assert_equal(values, whole)


def go_on(rank: int, world: int, path: str, case: str, optimizer: str) -> None:
    for stage in (1, 3):
        model, opt = pair(case, optimizer, stage=stage)
        steps(model, opt, case, range(3), rank)
        zeroshard.save(path, model, opt)
        other, other_opt = pair(case, optimizer, seed=5, stage=4 - stage, units=[])
        zeroshard.load(path, other, other_opt)
        for each in ((model, opt), (other, other_opt)):
            steps(*each, case, range(3, 6), rank)
        assert_equal(zeroshard.full_state_dict(other), zeroshard.full_state_dict(model))


@pytest.mark.parametrize("case, optimizer", [("scalars", "adamw"), ("tied", "sgd"), ("net", "adafactor"), ("net", "codes")])
def test_training_goes_on_to_the_bit_at_another_stage_and_unit_split(
    ranks: RankPools, tmp_path: pathlib.Path, case: str, optimizer: str
) -> None:
    ranks(2).run(go_on, str(tmp_path / "checkpoint"), case, optimizer)


def two_dims(rank: int, world: int, folder: str) -> int:
    flat = pair("net", "adamw", stage=3)
    steps(*flat, "net", range(2), 0)
    zeroshard.save(f"{folder}/flat", *flat)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, opt = pair("net", "adamw", seed=5, stage=2, mesh=mesh)
    zeroshard.load(f"{folder}/flat", model, opt)
    zeroshard.save(f"{folder}/mesh", model, opt)
    meet()
    return sum(file.stat().st_size for file in files_in(f"{folder}/mesh"))


def test_replicas_write_once(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    nbytes = ranks(4).run(two_dims, str(tmp_path))[0]
    want = content(tmp_path / "flat")
    assert_equal(comparable(content(tmp_path / "mesh")), comparable(want))
    states = 12 * sum(value.numel() for value in want["model"].values())
    assert states < nbytes < states + 4 * 65536
    sizes = [file.stat().st_size for file in files_in(tmp_path / "mesh") if file.suffix == ".distcp"]
    assert len(sizes) == 4 and min(sizes) > states / 10


def low_precision(rank: int, world: int, path: str) -> None:
    options = {"stage": 3, "precision": Precision(compute=torch.bfloat16)}
    model, opt = pair("net", "adamw", dtype=torch.bfloat16, **options)
    steps(model, opt, "net", range(2), rank, torch.bfloat16)
    zeroshard.save(path, model, opt)
    other, other_opt = pair("net", "adamw", seed=5, dtype=torch.bfloat16, **{**options, "stage": 1})
    zeroshard.load(path, other, other_opt)
    assert all(v.dtype == torch.float32 for s in other_opt.state.values() for v in s.values())
    assert_equal(zeroshard.full_state_dict(other), zeroshard.full_state_dict(model))
    for each in ((model, opt), (other, other_opt)):
        steps(*each, "net", range(2, 4), rank, torch.bfloat16)
    assert_equal(zeroshard.full_state_dict(other), zeroshard.full_state_dict(model))
    narrow, narrow_opt = pair("net", "adamw", dtype=torch.bfloat16, stage=3)
    text = error_of(zeroshard.load, path, narrow, narrow_opt)
    assert "bfloat16" in text and "float32" in text and "embed" in text


def test_masters_and_moments_stay_fp32(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(low_precision, str(tmp_path / "checkpoint"))


# ------------------------------------------------------------------------------------------ groups, extra


def with_groups(order: tuple[int, ...], seed: int = 0) -> tuple[Any, Any]:
    model = CASES["net"].build(seed)
    ends = [*model.embed.parameters(), *model.head.parameters()]
    groups = [{"params": list(model.blocks.parameters()), "lr": 0.1}, {"params": ends}]
    optimizer = torch.optim.AdamW([groups[i] for i in order], lr=0.01)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    return zeroshard.shard(model, optimizer, stage=2)


def options_come_back(rank: int, world: int, path: str) -> None:
    model, opt = with_groups((0, 1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    opt.param_groups[0]["mine"] = {"layers": [1, 2], "name": "blocks"}
    opt.param_groups[1]["lr"] = torch.tensor(0.03)
    steps(model, opt, "net", range(2), rank)
    scheduler.step()
    zeroshard.save(path, model, opt, extra=scheduler.state_dict())
    other, other_opt = with_groups((1, 0), seed=5)
    other_scheduler = torch.optim.lr_scheduler.LambdaLR(other_opt, lambda step: 0.5**step)
    state = zeroshard.load(path, other, other_opt)
    last, first, _ = other_opt.param_groups
    assert first["mine"] == {"layers": [1, 2], "name": "blocks"} and first["initial_lr"] == 0.1 and first["lr"] == 0.05
    assert isinstance(last["lr"], torch.Tensor) and "mine" not in last
    other_scheduler.load_state_dict(state)
    steps(model, opt, "net", range(2, 4), rank)
    steps(other, other_opt, "net", range(2, 4), rank)
    assert_equal(zeroshard.full_state_dict(other), zeroshard.full_state_dict(model))
    other_opt.param_groups[0]["lr"] = 1.0  # the user has the last word
    whole = CASES["net"].build(5)
    _, one_group = zeroshard.shard(whole, adamw(whole.parameters()), stage=2)
    text = error_of(zeroshard.load, path, whole, one_group)
    assert "group" in text and "embed.weight" in text


def test_options_of_groups_in_another_order_come_back(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(options_come_back, str(tmp_path / "checkpoint"))


def own_extra(rank: int, world: int, path: str) -> Any:
    model, opt = pair("net", "adamw", stage=3)
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)
    extra = {"rank": rank, "torch": torch.get_rng_state(), "random": random.getstate(), "numpy": numpy.random.get_state()}
    zeroshard.save(path, model, opt, extra=extra)
    drawn = torch.rand(3).tolist(), random.random(), numpy.random.rand()
    back = zeroshard.load(path, model, opt)
    torch.set_rng_state(back["torch"])
    random.setstate(back["random"])
    numpy.random.set_state(back["numpy"])
    assert back["rank"] == rank and drawn == (torch.rand(3).tolist(), random.random(), numpy.random.rand())
    text = error_of(zeroshard.save, path, model, opt, extra={"fine": 1} if rank else {"bad": print})
    assert "extra" in text and "rank 0" in text
    assert zeroshard.load(path, model)["rank"] == rank


def extra_elsewhere(rank: int, world: int, path: str) -> Any:
    model, opt = pair("net", "adamw", stage=1)
    return zeroshard.load(path, model, opt)["rank"]


def test_each_rank_has_its_own_extra(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "checkpoint")
    ranks(2).run(own_extra, path)
    assert ranks(3).run(extra_elsewhere, path) == [0, 1, 0]
    assert ranks(1).run(extra_elsewhere, path) == [0]


class Counting(torch.nn.Module):
    """Keeps something beside tensors, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.seen = {"batches": 0}
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


def extra_state(rank: int, world: int, path: str) -> None:
    for batches in (4, 0):
        model = Counting()
        model.seen = {"batches": batches}
        model.scratch.fill_(batches)
        zeroshard.shard(model, stage=3)
        if batches:
            zeroshard.save(path, model)
    zeroshard.load(path, model)
    assert model.seen == {"batches": 4} and model.scratch.tolist() == [0, 0]


def test_extra_state_of_modules_comes_back(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(extra_state, str(tmp_path / "checkpoint"))


# ------------------------------------------------------------------------------------------ what does not match


def mismatches(rank: int, world: int, folder: str) -> None:
    model, opt = pair("net", "adamw", stage=3)
    path = f"{folder}/net"
    zeroshard.save(path, model, opt)
    before = zeroshard.full_state_dict(model)

    tied, tied_opt = pair("tied", "adamw", stage=3)
    text = error_of(zeroshard.load, path, tied, tied_opt)
    assert "head.weight" not in text and "tokens.weight" in text and "embed.weight" in text
    half = CASES["net"].build(3)
    half.embed.requires_grad_(False)
    zeroshard.shard(half, half_opt := adamw(trainable(half)))
    assert "group" in (text := error_of(zeroshard.load, path, half, half_opt)) and "embed.weight" in text

    wide = torch.nn.Linear(3, 3)
    zeroshard.shard(wide)
    zeroshard.save(f"{folder}/wide", wide)
    narrow = torch.nn.Linear(3, 2)
    zeroshard.shard(narrow)
    text = error_of(zeroshard.load, f"{folder}/wide", narrow)
    assert "weight" in text and "(3, 3)" in text and "(2, 3)" in text

    other, sgd = pair("net", "sgd", stage=3)
    assert "AdamW" in (text := error_of(zeroshard.load, path, other, sgd)) and "SGD" in text
    zeroshard.save(f"{folder}/weights", other)
    assert "no optimizer" in error_of(zeroshard.load, f"{folder}/weights", other, sgd)
    assert "ema" in error_of(zeroshard.load, path, other, ema=zeroshard.EMA(other, 0.9))
    assert "another model" in error_of(zeroshard.save, path, other, ema=zeroshard.EMA(wide, 0.9))
    assert "not given to zeroshard.shard" in error_of(zeroshard.save, path, other, adamw(other.parameters()))
    assert "nowhere" in error_of(zeroshard.load, f"{folder}/nowhere", other)
    zeroshard.load(path, other)  # parameters alone
    assert_equal(zeroshard.full_state_dict(other), before)


def test_what_does_not_match_is_named(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(mismatches, str(tmp_path))


def different_paths(rank: int, world: int, folder: str) -> str:
    model, opt = pair("net", "adamw", stage=3)
    with pytest.raises(DivergenceError) as caught:
        zeroshard.save(f"{folder}/of_rank_{rank}", model, opt)
    meet()
    assert not list(pathlib.Path(folder).iterdir())
    return str(caught.value)


def test_different_paths_are_a_divergence(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    first, second = ranks(2).run(different_paths, str(tmp_path))
    assert first == second and "of_rank_0" in first and "of_rank_1" in first and "rank 1" in first


def test_all_optimizers_of_the_table_are_checked() -> None:
    assert {optimizer for _, optimizer, _, _ in CHECKED} == set(OPTIMIZERS)
