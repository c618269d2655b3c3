"""Entry: one parameter of a unit. `param` is the user's object; the entry says what it stands for at the moment.

Gradients, by where they may be seen. What the user finds as `p.grad` is one of
    the handle      Sharded, or the plain tensor where this rank holds all: a view of unit.grad
    a local view    of unit.local, inside no_sync
    a foreign one   put there by the user: taken over by `recover()`
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .config import ShardError
from .parameter import plain
from .sharded import Sharded, Spec

if TYPE_CHECKING:
    from .unit import Unit

_Tensor: Any = torch.Tensor


def accumulation_node(param: torch.Tensor) -> Any:
    """Autograd's node that accumulates the gradient of a leaf that requires one."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        return param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class Entry:
    """See the top of the file."""

    def __init__(self, unit: Unit, index: int, param: nn.Parameter, names: tuple[str, ...]):
        self._unit = weakref.ref(unit)
        self.index, self.param, self.names = index, param, names
        self.slot = unit.layout.slots[index]
        self.start, self.numel, self.offset = unit.held_piece(index)
        self.spec = Spec(self.slot.shape, self.start, self.numel, unit.holders, self.name)
        self.local_view: torch.Tensor | None = None
        self.stashed: torch.Tensor | None = None
        self.virtual_grad: torch.Tensor | None = None
        self.node: Any = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        if unit is None:
            raise ShardError(f"the model that {self.name} belonged to is gone")
        return unit

    def check_param(self) -> None:
        """Is the user's object still the tensor that the engine's hooks are on?"""
        if "_zeroshard" not in self.param.__dict__:
            raise ShardError(
                f"{self.name}: another tensor has taken its place since shard (torch.utils.swap_tensors), and with it what "
                "tells the engine of its gradients. Write values inside `with zeroshard.gathered(model, write=True):`"
            )

    def check_conversion(self, full: torch.Tensor) -> None:
        """Has the user's object been converted or moved, perhaps there and back? Autograd then makes it a new node."""
        param = self.param
        same_node = self.node is None or not param.requires_grad or accumulation_node(param) is self.node
        if same_node and param.dtype == full.dtype and param.device == full.device:
            return
        raise ShardError(
            f"{self.name} has been converted or moved since shard (model.to, .float, .half, ...; it is {param.dtype} on "
            f"{param.device}, the engine's values are {full.dtype} on {full.device}), which cuts it from the hooks on its "
            "gradient. Convert or move the model before zeroshard.shard"
        )

    def piece_of(self, held: torch.Tensor) -> torch.Tensor:
        """This entry's elements of a [held_numel] buffer."""
        return held[self.offset : self.offset + self.numel]

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This entry's whole tensor in a [numel] buffer."""
        return flat[self.slot.offset : self.slot.offset + self.slot.numel].view(self.slot.shape)

    # ---- what ShardedParameter asks

    def value(self) -> Sharded:
        return Sharded(self.piece_of(self.unit.shard), self.spec, self)

    def dtype(self) -> torch.dtype:
        """The masters'; what forward saw, while backward computes it again."""
        runtime = self.unit.runtime()
        return self.unit.compute if runtime is not None and runtime.is_recomputed(self.unit) else self.unit.dtype

    def whole(self) -> torch.Tensor:
        """The master values, gathered on the spot: a copy."""
        with self.unit.whole_masters() as masters:
            return self.view_of(masters).clone()

    def written(self) -> None:
        self.unit.stale = True

    def set_data(self, data: torch.Tensor) -> None:
        mine = self.piece_of(self.unit.shard)
        if isinstance(data, Sharded) and data.piece.data_ptr() == mine.data_ptr() and data.dtype == mine.dtype:
            return
        if data.shape != self.param.shape or data.dtype != mine.dtype or data.device.type != mine.device.type:
            raise ShardError(
                f"{self.name}.data = a tensor of {tuple(data.shape)} {data.dtype} on {data.device}: the sharded parameter has "
                f"{tuple(self.param.shape)} {mine.dtype} on {mine.device}. Convert or move the model before zeroshard.shard"
            )
        self.value().copy_(data)

    def call_with_whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.unit.on_the_spot(func, args, kwargs)

    def get_grad(self) -> torch.Tensor | None:
        fresh = plain(_Tensor.grad.__get__, (self.param,), {})
        return fresh if fresh is not None else self.virtual_grad

    def set_grad(self, grad: torch.Tensor | None) -> None:
        if grad is not None and (grad.shape != self.param.shape or grad.device.type != self.unit.shard.device.type):
            raise RuntimeError(
                f"assigned grad of {self.name} has shape {tuple(grad.shape)} on {grad.device}, expected "
                f"{tuple(self.param.shape)} on {self.unit.shard.device}"
            )
        self.take_raw()
        self.virtual_grad = grad

    # ---- gradients

    def take_raw(self) -> torch.Tensor | None:
        """Removes and returns what autograd has accumulated on the parameter itself."""
        grad = plain(_Tensor.grad.__get__, (self.param,), {})
        if grad is not None:
            plain(_Tensor.grad.__set__, (self.param, None), {})
        return grad

    def visible(self) -> torch.Tensor | None:
        return self.param.grad

    def show(self, grad: torch.Tensor | None) -> None:
        self.stashed = None
        if self.unit.alias:
            self.param.grad = grad
        else:
            self.virtual_grad = grad

    def hide(self) -> torch.Tensor | None:
        """Takes the visible gradient away, so that autograd starts afresh."""
        if self.unit.alias:
            return self.take_raw()
        grad, self.virtual_grad = self.virtual_grad, None
        return grad

    def recover(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """What a visible gradient is: the handle (then unit.grad is known again), a local view, or adopted from the user.

        A gradient that the user assigned must be the same whole tensor on every rank: the runtime asks at the next step.
        """
        if grad is None or grad is self.local_view:
            return grad
        unit, held = self.unit, getattr(grad, "_zeroshard_held", None)
        if held is not None and held._zeroshard_unit() is unit:
            unit.grad = held if unit.grad is None else unit.grad
            if held is unit.grad:
                return grad
        if isinstance(grad, Sharded):
            source = grad.piece
        else:
            grad = grad.to_dense() if grad.is_sparse else grad
            source, runtime = self.spec.cut(grad), unit.runtime()
            if runtime is not None:
                runtime.assigned[self.name] = float(grad.detach().norm())
        self.piece_of(unit.grad_buffer()).copy_(source.detach())
        return self.make_handle()

    def make_handle(self) -> torch.Tensor:
        """The gradient as the user sees it. It alone keeps the buffer alive: clearing every `p.grad` frees it."""
        held = self.unit.grad_buffer()
        handle: Any = self.view_of(held) if self.unit.plain else Sharded(self.piece_of(held), self.spec)
        handle._zeroshard_held = held
        return handle

    def grad_piece(self) -> torch.Tensor:
        return self.piece_of(self.unit.grad_buffer())
