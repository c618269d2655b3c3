"""Checkpoints are exchanged with torch's own tools: `dcp_to_torch_save`, and `fully_shard` in both directions."""

import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import zeroshard
from tests.harness import RankPools, assert_equal
from tests.models import CASES, adamw
from tests.zero.checkpoints import content, pair, steps


def fully_sharded(seed: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASES["net"].build(seed)
    mesh = dist.init_device_mesh("cpu", (world,))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh)
    return model, adamw(model.parameters())


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def assert_same_training(ours: Any, theirs: Any, which: range, rank: int) -> None:
    for each in (ours, theirs):
        steps(*each, "net", which, rank)
    whole = {name: param.full_tensor().detach() for name, param in theirs[0].named_parameters()}
    assert_equal(zeroshard.full_state_dict(ours[0]), whole, atol=1e-6)


def exchange(rank: int, world: int, folder: str) -> None:
    ours = pair("net", "adamw", stage=3)
    steps(*ours, "net", range(2), rank)
    zeroshard.save(f"{folder}/ours", *ours)
    theirs = fully_sharded(5, world)
    steps(*theirs, "net", range(7, 8), rank)
    state = states(*theirs)
    dcp.load(state, checkpoint_id=f"{folder}/ours")
    set_model_state_dict(theirs[0], state["model"])
    set_optimizer_state_dict(*theirs, state["optim"])
    assert_same_training(ours, theirs, range(2, 4), rank)

    dcp.save(states(*theirs), checkpoint_id=f"{folder}/theirs")
    for stage in (1, 3):
        again = pair("net", "adamw", seed=6, stage=stage)
        assert zeroshard.load(f"{folder}/theirs", *again) is None
        assert_equal(again[1].param_groups[0]["weight_decay"], 0.1)
        whole = {name: param.full_tensor().detach() for name, param in theirs[0].named_parameters()}
        assert_equal(zeroshard.full_state_dict(again[0]), whole)
    assert_same_training(again, theirs, range(4, 6), rank)


def test_fully_shard_loads_ours_and_is_loaded(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    ranks(2).run(exchange, str(tmp_path))


def save_tied(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    model, optimizer = pair("tied", "adamw", stage=3)
    steps(model, optimizer, "tied", range(1), rank)
    zeroshard.save(path, model, optimizer, extra={"step": 1})
    return zeroshard.full_state_dict(model)


def test_dcp_to_torch_save_gives_a_state_dict_of_the_plain_model(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    whole = ranks(3).run(save_tied, str(tmp_path / "checkpoint"))[0]
    state = content(tmp_path / "checkpoint")
    plain = CASES["tied"].build(5)
    plain.load_state_dict(state["model"], strict=True)
    assert_equal(dict(plain.state_dict()), whole)
    plain.load_state_dict(whole, strict=True)
    assert set(state["optim"]["state"]) == {name for name, _ in plain.named_parameters()}
    assert state["optim"]["param_groups"][0]["params"] == [name for name, _ in plain.named_parameters()]


def load_converted(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    model, _ = pair("tied", "adamw", seed=5, stage=3)
    assert zeroshard.load(path, model) is None
    return zeroshard.full_state_dict(model)


def test_what_torch_save_wrote_is_loaded_after_torch_save_to_dcp(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    want = CASES["tied"].build(3).state_dict()
    torch.save({"model": want}, tmp_path / "plain.pt")
    torch_save_to_dcp(tmp_path / "plain.pt", tmp_path / "checkpoint")
    for whole in ranks(2).run(load_converted, str(tmp_path / "checkpoint")):
        assert_equal(whole, dict(want))
