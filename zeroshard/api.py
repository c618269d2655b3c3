"""`shard` wires everything: units, runtime, hooks, optimizers."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn, optim

from . import comm, hooks
from .config import DivergenceError, Options, Precision, ShardError
from .guard import Guard
from .memory.ledger import Ledger
from .optimizer import Stepper, listed
from .partition import UnitPlan, clean, keep_fp32_modules, partition
from .runtime import Runtime, Scope
from .unit import Unit

log = logging.getLogger(__name__)


def shard(
    model: nn.Module,
    optimizer: optim.Optimizer | Sequence[optim.Optimizer] | None = None,
    *,
    stage: int = 3,
    mesh: Any = None,
    units: Any = None,
    precision: Precision | None = None,
    reduce: str = "mean",
    prefetch: int = 1,
) -> tuple[nn.Module, Any]:
    """Shards `model` and `optimizer` in place over the ranks of `mesh` and returns them: the same objects.

    Args:
        model: any module. Rank 0's values and buffers become everybody's.
        optimizer: one optimizer, a list of them, or `None` for a model that is not trained.
        stage: 0 replicates everything, 1 shards optimizer state, 2 gradients too, 3 parameters too (ZeRO,
            https://arxiv.org/abs/1910.02054). A choice of memory, never of numbers.
        mesh: `None` the world, a `ProcessGroup`, a 1-D `DeviceMesh` (shard), or a 2-D one (replicate, shard).
        units: what is gathered together: module classes, modules, or patterns on dotted names. `None`: repeated blocks.
        precision: dtypes of compute and reduction. `None` changes no dtype.
        reduce: `"mean"` or `"sum"` of the ranks' gradients.
        prefetch: how many units are gathered ahead of use (stage 3).

    Raises:
        ShardError: an argument that does not fit; its text says what was expected.
        DivergenceError: the ranks did not call with the same model and options.
    """
    options = Options.check(stage, units, precision, reduce, prefetch)
    if not isinstance(model, nn.Module):
        raise ShardError(f"shard takes a torch.nn.Module, got {type(model).__name__}")
    if "_zeroshard" in model.__dict__:
        raise ShardError("this model is sharded already; give all its optimizers to the first call of shard as a list")
    optimizers = _optimizers(model, optimizer)
    guard = Guard()
    plans = partition(model, options)
    topology = comm.topology(mesh, guard, _device(plans))
    _agree(plans, options, topology, guard)
    if topology.ranks > 1:
        _check_tables(model)
    if comm.own_rank() == topology.shard.ranks[0]:
        for text in [*options.ignored, *_outside(model, optimizers)]:
            warnings.warn(text, stacklevel=2)
    runtime = _build(model, plans, options, topology, guard)
    for each in optimizers:
        Stepper(each, runtime)
    return model, optimizer


def _optimizers(model: nn.Module, optimizer: Any) -> list[optim.Optimizer]:
    optimizers = listed(optimizer)
    for each in optimizers:
        held = [id(param) for group in each.param_groups for param in group["params"]]
        if held and not {id(param) for param in model.parameters()}.intersection(held):
            raise ShardError(
                f"optimizer ({type(each).__name__}) holds {len(held)} parameters, none of which is in this model: make it from "
                "model.parameters() of the model that is sharded"
            )
    return optimizers


def _check_tables(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ShardError(
                f"{clean(name)} has max_norm={module.max_norm}: a forward would rewrite the rows that its own rank looks up, "
                "and the ranks' tables would differ. Use max_norm=None, and clip rows after a step inside "
                "`with zeroshard.gathered(model, write=True):`"
            )


def _outside(model: nn.Module, optimizers: list[optim.Optimizer]) -> list[str]:
    """Parameters that no gradient is reduced for, as warnings."""
    inside = {id(param) for param in model.parameters()}
    counts = [
        (type(each).__name__, sum(id(p) not in inside for group in each.param_groups for p in group["params"]))
        for each in optimizers
    ]
    return [
        f"{name} holds {count} parameters that are not in this model: every rank steps them by itself, with gradients of "
        "its own. Give each model an optimizer of its own"
        for name, count in counts
        if count
    ]


def _agree(plans: list[UnitPlan], options: Options, topology: comm.Topology, guard: Guard) -> None:
    """Every rank's model and options, compared before anything else travels."""
    here = {
        "stage": int(options.stage),
        "reduce": options.reduce,
        "prefetch": options.prefetch,
        "precision": str(options.precision),
        "parameters": [
            [names[0], list(param.shape), str(param.dtype), "trainable" if param.requires_grad else "frozen", plan.name]
            for plan in plans
            for param, names in zip(plan.params, plan.names, strict=True)
        ],
        "token": secrets.token_hex(8),
    }
    told = {rank: json.loads(text) for rank, text in topology.exchange_bytes("shard", json.dumps(here).encode())}
    first = min(told)
    token = told[first].pop("token")
    for rank, theirs in sorted(told.items()):
        theirs.pop("token", None)
        for key, value in told[first].items():
            if theirs[key] != value:
                raise DivergenceError(
                    f"shard was called with different {key} on ranks {first} and {rank}: {_difference(value, theirs[key])}"
                )
    guard.start(token, sorted(told), topology.channels)


def _difference(one: Any, two: Any) -> str:
    if isinstance(one, list):
        for a, b in zip(one, two, strict=False):
            if a != b:
                return f"{a} and {b}"
        return f"{len(one)} and {len(two)} parameters"
    return f"{one!r} and {two!r}"


def _device(plans: list[UnitPlan]) -> torch.device:
    """Where the parameters are; for the meta device, where they will be."""
    for plan in plans:
        for param in plan.params:
            if param.device.type != "meta":
                return param.device
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def _build(model: nn.Module, plans: list[UnitPlan], options: Options, topology: comm.Topology, guard: Guard) -> Runtime:
    device = _device(plans)
    modules = {clean(name): module for name, module in model.named_modules()}
    for name, buffer in model.named_buffers():
        if buffer.device.type != "meta" and not buffer.is_sparse:
            values = buffer.detach().contiguous()
            topology.broadcast(f"buffer {clean(name)}", values)
            if values.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(values)
    ledger = Ledger()
    on_meta = [m for m in model.modules() if isinstance(m, nn.RNNBase) and any(p.is_meta for p in m.parameters())]
    for recurrent in on_meta:
        recurrent._flat_weight_refs = []  # weak references would forbid to exchange what is behind a parameter
    units = [Unit(plan, index, topology, options, device, ledger) for index, plan in enumerate(plans)]
    for recurrent in on_meta:
        recurrent._init_flat_weights()
    scopes: list[Scope] = []
    homes: list[nn.Module] = []
    all_alias = all(unit.alias for unit in units)
    for module in dict.fromkeys([model, *(plan.module for plan in plans)]):
        mine = tuple(u for u, plan in zip(units, plans, strict=True) if plan.module is module and not u.alias)
        if mine or (module is model and not all_alias):  # the model's own call is one pass of the schedule
            scopes.append(Scope(len(scopes), mine[0].name if mine else type(model).__name__, mine))
            homes.append(module)
    runtime = Runtime(units, scopes, topology, options, guard, ledger, hooks.at_end_of_backward)
    _tell(runtime)
    if topology.ranks > 1:
        hooks.watch_optimizers(runtime)
    for module, scope in zip(homes, scopes, strict=True):
        hooks.watch_module(module, runtime, scope)
    hooks.watch_batch(model, guard.rank)
    for name, module in modules.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            hooks.watch_indices(module, name, guard.rank)
    compute = options.precision.compute if options.precision is not None else None
    if compute is not None:
        hooks.cast_calls(model, compute, back=False)
        for name in sorted(keep_fp32_modules(modules, options)):
            hooks.cast_calls(modules[name], torch.float32, back=True)
    for unit in units:
        for entry in unit.entries:
            hooks.watch_gradients(entry, runtime)
    model.__dict__["_zeroshard"] = runtime
    model.__dict__["no_sync"] = NoSync(runtime)
    return runtime


def _tell(runtime: Runtime) -> None:
    topology, stage = runtime.topology, int(runtime.options.stage)
    shards, replicas = topology.shard.size, topology.replicate.size
    log.debug("stage %d over %d ranks x %d replicas: %d units", stage, shards, replicas, len(runtime.units))
    for unit in runtime.units:
        numel, kept = sum(entry.slot.numel for entry in unit.entries), unit.held_numel * unit.dtype.itemsize
        log.debug(
            "unit %s: %d parameters, %d numbers, %s used as %s%s; share of this rank %d bytes",
            unit.name, len(unit.entries), numel, unit.dtype, unit.compute, "" if unit.trainable else ", frozen", kept,
        )  # fmt: skip


class NoSync:
    """`with model.no_sync():` gradients accumulate without communication where the stage allows it."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self._runtime.backward.no_sync_depth += 1
        try:
            yield
        finally:
            self._runtime.backward.no_sync_depth -= 1
