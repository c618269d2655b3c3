"""Values for one module of a model on the meta device: its own function fills tensors that take its parameters' place."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config import ShardError
from ..partition import clean
from ..runtime import Runtime

REMEDY = (
    "Build the model on the CPU (rank 0's values are everybody's), or take values from files with materialize(model, source) "
    "or load"
)


@dataclasses.dataclass(frozen=True)
class Fill:
    """`call()` gives values to the own parameters and buffers of the module `name`. `how` names it in errors.

    alone: nothing else fills the module, so what its constructor draws is not repeated.
    """

    name: str
    module: nn.Module
    call: Callable[[], Any]
    how: str
    alone: bool = False


def full_name(module: str, leaf: str) -> str:
    return clean(f"{module}.{leaf}" if module else leaf)


def on_meta(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.device.type == "meta"


class Scratch:
    """Memory for the parameters of one module, used again for the next: an allocator would keep some of each."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    def unset(self, params: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Tensors on the CPU like `params`, marked as not filled. They are good until the next call."""
        places = dict(zip(params, itertools.accumulate((_room(p) for p in params.values()), initial=0), strict=False))
        room = sum(_room(param) for param in params.values())
        if room > self._block.numel():
            del self._block  # before there is another one
            self._block = torch.empty(room, dtype=torch.uint8, device="cpu")
        flat = {name: self._block[place:][: params[name].nbytes] for name, place in places.items()}
        return {name: _marked(x.view(params[name].dtype).view(params[name].shape)) for name, x in flat.items()}


def _room(param: nn.Parameter) -> int:
    return -(-param.nbytes // 64) * 64


def values_of(fill: Fill, runtime: Runtime, scratch: Scratch) -> dict[str, torch.Tensor]:
    """Calls it with new tensors on the CPU in place of the module's own parameters, and of its buffers on the meta device.

    -> the values of the parameters it has filled, in `scratch`. Buffers it has filled stay, on the model's device.
    """
    module = fill.module
    params, buffers = dict(module._parameters), dict(module._buffers)
    device = runtime.units[0].shard.device if runtime.units else torch.device("cpu")
    fresh: dict[str, torch.Tensor] = {}
    for leaf, unset in scratch.unset({leaf: param for leaf, param in params.items() if param is not None}).items():
        own = params[leaf]
        assert own is not None
        module._parameters[leaf] = whole = nn.Parameter(unset, requires_grad=own.requires_grad)
        fresh[leaf] = whole
    for leaf, buffer in buffers.items():
        if buffer is not None and on_meta(buffer):
            fresh[leaf] = module._buffers[leaf] = _marked(torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))
    versions = {leaf: tensor._version for leaf, tensor in fresh.items()}
    try:
        fill.call()
        now = {leaf: module._parameters.get(leaf) if leaf in params else module._buffers.get(leaf) for leaf in fresh}
    finally:
        module._parameters.update(params)
    values: dict[str, torch.Tensor] = {}
    for leaf, tensor in fresh.items():
        got = now[leaf]
        touched = got is not None and (got is not tensor or tensor._version != versions[leaf] or not _is_unset(tensor))
        if got is not None and touched and got.is_floating_point() and bool(got.isnan().any()):
            raise ShardError(f"{fill.how} leaves part of {full_name(fill.name, leaf)} as it is. {REMEDY}")
        if leaf not in params:
            module._buffers[leaf] = got.to(device) if got is not None and touched else buffers[leaf]
        elif got is not None and touched:
            values[leaf] = got.detach()
    return values


def _mark(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(_mark(tensor.dtype))


def _is_unset(tensor: torch.Tensor) -> bool:
    same = tensor.isnan() if tensor.is_floating_point() or tensor.is_complex() else tensor == _mark(tensor.dtype)
    return bool(same.all())
