"""Cuts a model into units: which parameters are gathered and released together, and around which module's call.

Automatic: the repeated blocks, large leaves (embedding, head) by themselves, and what is left over with the root.
A parameter that modules of several units share belongs to the nearest unit around all of them, so it is gathered once.
Inside one module, parameters of different dtype or trainability are units side by side: a flat buffer has one dtype, and
frozen weights take no part in the reduction.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import torch
from torch import nn

from .config import Options, ShardError

_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(\.|$)")
_REPEATED = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LARGE_LEAF_NUMEL = 1 << 22


def clean(name: str) -> str:
    """The dotted name in the unwrapped model: compile and checkpoint wrappers leave no trace."""
    return _WRAPPERS.sub("", name).rstrip(".")


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """One unit to be. `names[i]` are all dotted names of `params[i]`, the first one being its own."""

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]
    names: tuple[tuple[str, ...], ...]
    dtype: torch.dtype
    compute: torch.dtype
    trainable: bool


def partition(model: nn.Module, options: Options) -> list[UnitPlan]:
    """The units in module order, the root's leftovers first. Every parameter is in exactly one of them."""
    modules = {clean(name): module for name, module in model.named_modules()}
    roots = _chosen(modules, options) if options.units is not None else _automatic(model, modules)
    keep = keep_fp32_modules(modules, options)
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(clean(name))
    groups: dict[tuple[str, torch.dtype, torch.dtype, bool], list[nn.Parameter]] = {}
    for param, all_names in names.items():
        home = _common_home([name.rpartition(".")[0] for name in all_names], roots)
        kept = all(_inside(name.rpartition(".")[0], keep) for name in all_names)
        master, compute = _dtypes(param, kept, options)
        groups.setdefault((home, master, compute, param.requires_grad), []).append(param)
    order = {name: index for index, name in enumerate(["", *[n for n in modules if n]])}
    plans, taken = [], set()
    for (home, master, compute, trainable), params in sorted(groups.items(), key=lambda item: order[item[0][0]]):
        title = home or type(model).__name__
        name, count = title, 2
        while name in taken:
            name, count = f"{title} ({count})", count + 1
        taken.add(name)
        of = tuple(tuple(names[param]) for param in params)
        plans.append(UnitPlan(name, modules[home], tuple(params), of, master, compute, trainable))
    return plans


def keep_fp32_modules(modules: dict[str, nn.Module], options: Options) -> set[str]:
    """Dotted names of the modules that compute in fp32 under `options.precision`."""
    if options.precision is None or options.precision.compute is None:
        return set()
    kept = {name for name, module in modules.items() if isinstance(module, nn.modules.batchnorm._NormBase)}
    for pattern in options.precision.keep_fp32:
        kept |= _matching(pattern, modules, "keep_fp32")
    return kept


def _dtypes(param: nn.Parameter, kept: bool, options: Options) -> tuple[torch.dtype, torch.dtype]:
    """(master, compute). Without a compute dtype nothing changes, whatever the mixture."""
    if options.precision is None or options.precision.compute is None or not param.is_floating_point():
        return param.dtype, param.dtype
    return torch.float32, torch.float32 if kept else options.precision.compute


def _chosen(modules: dict[str, nn.Module], options: Options) -> set[str]:
    roots = {""}
    for unit in options.units or ():
        if isinstance(unit, str):
            roots |= _matching(unit, modules, "units")
            continue
        found = {n for n, m in modules.items() if (isinstance(m, unit) if isinstance(unit, type) else m is unit)}
        if not found:
            raise ShardError(f"units holds {unit if isinstance(unit, type) else type(unit)}, which is not in the model")
        roots |= found
    return roots


def _matching(pattern: str, modules: dict[str, nn.Module], argument: str) -> set[str]:
    rule = re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))
    found = {name for name in modules if name and rule.fullmatch(name)}
    if not found:
        some = ", ".join([name for name in modules if name][:8])
        raise ShardError(f"{argument}: {pattern!r} matches no module; `*` stays within one component. There are {some}, ...")
    return found


def _automatic(model: nn.Module, modules: dict[str, nn.Module]) -> set[str]:
    blocks = _blocks(modules)
    sizes = {name: _numel(module.parameters()) for name, module in modules.items()}
    typical = max((sizes[name] for name in blocks), default=2 * LARGE_LEAF_NUMEL)
    large = {
        name
        for name, module in modules.items()
        if name
        and not _inside(name, blocks)
        and sizes[name] >= min(LARGE_LEAF_NUMEL, typical // 2)
        and any(True for _ in module.parameters(recurse=False))
        and not any(True for _ in module.children())
    }
    return {"", *blocks, *large}


def _blocks(modules: dict[str, nn.Module]) -> set[str]:
    """Children of a container that share a class; outermost, unless one would hold most of the model."""
    total = _numel(modules[""].parameters())
    blocks: set[str] = set()
    for name, module in modules.items():
        if not isinstance(module, _REPEATED) or _inside(name, blocks):
            continue
        kinds: dict[type, list[str]] = {}
        for child_name, child in module.named_children():
            full_name = clean(f"{name}.{child_name}" if name else child_name)
            if full_name in modules and any(True for _ in child.parameters()):  # a shared one has its first name alone
                kinds.setdefault(type(_unwrapped(child)), []).append(full_name)
        for same in kinds.values():
            largest = max(_numel(modules[child].parameters()) for child in same)
            nested = any(isinstance(m, _REPEATED) and len(m) > 1 for child in same for m in modules[child].modules())
            if len(same) > 1 and not (nested and largest > total // 2):
                blocks.update(same)
    return blocks


def _unwrapped(module: nn.Module) -> nn.Module:
    for inner in ("_orig_mod", "_checkpoint_wrapped_module"):
        if isinstance(getattr(module, inner, None), nn.Module):
            return _unwrapped(getattr(module, inner))
    return module


def _common_home(holders: list[str], roots: set[str]) -> str:
    """The innermost unit module around all of `holders`."""
    return max((root for root in roots if all(_inside(holder, {root}) for holder in holders)), key=len)


def _inside(name: str, roots: Iterable[str]) -> bool:
    return any(root == "" or name == root or name.startswith(f"{root}.") for root in roots)


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)
