"""The only hooks: events of modules and of autograd, told to the runtime.

Modules that have units of their own get a forward pre-hook and a forward hook (which also runs when forward raises). Every
parameter's accumulation node gets a hook before and one after. The nodes are kept alive, so that a parameter that is
frozen and unfrozen keeps its hooks; they know the engine weakly, so that nothing forms a cycle.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from .config import InputWarning, ShardError
from .entry import Entry, accumulation_node
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


# ------------------------------------------------------------------------------------------ what users pass in


def watch_batch(model: nn.Module, rank: int) -> None:
    """Warns of a batch in training that is empty, or on the CPU has a NaN: after the next reduction every rank has it.

    A NaN may be meant, where a mask leaves it out, so nothing is refused. On a GPU asking for values would wait for it.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or _without_values():
            return
        named = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        tensors = {name: value for name, value in named.items() if type(value) is torch.Tensor}
        found = [f"its input {name!r} holds NaN" for name, value in tensors.items() if _holds_nan(value)]
        if tensors and all(not value.numel() for value in tensors.values()):
            found.append(f"its inputs {', '.join(map(repr, tensors))} are empty, and a mean over nothing is NaN")
        for what in found:
            text = f"rank {rank}, call of {type(module).__name__}: {what}; it would spread to the weights of all ranks"
            warnings.warn(text, InputWarning, stacklevel=2)

    model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def _without_values() -> bool:
    """While torch.compile traces, and inside transforms of torch.func, nobody can ask for a tensor's values."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _holds_nan(value: torch.Tensor) -> bool:
    seen = value.device.type == "cpu" and value.is_floating_point() and value.numel() > 0
    return seen and bool(value.detach().aminmax()[0].isnan())


def watch_indices(module: nn.Embedding | nn.EmbeddingBag, name: str, rank: int) -> None:
    """Refuses ids beyond the table, on the CPU, before the table is gathered: the other ranks would wait for this one."""

    def before(module: Any, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs.get("input")
        if _without_values() or type(ids) is not torch.Tensor or ids.device.type != "cpu" or not ids.numel():
            return
        low, high = (int(end) for end in ids.aminmax())
        rows = module.weight.shape[0]
        if low < 0 or high >= rows:
            raise ShardError(
                f"rank {rank}: {name} has {rows} rows, and was given ids from {low} to {high}. Use the tokenizer of the model, "
                "or for positions no longer sequences than it has rows"
            )

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


# ------------------------------------------------------------------------------------------ optimizers


def watch_optimizers(runtime: Runtime) -> None:
    """While the runtime lives, steps of optimizers that `shard` was not given are refused: they would step by gradients of
    this rank alone, or whole parameters by pieces."""
    ref = weakref.ref(runtime)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        runtime = ref()
        if runtime is None or any(known() is optimizer for known in runtime.optimizers):
            return
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if id(param) in runtime.entry_of:
                raise ShardError(
                    f"{type(optimizer).__name__} steps {runtime.entry_of[id(param)].name}, which is sharded, but shard() was "
                    "not given this optimizer. Give it all optimizers of the model, in a list"
                )

    weakref.finalize(runtime, register_optimizer_step_pre_hook(before).remove)


# ------------------------------------------------------------------------------------------ backward


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Runs `call` when the backward that is under way has computed everything."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class Observer(Protocol):
    """What `observed` tells. `name_of`: what a module is called, `None` for one that is not observed."""

    def name_of(self, module: nn.Module) -> str | None: ...

    def forward_begins(self, name: str) -> None: ...

    def forward_ends(self, name: str) -> None: ...

    def backward_begins(self, name: str) -> None: ...

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None: ...

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None: ...


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tells `observer` of every module's call, of gradients that reach a module's output, and of optimizers' steps.

    By torch's global hooks, which wrap those of modules and optimizers; outside the block nothing of it is left.
    """
    module_hooks = torch.nn.modules.module

    def before(module: nn.Module, args: Any) -> None:
        name = observer.name_of(module)
        if name is not None:
            observer.forward_begins(name)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        name = observer.name_of(module)
        if name is None:
            return
        observer.forward_ends(name)
        nodes = {x.grad_fn for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.grad_fn is not None}
        for node in nodes:
            node.register_prehook(lambda grads: observer.backward_begins(name))

    handles = [
        module_hooks.register_module_forward_pre_hook(torch.compiler.disable(before)),
        module_hooks.register_module_forward_hook(torch.compiler.disable(after), always_call=True),
        register_optimizer_step_pre_hook(lambda optimizer, *_: observer.step_begins(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: observer.step_ends(optimizer)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def watch_saved(call: Callable[[torch.Tensor], None]) -> contextlib.AbstractContextManager[Any]:
    """Inside, `call` sees every tensor that autograd keeps for backward."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        call(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def watch_gradients(entry: Entry, runtime: Runtime) -> None:
    """Autograd's node that accumulates this parameter's gradient reports before and after."""
    param = entry.param
    if not (param.dtype.is_floating_point or param.dtype.is_complex):
        return
    trainable = param.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        param.requires_grad_(True)
        entry.node = accumulation_node(param)
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
