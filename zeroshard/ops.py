"""Which torch operation is of which kind: tables, so that `sharded.py` and `parameter.py` hold only the handling."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .config import ShardError

aten = torch.ops.aten


class Kind(enum.Enum):
    """How an operation on a piece gives the answer for the whole."""

    ELEMENTWISE = enum.auto()  # each element by itself
    COPYING = enum.auto()  # the same elements in a new tensor, or as another dtype
    FLAT_VIEW = enum.auto()  # another shape, the same order of elements
    FILLING = enum.auto()  # random values in place
    REDUCTION = enum.auto()  # one number out of all elements
    FOREACH_NORM = enum.auto()
    FINITE_CHECK = enum.auto()  # GradScaler
    EQUALITY = enum.auto()
    OTHER = enum.auto()  # needs the whole


_BY_PACKET: dict[Any, Kind] = {
    aten.clone: Kind.COPYING,
    aten.detach: Kind.COPYING,
    aten.alias: Kind.COPYING,
    aten._to_copy: Kind.COPYING,
    aten.zeros_like: Kind.COPYING,
    aten.ones_like: Kind.COPYING,
    aten.empty_like: Kind.COPYING,
    aten.full_like: Kind.COPYING,
    aten.lift_fresh: Kind.COPYING,
    aten.view: Kind.FLAT_VIEW,
    aten._unsafe_view: Kind.FLAT_VIEW,
    aten.uniform_: Kind.FILLING,
    aten.normal_: Kind.FILLING,
    aten.random_: Kind.FILLING,
    aten.bernoulli_: Kind.FILLING,
    aten.exponential_: Kind.FILLING,
    aten.log_normal_: Kind.FILLING,
    aten.cauchy_: Kind.FILLING,
    aten.geometric_: Kind.FILLING,
    aten._foreach_norm: Kind.FOREACH_NORM,
    aten._amp_foreach_non_finite_check_and_unscale_: Kind.FINITE_CHECK,
    aten.equal: Kind.EQUALITY,
    aten.allclose: Kind.EQUALITY,
    aten.copy_: Kind.ELEMENTWISE,
    aten.zero_: Kind.ELEMENTWISE,
    aten.fill_: Kind.ELEMENTWISE,
    aten.masked_fill: Kind.ELEMENTWISE,
    aten.masked_fill_: Kind.ELEMENTWISE,
    aten.where: Kind.ELEMENTWISE,
    aten.nan_to_num: Kind.ELEMENTWISE,
    aten.nan_to_num_: Kind.ELEMENTWISE,
}


def kind_of(func: Any) -> Kind:
    packet = func.overloadpacket
    if packet in _BY_PACKET:
        return _BY_PACKET[packet]
    if packet in REDUCTIONS:
        return Kind.REDUCTION
    if torch.Tag.pointwise in func.tags:
        return Kind.ELEMENTWISE
    name = packet.__name__
    if name.startswith("_foreach_"):
        single = getattr(aten, name.removeprefix("_foreach_").rstrip("_"), None)
        overload = getattr(single, single.overloads()[0]) if single is not None else None
        if overload is not None and (torch.Tag.pointwise in overload.tags or single in _BY_PACKET):
            return Kind.ELEMENTWISE
        if name in ("_foreach_copy_", "_foreach_zero_"):
            return Kind.ELEMENTWISE
    return Kind.OTHER


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes into."""
    values = list(zip(func._schema.arguments, args, strict=False))
    values += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    targets = [value for argument, value in values if argument.is_write]
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor)]


def is_view(func: Any) -> bool:
    return bool(func._schema.returns) and any(a.alias_info is not None for a in func._schema.arguments)


# ------------------------------------------------------------------------------------------ reductions

# A reduction is called with (func, args, kwargs) and gives None (not over all elements: needs the whole), or a function
# (piece, whole_numel) -> (this rank's part, combine, dtype of the answer); `combine` takes all parts [ranks], fp64.
Combine = Callable[[torch.Tensor], torch.Tensor]
Local = Callable[[torch.Tensor, int], tuple[torch.Tensor, Combine, torch.dtype]]


def argument(func: Any, args: Any, kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, default)
    return default


