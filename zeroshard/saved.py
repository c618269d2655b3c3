"""What autograd saves of a released parameter: a reference instead of the values.

While a unit that releases is in use, tensors saved for backward that lie in its full buffer are packed as a `Ref`. Unpacking
gathers the unit again. So backward needs no hooks on outputs, whatever a module returns; a graph never keeps a full
buffer alive; and once every Ref of a use has been unpacked, or is gone with the graph, the unit is released.
Other hooks outside ours (activation checkpointing, offloading) are asked for everything, so they see what they always see.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .unit import Unit

_autograd: Any = torch._C._autograd


def recording_transform() -> bool:
    """Inside a transform of torch.func other than vmap: what it records is not offered to saved-tensor hooks."""
    levels = torch._C._functorch.get_interpreter_stack()
    return levels is not None and any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


class Use:
    """One use of a unit in a forward: counts the references to it that autograd holds."""

    __slots__ = ("__weakref__", "alive", "open", "packed", "runtime", "scope", "unit", "unpacked")

    def __init__(self, unit: Unit, scope: int, runtime: weakref.ref[Any]):
        self.unit, self.scope, self.runtime = unit, scope, runtime
        self.packed = self.unpacked = self.alive = 0
        self.open = False

    def close(self) -> None:
        self.unpacked = 0
        if self.open:
            self.open = False
            runtime = self.runtime()
            if runtime is not None:
                runtime.close_use(self)


class Ref:
    """A view of a full buffer, by place."""

    __slots__ = ("offset", "size", "stride", "use")

    def __init__(self, tensor: torch.Tensor, use: Use):
        self.offset, self.size, self.stride = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.use = use
        use.packed += 1
        use.alive += 1

    def __del__(self) -> None:
        self.use.alive -= 1
        if not self.use.alive:
            self.use.close()


class Foreign:
    """Packed by the hooks outside ours."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Any, packed: Any):
        self.unpack, self.packed = unpack, packed


class Packer:
    """The pair of saved-tensor hooks of one runtime; `outside` is the pair that was active before."""

    def __init__(self, runtime: Any, outside: Any):
        self.runtime, self.outside = runtime, outside

    def pack(self, tensor: torch.Tensor) -> Any:
        unit = self.runtime.unit_of_storage.get(tensor.untyped_storage()._cdata)
        if self.outside is not None:
            # Whoever keeps a frozen parameter keeps the object, whose values are exchanged at release: an alias stays.
            kept = tensor.detach() if unit is not None and not tensor.requires_grad else tensor
            return Foreign(self.outside[1], self.outside[0](kept))
        if unit is None or tensor.dtype != unit.compute or unit.use is None or tensor.is_conj() or tensor.is_neg():
            return tensor  # a conjugate is a view that its place does not tell: it stays, and keeps its buffer
        return Ref(tensor, unit.use)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Ref):
            return self.runtime.unpack(packed)
        return packed.unpack(packed.packed) if isinstance(packed, Foreign) else packed


def push(runtime: Any) -> bool:
    """Makes the runtime's hooks the active ones, if gradients are recorded. Returns whether `pop` is due."""
    if not torch.is_grad_enabled() or not _autograd._saved_tensors_hooks_is_enabled():
        return False
    outside = _autograd._top_saved_tensors_default_hooks(True)
    mine = getattr(outside[0], "__self__", None) if outside is not None else None
    if isinstance(mine, Packer) and mine.runtime is runtime:
        return False
    packer = Packer(runtime, outside)
    _autograd._push_saved_tensors_default_hooks(packer.pack, packer.unpack)
    return True


def pop() -> None:
    _autograd._pop_saved_tensors_default_hooks()
