"""`estimate`: the memory of a rank in closed form, before any process group exists.

What the engine keeps and for how long is told in unit.py and backward.py; the same sums stand here, over the same units
(partition.py) and layouts (layout.py). The optimizer's state is found by a step on meta tensors of the shapes it would get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..config import Options, Precision, ShardError
from ..layout import FlatLayout
from ..optimizer import is_elementwise, without_state
from ..partition import UnitPlan, clean, partition
from ..unit import ALIGN_BYTES
from ..whole import balanced
from .ledger import Bytes

PREFETCH = 1  # `shard`'s default
MakeOptimizer = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


def estimate(
    model: nn.Module,
    *,
    stage: int,
    world_size: int,
    optimizer: MakeOptimizer | optim.Optimizer | None = optim.AdamW,
    precision: Precision | None = None,
    units: Any = None,
) -> Bytes:
    """Bytes per rank of `shard(model, optimizer, stage=stage, ...)` over `world_size` ranks, without activations.

    Args:
        model: any module, not yet sharded; one on the meta device costs nothing.
        optimizer: a class or a function of parameters, `functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)` for
            one with settings; an optimizer, whose first group's settings count; or `None` for a model that is not trained.
        stage, world_size, precision, units: as in `shard`, for a mesh of one axis.

    Returns:
        A mapping with the total as `.total`, of the rank that holds most:
        `parameters`, `buffers`: values that stay (masters, and whole ones where those are kept between uses);
        `gradients`: what `p.grad` keeps. Below stage 2 that is the whole, because `no_sync` accumulates it; without
        `no_sync` stage 1 needs what stage 2 does;
        `optimizer`: its state;
        `gathered`, `reducing`: at most at one time, whole values and whole gradients of the units in use.
        The total is reached in a backward that adds to gradients already there (accumulation).

    Raises:
        ShardError: an argument that does not fit, or an optimizer that cannot be tried out on the meta device.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    >>> estimate(model, stage=3, world_size=2)["optimizer"]  # two moments of half of 8 x (1024 x 1024 + 1024), 16 steps
    33587264
    """
    options = Options.check(stage, units, precision, "mean", PREFETCH)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ShardError(f"world_size={world_size!r}: expected a number of ranks, 1 or more")
    if not isinstance(model, nn.Module):
        raise ShardError(f"estimate takes a torch.nn.Module, got {type(model).__name__}")
    costs = [_UnitCost.of(plan, options, world_size) for plan in partition(model, options)]
    trained = [] if optimizer is None else [cost for cost in costs if cost.plan.trainable]
    state = _state(optimizer, trained, world_size) if trained and optimizer is not None else _State(0, 0, 0)
    buffers = {id(buffer): buffer.numel() * buffer.element_size() for buffer in model.buffers()}
    return Bytes(
        {
            "parameters": sum(cost.stays for cost in costs),
            "buffers": sum(buffers.values()),
            "gradients": sum(cost.gradients for cost in trained),
            "optimizer": state.resident,
            "gathered": max(_gathered(model, costs), state.values),
            "reducing": max(_reducing(costs) if trained else 0, state.gradients),
        }
    )


@dataclasses.dataclass(frozen=True)
class _UnitCost:
    """One unit's bytes on a rank. `whole`: of the buffer that is gathered, 0 where nothing comes and goes."""

    plan: UnitPlan
    layout: FlatLayout
    cut: bool
    stays: int
    whole: int
    gradients: int
    arriving: int  # whole gradients of this rank, on their way
    received: int  # the other ranks' shares of them

    @staticmethod
    def of(plan: UnitPlan, options: Options, world: int) -> _UnitCost:
        stage, master, compute = options.stage, plan.dtype.itemsize, plan.compute.itemsize
        layout = FlatLayout.of([tuple(p.shape) for p in plan.params], world, max(1, ALIGN_BYTES // master))
        cut = stage.shards and world > 1
        releases, casts = cut and stage.release_params, plan.compute != plan.dtype
        held = layout.shard_numel if cut else layout.numel
        stays = held * master if releases else layout.numel * (compute if casts else master) + casts * held * master
        shares = layout.numel if world == 1 or not stage.release_grads else layout.shard_numel
        arriving = layout.numel * compute
        return _UnitCost(
            plan, layout, cut, stays,
            whole=releases * layout.numel * compute,
            gradients=shares * master,
            arriving=arriving,
            received=arriving // world * (world - 1),
        )  # fmt: skip


def _gathered(model: nn.Module, costs: Sequence[_UnitCost]) -> int:
    """In a module's call: its units, those of modules around it, and those of the next module."""
    names = {module: clean(name) for name, module in model.named_modules()}
    homes: dict[str, int] = {}
    for cost in costs:
        if cost.whole:
            homes[names[cost.plan.module]] = homes.get(names[cost.plan.module], 0) + cost.whole
    order = list(homes)
    peak = 0
    for place, home in enumerate(order):
        around = {name for name in order if name in ("", home) or home.startswith(f"{name}.")}
        ahead = set(order[place + 1 : place + 1 + PREFETCH])
        peak = max(peak, sum(homes[name] for name in around | ahead))
    return peak


def _reducing(costs: Sequence[_UnitCost]) -> int:
    """Units on their way over the ranks, together no larger than the largest of all, and the one that arrives meanwhile."""
    most = max((cost.arriving for cost in costs), default=0)
    in_flight: list[_UnitCost] = []
    peak = 0
    for cost in reversed([cost for cost in costs if cost.plan.trainable]):
        peak = max(peak, cost.arriving + sum(c.arriving + c.received for c in in_flight))
        while in_flight and sum(c.arriving for c in (*in_flight, cost)) > most:
            in_flight.pop(0)
        in_flight.append(cost)
    return max(peak, sum(c.arriving + c.received for c in in_flight))


# ------------------------------------------------------------------------------------------ the optimizer's state


@dataclasses.dataclass(frozen=True)
class _State:
    """Bytes of state; and of whole values and gradients during a step, where owners step whole parameters."""

    resident: int
    values: int
    gradients: int


def _state(optimizer: MakeOptimizer | optim.Optimizer, costs: Sequence[_UnitCost], world: int) -> _State:
    wholes = [(cost, i, tuple(param.shape)) for cost in costs for i, param in enumerate(cost.plan.params)]
    dtypes = [cost.plan.dtype for cost, _, _ in wholes]
    instance = _instance(optimizer, _meta([shape for _, _, shape in wholes], dtypes))
    if not any(cost.cut for cost in costs):
        return _State(sum(_state_bytes(instance)), 0, 0)
    if is_elementwise(instance):
        fullest = max(range(world), key=lambda rank: sum(cost.layout.piece(i, rank).numel for cost, i, _ in wholes))
        pieces = [(cost.layout.piece(i, fullest).numel,) for cost, i, _ in wholes]
        return _State(sum(_state_bytes(_instance(optimizer, _meta(pieces, dtypes)))), 0, 0)
    numels = [cost.layout.slots[i].numel for cost, i, _ in wholes]
    owners = balanced(numels, world)
    by_owner, whole = [0] * world, [0] * world
    for owner, state, numel, dtype in zip(owners, _state_bytes(instance), numels, dtypes, strict=True):
        by_owner[owner] += state
        whole[owner] += numel * dtype.itemsize
    return _State(max(by_owner), max(whole), max(whole))


def _meta(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.empty(s, dtype=d, device="meta")) for s, d in zip(shapes, dtypes, strict=True)]
    for param in params:
        param.grad = torch.empty_like(param)
    return params


def _instance(optimizer: MakeOptimizer | optim.Optimizer, params: list[nn.Parameter]) -> optim.Optimizer:
    if isinstance(optimizer, optim.Optimizer):
        return without_state(optimizer, params)
    try:
        made = optimizer(params)
    except RuntimeError:  # fused=True wants to see its device: one number stretched to every shape will do
        stretched = [nn.Parameter(torch.zeros((), dtype=param.dtype).expand(param.shape)) for param in params]
        made = without_state(optimizer(stretched), params)
    except (TypeError, ValueError) as error:
        raise ShardError(f"estimate could not make the optimizer of the model's parameters: {error}") from error
    if not isinstance(made, optim.Optimizer):
        raise ShardError(f"optimizer gave a {type(made).__name__}: expected a torch.optim.Optimizer class or a function to one")
    return made


def _state_bytes(optimizer: optim.Optimizer) -> list[int]:
    """Per parameter, after one step."""
    for group in optimizer.param_groups:
        group.update({name: False for name in ("fused", "foreach", "capturable") if group.get(name)})
    try:
        with NumbersAreOne():
            optimizer.step()
    except Exception as error:
        raise ShardError(
            f"estimate could not try a step of {type(optimizer).__name__} on the meta device: {error}. Use optimizer=None, and "
            "add its state by hand"
        ) from error
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [sum(x.nbytes for x in tree_leaves(optimizer.state[p]) if isinstance(x, torch.Tensor)) for p in params]


class NumbersAreOne(TorchDispatchMode):
    """What looks at a value of a meta tensor sees 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))
