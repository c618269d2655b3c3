"""Sharded: a logical tensor of which this rank holds a piece. It answers for the whole, on every rank the same.

It is what `p.grad` and `p.detach()` are: a tensor of the logical shape around a 1-D piece.
Element-wise work stays on the piece. Norms, sums, any/all, comparisons become one collective over the shard group.
What needs the whole of a parameter gathers its unit; what needs the whole of a gradient raises and says what to call.
Whatever is called here, every rank must call it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

from . import ops
from .comm import Channel
from .config import ShardError
from .partial import Partial

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Spec:
    """Which elements [start, start + numel) of a flattened tensor of `shape` the piece holds, and who has the rest."""

    shape: tuple[int, ...]
    start: int
    numel: int
    channel: Channel
    name: str

    @property
    def whole_numel(self) -> int:
        return torch.Size(self.shape).numel()

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part [numel] of a whole tensor, of the logical shape or broadcast to it."""
        if whole.shape != torch.Size(self.shape):
            whole = whole.expand(self.shape)
        return whole.reshape(-1)[self.start : self.start + self.numel]


class Owner(Protocol):
    """What stands behind a Sharded that is a parameter's value: whole reads and writes are possible."""

    def whole(self) -> torch.Tensor: ...

    def written(self) -> None: ...


class Sharded(torch.Tensor):
    """A tensor of the logical shape, holding this rank's piece (1-D). Made by the engine, not by users.

    owner: the parameter whose value this is, to be told of writes. of_value: made of parameters' values, so that what needs
    the whole may gather it; a gradient refuses instead.
    """

    piece: torch.Tensor
    spec: Spec
    owner: Owner | None
    of_value: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, piece: torch.Tensor, spec: Spec, owner: Owner | None = None, of_value: bool = False) -> Sharded:
        self = torch.Tensor._make_wrapper_subclass(cls, spec.shape, dtype=piece.dtype, device=piece.device)
        self.piece, self.spec, self.owner, self.of_value = piece, spec, owner, of_value or owner is not None
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return (
            f"Sharded({self.spec.name}, shape={tuple(self.shape)}, dtype={self.dtype}, elements {self.spec.start} to "
            f"{self.spec.start + self.spec.numel} on this rank)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardError(
            f"{self.spec.name} is sharded: this rank holds {self.spec.numel} of {self.spec.whole_numel} elements, so it "
            "cannot be pickled. Use zeroshard.save(path, model, optimizer), or torch.save of zeroshard.full_state_dict(model)"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return Sharded(self.piece.clone(), self.spec, None)

    def __setitem__(self, index: Any, values: Any) -> None:
        mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.shape == self.shape
        if mask and not isinstance(values, torch.Tensor):
            self.masked_fill_(index, values)
            return
        if self.owner is None:
            raise whole_needed("item assignment", self)
        whole = whole_of(self)
        whole[index] = values
        self.piece.copy_(self.spec.cut(whole))
        self.owner.written()

    def _set_data(self, values: torch.Tensor) -> None:
        self.copy_(values)

    data = property(torch.Tensor.detach, _set_data)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(func, args, kwargs or {})


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        raise whole_needed(name, self)

    return refuse


for _name in ops.REFUSED:
    setattr(Sharded, _name, _refusing(_name))


def whole_needed(what: str, tensor: Sharded) -> ShardError:
    if tensor.of_value:
        return ShardError(
            f"{what} on {tensor.spec.name}, which is sharded: use `with zeroshard.gathered(model):` to read whole parameters, "
            "`gathered(model, write=True)` to edit them, or zeroshard.full_state_dict(model)"
        )
    return ShardError(
        f"{what} on the gradient of {tensor.spec.name}, which is sharded and cannot answer from a part: "
        "use zeroshard.full_gradients(model)"
    )


# ------------------------------------------------------------------------------------------ dispatch


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kind = ops.kind_of(func)
    handler = HANDLERS.get(kind)
    if handler is not None:
        result = handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return by_the_whole(func, args, kwargs)


def first_sharded(args: Any, kwargs: Any = None) -> Sharded:
    return next(leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, Sharded))


def elementwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The same on the pieces; whole operands are cut to match. Lists (foreach) go index by index."""
    like = first_sharded(args, kwargs)
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in arg)]
    specs = _specs_by_index(lists) if lists else None

    def local(value: Any, spec: Spec | None) -> Any:
        if isinstance(value, Partial):
            value = value.resolved()
        if isinstance(value, Sharded):
            if spec is not None and (value.spec.start, value.spec.numel) != (spec.start, spec.numel):
                raise ShardError(f"{func}: {value.spec.name} and {spec.name} are cut in different places")
            return value.piece
        if isinstance(value, torch.Tensor) and value.dim() and spec is not None:
            return spec.cut(value)
        return value

    def convert(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)) and specs is not None and len(arg) == len(specs):
            return [local(x, spec) for x, spec in zip(arg, specs, strict=True)]
        return local(arg, None if specs is not None else like.spec)

    if any(not isinstance(leaf, Sharded) for leaf in ops.written(func, args, kwargs)):
        wholes = [whole_of(x) if isinstance(x, Sharded) else x for x in tree_leaves((args, kwargs))]
        args, kwargs = tree_unflatten(wholes, tree_structure((args, kwargs)))
        return func(*args, **kwargs)
    if specs is None and not _same_shape(like, args):
        return NotImplemented
    if func._schema.is_mutable and like.spec.channel.mirror is not None:
        like.spec.channel.mirror.calls(func, args, kwargs)
    result = func(*[convert(arg) for arg in args], **{name: convert(arg) for name, arg in kwargs.items()})
    of_value = all(leaf.of_value for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Sharded))
    if func._schema.is_mutable:
        for leaf in tree_leaves(args[0]):
            if isinstance(leaf, Sharded) and leaf.owner is not None:
                leaf.owner.written()
        return args[0] if func._schema.returns else None
    if specs is not None:
        return [x if spec is None else Sharded(x, spec, None, of_value) for x, spec in zip(result, specs, strict=True)]
    return tree_map(lambda x: Sharded(x, like.spec, None, of_value) if isinstance(x, torch.Tensor) else x, result)


def _specs_by_index(lists: Sequence[Any]) -> list[Spec | None]:
    specs: list[Spec | None] = [None] * max(len(x) for x in lists)
    for values in lists:
        for index, value in enumerate(values):
            if isinstance(value, Sharded):
                specs[index] = value.spec
    return specs


def _same_shape(like: Sharded, args: Any) -> bool:
    """No operand makes the result larger than `like`, and every sharded one has the same logical shape."""
    for arg in tree_flatten(args)[0]:
        if isinstance(arg, torch.Tensor) and not isinstance(arg, Partial):
            if isinstance(arg, Sharded) and arg.shape != like.shape:
                return False
            if torch.broadcast_shapes(arg.shape, like.shape) != like.shape:
                return False
    return True


def copying(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """clone, detach, conversions, *_like: the same on the piece; memory formats mean nothing to it."""
    source = args[0]
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    piece = func(source.piece, *args[1:], **kwargs)
    shares = func in (aten.detach.default, aten.alias.default)
    return Sharded(piece, source.spec, source.owner if shares else None, source.of_value)


def flat_view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A view that keeps the order of elements is the same piece under another shape."""
    source = args[0]
    if isinstance(args[1], torch.dtype):
        return NotImplemented
    shape = torch.empty(source.shape, device="meta").view(*args[1:]).shape
    return Sharded(source.piece, dataclasses.replace(source.spec, shape=tuple(shape)), source.owner, source.of_value)


def filling(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Random numbers are drawn for the whole, so that equal generators give the unsharded values."""
    target = args[0]
    whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    func(whole, *args[1:], **kwargs)
    target.piece.copy_(target.spec.cut(whole))
    if target.owner is not None:
        target.owner.written()
    return target


def reduction(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    reduce = ops.REDUCTIONS[func.overloadpacket](func, args, kwargs)
    if reduce is None:
        return NotImplemented
    local, combine, dtype = reduce(args[0].piece, args[0].spec.whole_numel)
    return Partial(local, combine, dtype, args[0].spec.channel, (func, args))


def foreach_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    order, dtype = ops.argument(func, args, kwargs, "ord", 2), ops.argument(func, args, kwargs, "dtype")
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in args[0]]


def finite_check(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """GradScaler's unscale: every rank learns of an inf that any rank holds."""
    tensors, found, scale = args
    channel = first_sharded(tensors).spec.channel
    if channel.mirror is not None:
        channel.mirror.calls(func, args, kwargs)
    before = found.clone()
    func([t.piece if isinstance(t, Sharded) else t for t in tensors], found, scale)
    found.copy_(torch.stack(channel.exchange_all("found_inf", found)).amax(0))
    channel.skipped_steps = channel.skipped_steps + ((before == 0) & (found > 0)).sum()


def equality(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    like = first_sharded(args)
    if any(arg.shape != like.shape for arg in args[:2]):
        return False
    same = func(*[x.piece if isinstance(x, Sharded) else like.spec.cut(x) for x in args[:2]], *args[2:], **kwargs)
    return bool(torch.stack(like.spec.channel.exchange_all("equal", torch.tensor([same]))).all())


def by_the_whole(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Only what is made of parameters' values is gathered. Reads see the whole; writes go to it and come back as the piece."""
    flat, tree = tree_flatten((args, kwargs))
    for leaf in flat:
        if isinstance(leaf, Sharded) and not leaf.of_value:
            raise whole_needed(str(func).removeprefix("aten.").split(".")[0], leaf)
    wholes = {id(leaf): whole_of(leaf) for leaf in flat if isinstance(leaf, Sharded)}
    plain = [wholes.get(id(leaf), leaf.resolved() if isinstance(leaf, Partial) else leaf) for leaf in flat]
    new_args, new_kwargs = tree_unflatten(plain, tree)
    result = func(*new_args, **new_kwargs)
    written = [leaf for leaf in ops.written(func, args, kwargs) if isinstance(leaf, Sharded)]
    for leaf in written:
        leaf.piece.copy_(leaf.spec.cut(wholes[id(leaf)]))
        if leaf.owner is not None:
            leaf.owner.written()
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return ops.read_only(result) if ops.is_view(func) else result


def whole_of(tensor: Sharded) -> torch.Tensor:
    """The whole values, a copy, on every rank. Collective."""
    if tensor.owner is not None:
        return tensor.owner.whole().view(tensor.shape)
    spec, channel = tensor.spec, tensor.spec.channel
    counts = [int(count) for count in channel.exchange_all(f"lengths of {spec.name}", torch.tensor(spec.numel))]
    padded = tensor.piece.new_zeros(max(counts))
    padded[: spec.numel] = tensor.piece
    parts = channel.exchange_all(f"all of {spec.name}", padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).view(tensor.shape)


HANDLERS: dict[ops.Kind, Callable[[Any, Any, dict[str, Any]], Any]] = {
    ops.Kind.ELEMENTWISE: elementwise,
    ops.Kind.COPYING: copying,
    ops.Kind.FLAT_VIEW: flat_view,
    ops.Kind.FILLING: filling,
    ops.Kind.REDUCTION: reduction,
    ops.Kind.FOREACH_NORM: foreach_norm,
    ops.Kind.FINITE_CHECK: finite_check,
    ops.Kind.EQUALITY: equality,
}
