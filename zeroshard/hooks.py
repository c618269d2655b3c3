"""The only hooks: events of modules and of autograd, told to the runtime.

Modules that have units of their own get a forward pre-hook and a forward hook (which also runs when forward raises). Every
parameter's accumulation node gets a hook before and one after. The nodes are kept alive, so that a parameter that is
frozen and unfrozen keeps its hooks; they know the engine weakly, so that nothing forms a cycle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .entry import Entry
from .runtime import Runtime, Scope


class ScopeHook:
    """Owned by the module it is registered on; owns the runtime."""

    def __init__(self, runtime: Runtime, scope: Scope):
        self.runtime, self.scope = runtime, scope

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.runtime.before_forward(self.scope)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.runtime.after_forward(self.scope)


class Cast:
    """Casts floating inputs of a module's call, and its outputs back where `back` is set."""

    def __init__(self, dtype: torch.dtype, back: bool):
        self.dtype, self.back = dtype, back
        self._dtypes: list[torch.dtype | None] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.back:
            floating = [x.dtype for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _floating(x)]
            self._dtypes.append(floating[0] if floating else None)
        return _cast(args, self.dtype), _cast(kwargs, self.dtype)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = self._dtypes.pop()
        return output if dtype is None or dtype == self.dtype else _cast(output, dtype)


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if _floating(x) else x, values)


def watch_module(module: nn.Module, runtime: Runtime, scope: Scope) -> None:
    """Compiled graphs break around the hooks. Said here, not where they are defined: it imports torch's whole compiler."""
    hook = ScopeHook(runtime, scope)
    module.register_forward_pre_hook(torch.compiler.disable(hook.before), prepend=True, with_kwargs=True)
    module.register_forward_hook(torch.compiler.disable(hook.after), always_call=True)


def cast_calls(module: nn.Module, dtype: torch.dtype, back: bool) -> None:
    cast = Cast(dtype, back)
    module.register_forward_pre_hook(cast.before, with_kwargs=True)
    if back:
        module.register_forward_hook(cast.after)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Runs `call` when the backward that is under way has computed everything."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def watch_gradients(entry: Entry, runtime: Runtime) -> None:
    """Autograd's node that accumulates this parameter's gradient reports before and after."""
    param = entry.param
    if not (param.dtype.is_floating_point or param.dtype.is_complex):
        return
    trainable = param.requires_grad
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        param.requires_grad_(True)
        entry.node = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        param.requires_grad_(trainable)
    entry_ref, runtime_ref = weakref.ref(entry), weakref.ref(runtime)

    def before(grads: Any) -> None:
        entry, runtime = entry_ref(), runtime_ref()
        if entry is not None and runtime is not None:
            runtime.backward.before_accumulation(entry)

    def after(inputs: Any, outputs: Any) -> None:
        entry, runtime = entry_ref(), runtime_ref()
        if entry is not None and runtime is not None:
            runtime.backward.accumulated(entry)

    entry.node.register_prehook(before)
    entry.node.register_hook(after)
