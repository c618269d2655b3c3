"""ShardedParameter: the class of a parameter while its unit is not full.

It is the very object the user made; only its class and its data are exchanged (unit.py), so lists of parameters, optimizer
groups, hooks and `requires_grad` live on. Here is what each torch call on it does:

    asked about       shape, device, requires_grad, hooks: as on any parameter; dtype is the master's; grad is the reduced one
    written in place  on the piece, masters included
    used in grad mode the unit is gathered on the spot and the whole takes part in the graph
    used without      element-wise work and reductions on the piece, the rest on the whole, gathered on the spot
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from . import ops
from .config import ShardError
from .sharded import Sharded


class Entry(Protocol):
    """What the engine keeps for a parameter (entry.py)."""

    name: str

    def value(self) -> Sharded: ...

    def dtype(self) -> torch.dtype: ...

    def get_grad(self) -> torch.Tensor | None: ...

    def set_grad(self, grad: torch.Tensor | None) -> None: ...

    def set_data(self, data: torch.Tensor) -> None: ...

    def call_with_whole(self, func: Any, args: Any, kwargs: Any) -> Any: ...


class ShardedParameter(nn.Parameter):
    """A parameter of which this rank holds a piece. Its storage is one NaN stretched to the logical shape."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _AS_IS:
            return plain(func, args, kwargs)
        special = _SPECIAL.get(func)
        if special is not None and isinstance(args[0], ShardedParameter):
            return special(*args, **kwargs)
        return compute(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Parameter containing:\n{entry_of(self).value()!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return entry_of(self).value().__reduce_ex__(protocol)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # torch does not ask __torch_function__ about this one
        return _refuse("set_")(self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardError(
            f"copy.deepcopy of {entry_of(self).name}, which is sharded. For an average of the weights use "
            "zeroshard.EMA(model, decay); for a copy, load zeroshard.full_state_dict(model) into an unsharded model"
        )


def entry_of(param: torch.Tensor) -> Entry:
    entry = param._zeroshard()  # type: ignore[attr-defined]
    if entry is None:
        raise ShardError("the model that this sharded parameter belonged to is gone")
    return entry


def plain(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    name = func.__self__.__name__ if name == "__get__" else name  # p.T
    leaves = tree_leaves((args, kwargs))
    params = [leaf for leaf in leaves if isinstance(leaf, ShardedParameter)]
    if name in ops.REFUSED:
        _refuse(name)(params[0])
    target = (*args, *kwargs.values())[:1] if ops.is_inplace(name) else ()
    written = [leaf for leaf in tree_leaves((target, kwargs.get("out"))) if isinstance(leaf, ShardedParameter)]
    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in leaves if isinstance(x, torch.Tensor))
    if written:
        if tracked and getattr(func, "__module__", "") != "torch.nn.init" and any(param.requires_grad for param in written):
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if func(*tree_map(_value, args), **tree_map(_value, kwargs)) is None:
            return None
        return kwargs["out"] if "out" in kwargs else target[0]
    mixed = any(isinstance(x, torch.Tensor) and x.dim() and not isinstance(x, (ShardedParameter, Sharded)) for x in leaves)
    if not tracked and not mixed and (name in _PIECEWISE or name.startswith("_foreach_")):
        return func(*tree_map(_value, args), **tree_map(_value, kwargs))
    result = entry_of(params[0]).call_with_whole(func, args, kwargs)
    if not tracked and name in ops.VIEW_NAMES:
        return ops.read_only(result)
    return result


def _set_item(param: ShardedParameter, index: Any, values: Any) -> None:
    if torch.is_grad_enabled() and param.requires_grad:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    entry_of(param).value()[index] = values


def _value(leaf: Any) -> Any:
    return entry_of(leaf).value() if isinstance(leaf, ShardedParameter) else leaf


def _contiguous_strides(param: torch.Tensor, dim: int | None = None) -> Any:
    strides = torch.empty(param.shape, device="meta").stride()
    return strides if dim is None else strides[dim]


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise ShardError(
            f"{what} of {entry_of(param).name}, which is sharded: there is no storage for the whole. Use "
            "`with zeroshard.gathered(model):`, or zeroshard.full_state_dict(model)"
        )

    return refuse


def _element_size(param: torch.Tensor) -> int:
    return entry_of(param).value().piece.element_size()


_T: Any = torch.Tensor

_SPECIAL: dict[Any, Callable[..., Any]] = {
    _T.grad.__get__: lambda param: entry_of(param).get_grad(),
    _T.grad.__set__: lambda param, grad: entry_of(param).set_grad(grad),
    _T.grad.__delete__: lambda param: entry_of(param).set_grad(None),
    _T.data.__get__: lambda param: entry_of(param).value(),
    _T.data.__set__: lambda param, data: entry_of(param).set_data(data),
    _T.detach: lambda param: entry_of(param).value(),
    _T.__setitem__: _set_item,
    _T.dtype.__get__: lambda param: entry_of(param).dtype(),
    _T.itemsize.__get__: _element_size,
    _T.element_size: _element_size,
    _T.nbytes.__get__: lambda param: _element_size(param) * param.numel(),
    _T.is_floating_point: lambda param: entry_of(param).value().is_floating_point(),
    torch.is_floating_point: lambda param: entry_of(param).value().is_floating_point(),
    _T.is_contiguous: lambda param, **_: True,
    _T.stride: _contiguous_strides,
    _T.storage_offset: lambda param: 0,
    _T.untyped_storage: _refuse("untyped_storage"),
    _T.storage: _refuse("storage"),
    _T.data_ptr: _refuse("data_ptr"),
    _T.tolist: _refuse("tolist"),
    _T.numpy: _refuse("numpy"),
    torch._has_compatible_shallow_copy_type: lambda param, other: isinstance(other, Sharded),
}

_METHODS_AS_IS = (
    "size dim numel nelement ndimension requires_grad_ register_hook retain_grad register_post_accumulate_grad_hook __len__ "
    "get_device is_complex is_inference is_signed is_shared is_pinned __hash__"
)
_ATTRIBUTES_AS_IS = (
    "shape ndim requires_grad is_leaf grad_fn device layout is_cuda is_cpu is_xpu is_mps is_meta is_sparse is_sparse_csr "
    "is_quantized is_mkldnn is_nested is_vulkan names output_nr _version _backward_hooks _post_accumulate_grad_hooks "
    "retains_grad _base grad_dtype"
)
_AS_IS = frozenset(
    [getattr(_T, name) for name in _METHODS_AS_IS.split()]
    + [getattr(_T, name).__get__ for name in _ATTRIBUTES_AS_IS.split() if hasattr(_T, name)]
    + [_T.requires_grad.__set__, _T._backward_hooks.__set__]
    + [torch.numel, torch.is_complex, torch.is_tensor, torch.autograd.grad, torch.autograd.backward]
)

_PIECEWISE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "true_divide",
        "pow",
        "square",
        "sqrt",
        "rsqrt",
        "abs",
        "neg",
        "sign",
        "exp",
        "log",
        "reciprocal",
        "clamp",
        "clip",
        "maximum",
        "minimum",
        "lerp",
        "addcmul",
        "addcdiv",
        "isnan",
        "isinf",
        "isfinite",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__mul__",
        "__rmul__",
        "__truediv__",
        "__pow__",
        "__neg__",
        "__abs__",
        "nan_to_num",
        "where",
        "norm",
        "vector_norm",
        "sum",
        "mean",
        "max",
        "min",
        "amax",
        "amin",
        "any",
        "all",
        "count_nonzero",
        "equal",
        "allclose",
        "clone",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "cpu",
        "cuda",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "type_as",
        "_amp_foreach_non_finite_check_and_unscale_",
    ]
)