def _covers_all(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    dims = argument(func, args, kwargs, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    whole = dims is None or not list(dims) or len({d % max(args[0].dim(), 1) for d in dims}) == args[0].dim()
    return whole and not argument(func, args, kwargs, "keepdim", False)


def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Local | None:
    order = argument(func, args, kwargs, "ord", argument(func, args, kwargs, "p", 2))
    order = float(2 if order is None else order)
    if not _covers_all(func, args, kwargs) or order == float("-inf") or order < 0:
        return None
    dtype = argument(func, args, kwargs, "dtype")

    def local(piece: torch.Tensor, _: int) -> tuple[torch.Tensor, Combine, torch.dtype]:
        answer = dtype or piece.dtype
        wide = torch.float32 if piece.dtype in (torch.bfloat16, torch.float16) else None
        norm = torch.linalg.vector_norm(piece, order, dtype=wide) if piece.numel() else piece.new_zeros(())
        if order == float("inf"):
            return norm, torch.amax, answer
        if order == 0:
            return norm, torch.sum, answer
        return norm, lambda parts: parts.pow(order).sum().pow(1 / order), answer

    return local


def _sum(func: Any, args: Any, kwargs: dict[str, Any]) -> Local | None:
    if not _covers_all(func, args, kwargs):
        return None
    dtype = argument(func, args, kwargs, "dtype")
    return lambda piece, _: (piece.double().sum(), torch.sum, dtype or _sum_dtype(piece))


def _mean(func: Any, args: Any, kwargs: dict[str, Any]) -> Local | None:
    if not _covers_all(func, args, kwargs):
        return None
    dtype = argument(func, args, kwargs, "dtype")
    return lambda piece, numel: (piece.double().sum() / numel, torch.sum, dtype or piece.dtype)


def _sum_dtype(piece: torch.Tensor) -> torch.dtype:
    return piece.dtype if piece.is_floating_point() else torch.int64


def _extreme(largest: bool) -> Callable[[Any, Any, dict[str, Any]], Local | None]:
    reduce, lowest = (torch.amax, float("-inf")) if largest else (torch.amin, float("inf"))

    def reduction(func: Any, args: Any, kwargs: dict[str, Any]) -> Local | None:
        if (len(args) > 1 and isinstance(args[1], torch.Tensor)) or not _covers_all(func, args, kwargs):
            return None

        def local(piece: torch.Tensor, _: int) -> tuple[torch.Tensor, Combine, torch.dtype]:
            part = reduce(piece.double()) if piece.numel() else torch.full((), lowest, dtype=torch.float64)
            return part.to(piece.device), reduce, piece.dtype

        return local

    return reduction


def _truth(every: bool) -> Callable[[Any, Any, dict[str, Any]], Local | None]:
    def reduction(func: Any, args: Any, kwargs: dict[str, Any]) -> Local | None:
        if not _covers_all(func, args, kwargs):
            return None
        reduce: Combine = torch.amin if every else torch.amax
        return lambda piece, _: ((piece.all() if every else piece.any()).double(), reduce, torch.bool)

    return reduction


def _count(func: Any, args: Any, kwargs: dict[str, Any]) -> Local | None:
    if not _covers_all(func, args, kwargs):
        return None
    return lambda piece, _: (torch.count_nonzero(piece).double(), torch.sum, torch.int64)


REDUCTIONS: dict[Any, Callable[[Any, Any, dict[str, Any]], Local | None]] = {
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten.sum: _sum,
    aten.mean: _mean,
    aten.max: _extreme(True),
    aten.amax: _extreme(True),
    aten.min: _extreme(False),
    aten.amin: _extreme(False),
    aten.any: _truth(False),
    aten.all: _truth(True),
    aten.count_nonzero: _count,
}


# ------------------------------------------------------------------------------------------ reads that must not be written


class ReadOnly(torch.Tensor):
    """A view of gathered values, which vanish: writing into it would be lost without a word, so it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], ReadOnly) and is_inplace(name):
            raise ShardError(
                f"{name} on a part of a sharded parameter would be lost. Edit inside "
                "`with zeroshard.gathered(model, write=True):`"
            )
        with torch._C.DisableTorchFunctionSubclass():
            plain = tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, ReadOnly) else x, (args, kwargs or {}))
            result = func(*plain[0], **plain[1])
        return read_only(result) if name in VIEW_NAMES else result


def read_only(result: Any) -> Any:
    return tree_map(lambda x: x.as_subclass(ReadOnly) if type(x) is torch.Tensor else x, result)


def is_inplace(name: str) -> bool:
    """By torch's own naming: `add_`, `__iadd__`, `__setitem__`."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_") and name != "requires_grad_"


REFUSED = frozenset(
    [
        *["set_", "resize_", "resize_as_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"],
        *["as_strided_", "fill_diagonal_", "share_memory_", "__dlpack__", "tolist", "numpy"],
    ]
)
"""What needs storage of the whole, or would change the logical shape."""

VIEW_NAMES = frozenset(
    [
        "__getitem__",
        "select",
        "narrow",
        "unbind",
        "chunk",
        "split",
        "tensor_split",
        "view",
        "view_as",
        "reshape",
        "t",
        "transpose",
        "permute",
        "movedim",
        "swapaxes",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "expand",
        "expand_as",
        "diagonal",
        "T",
        "mT",
        "as_strided",
        "unfold",
        "detach",
        "data",
        "hsplit",
        "vsplit",
    ]
)
