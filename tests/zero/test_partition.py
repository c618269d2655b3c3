"""Which parameters make a unit: repeated blocks, large leaves, tied, frozen, dtypes, and what the user asks for."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import zeroshard
from tests.models import CASES, Block, Net
from tests.zero.random_models import Drawn, drawn
from zeroshard.config import Options
from zeroshard.partition import UnitPlan, clean, partition


def plans(model: nn.Module, units: Any = None, precision: Any = None) -> dict[str, UnitPlan]:
    found = partition(model, Options.check(3, units, precision, "mean", 1))
    assert len({plan.name for plan in found}) == len(found), "two units of one name"
    return {plan.name: plan for plan in found}


def held(plan: UnitPlan) -> set[str]:
    return {names[0] for names in plan.names}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_in_exactly_one_unit(case: str) -> None:
    model = CASES[case].build()
    found = [param for plan in plans(model).values() for param in plan.params]
    assert len(found) == len({id(p) for p in found}) and {id(p) for p in found} == {id(p) for p in model.parameters()}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=drawn)
def test_drawn_models(problem: Drawn) -> None:
    model = problem.model()
    for units in (None, [], ["*"], [nn.Linear, nn.LayerNorm] if _has(model) else None):
        found = plans(model, units)
        names = {name for plan in found.values() for all_names in plan.names for name in all_names}
        assert names == {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for plan in found.values():
            assert {(p.dtype, p.requires_grad) for p in plan.params} == {(plan.dtype, plan.trainable)}
            inside = {id(p) for p in plan.module.parameters()}
            assert all(id(p) in inside for p in plan.params)


def _has(model: nn.Module) -> bool:
    kinds = {type(m) for m in model.modules()}
    return nn.Linear in kinds and nn.LayerNorm in kinds


def test_repeated_blocks_are_units_and_the_rest_is_the_root() -> None:
    found = plans(Net(depth=3))
    assert list(found) == ["Net", "blocks.0", "blocks.1", "blocks.2"]
    assert held(found["Net"]) == {"embed.weight", "embed.bias", "head.weight", "head.bias"}


def test_large_leaves_are_units_of_their_own() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"tokens": nn.Embedding(5000, 1024), "norm": nn.LayerNorm(1024)})
        model["head"] = nn.Linear(1024, 5000, bias=False)
    found = plans(model)
    assert held(found["tokens"]) == {"tokens.weight"} and held(found["head"]) == {"head.weight"}


def test_a_tied_pair_is_held_once_by_the_unit_around_both() -> None:
    model = CASES["tied"].build()
    (unit,) = [plan for plan in plans(model).values() if "tokens.weight" in held(plan)]
    index = unit.names.index(("tokens.weight", "head.weight"))
    assert unit.module is model and unit.params[index] is model.head.weight


def test_trainable_and_frozen_are_apart() -> None:
    found = plans(CASES["frozen"].build())
    assert not found["blocks.0"].trainable
    assert found["blocks.1"].trainable and not found["blocks.1 (2)"].trainable
    assert held(found["blocks.1 (2)"]) == {"blocks.1.up.bias"}


def test_dtypes_are_apart_unless_precision_makes_them_one() -> None:
    model = Net(depth=2)
    model.blocks[0].up.to(torch.bfloat16)
    assert {plan.dtype for name, plan in plans(model).items() if name.startswith("blocks.0")} == {
        torch.float32,
        torch.bfloat16,
    }
    found = plans(model, precision=zeroshard.Precision(compute=torch.bfloat16, keep_fp32=("blocks.*.norm",)))
    assert {plan.dtype for plan in found.values()} == {torch.float32}
    assert {plan.compute for name, plan in found.items() if held(plan) & {"blocks.1.norm.weight"}} == {torch.float32}
    assert {plan.compute for name, plan in found.items() if held(plan) & {"blocks.1.up.weight"}} == {torch.bfloat16}


def test_batch_norm_computes_in_fp32() -> None:
    found = plans(CASES["batchnorm"].build(), precision=zeroshard.Precision(compute=torch.bfloat16))
    for plan in found.values():
        normalizes = {name.startswith("blocks") and name.split(".")[2] == "1" for name in held(plan)}
        assert normalizes == {plan.compute == torch.float32}, plan.name


class Bigger(Block):
    pass


@pytest.mark.parametrize(
    ("units", "names"),
    [
        ([], ["Net"]),
        (["blocks.*"], ["Net", "blocks.0", "blocks.1"]),
        (["*"], ["embed", "blocks", "head"]),  # `*` stays within one component
        (["blocks.0", "blocks.0.up"], ["Net", "blocks.0", "blocks.0.up"]),  # a match inside a match
        ([Block], ["Net", "blocks.0", "blocks.1"]),  # subclasses too
        ([nn.LayerNorm, "head"], ["Net", "blocks.0.norm", "blocks.1.norm", "head"]),
    ],
)
def test_units_as_asked_for(units: list[Any], names: list[str]) -> None:
    model = Net(depth=2)
    model.blocks[1] = Bigger()
    assert list(plans(model, units)) == names


def test_a_module_is_a_unit() -> None:
    model = Net(depth=2)
    assert list(plans(model, [model.blocks[1]])) == ["Net", "blocks.1"]


@pytest.mark.parametrize("units", [["blocks.*.nothing"], ["block"], [nn.LSTM], [nn.Linear(2, 2)], [3]])
def test_units_that_are_not_in_the_model_are_refused(units: Any) -> None:
    with pytest.raises(zeroshard.ShardError, match="units"):
        plans(Net(depth=2), units)


def test_wrappers_leave_no_trace_in_names() -> None:
    assert clean("_orig_mod.blocks.0._checkpoint_wrapped_module.up.weight") == "blocks.0.up.weight"
    assert clean("blocks.0._orig_mod") == "blocks.0" and clean("_orig_mod") == ""
    assert clean("my_orig_mod.weight") == "my_orig_mod.weight"
    model = Net(depth=2)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block)  # type: ignore[assignment]
    assert list(plans(model)) == ["Net", "blocks.0", "blocks.1"]
    assert "blocks.1.up.weight" in held(plans(model)["blocks.1"])


def test_parametrized_modules() -> None:
    model = Net(depth=2)
    for block in model.blocks:
        weight_norm(block.up)
    found = plans(model)
    assert "blocks.0.up.parametrizations.weight.original0" in held(found["blocks.0"])
