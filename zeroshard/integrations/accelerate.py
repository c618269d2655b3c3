"""`accelerate.Accelerator` with its model and optimizer sharded: the same YAML, the same loop, one import changed.

    from zeroshard.integrations.accelerate import Accelerator

    accelerator = Accelerator(shard=dict(stage=3), gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

What `accumulate`, `no_sync`, `backward`, `clip_grad_norm_`, `clip_grad_value_`, the gradient scaler and `unwrap_model`
need is on the sharded model and its gradients already; overridden here is only what would be wrong otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import pathlib
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, gather_object, get_int_from_env, recursively_apply

from zeroshard.api import shard
from zeroshard.checkpoint import load, save
from zeroshard.integrations.context import attach, context_parallel
from zeroshard.integrations.parallelism import Parallelism, shard_mesh
from zeroshard.join import join
from zeroshard.reading import full_state_dict
from zeroshard.runtime import runtime_of

if TYPE_CHECKING:
    from ring_attention import ContextParallel

OTHER_ENGINES = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class Scheduler(AcceleratedScheduler):
    """Steps once per replica and optimizer step: accelerate's count would include the context ranks of one sequence."""

    num_replicas: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.step_with_optimizer or self.split_batches:
            super().step(*args, **kwargs)
        elif not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            total = getattr(self.scheduler, "total_steps", None)  # OneCycle refuses steps past its end
            for _ in range(self.num_replicas):
                if total is None or self.scheduler._step_count <= total:
                    self.scheduler.step(*args, **kwargs)


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator(**kwargs)`; `shard` holds the keywords of `zeroshard.shard`, e.g. `dict(stage=3)`.

    Replicas, data and context degrees come from `parallelism_config`, by default the YAML's section of that name. With
    a context degree above 1, ring attention is attached to transformers models and `context_parallel` is the object
    that splits sequences. On a machine without an accelerator, ranks started by the launcher use gloo.

    Raises ValueError for a `parallelism_config` that does not fit, another sharding engine in the YAML, and fp16 on CPU
    (which accelerate would ignore).
    """

    _optimizers: list[Any]  # AcceleratedOptimizer, in the order of prepare
    _dataloaders: list[Any]

    def __init__(
        self,
        *,
        shard: dict[str, Any] | None = None,
        parallelism_config: Any = None,
        cpu: bool = False,
        **kwargs: Any,
    ):
        world_size = get_int_from_env(["WORLD_SIZE"], 1)
        cpu = cpu or (world_size > 1 and not torch.accelerator.is_available())
        parallelism_config = Parallelism.read(parallelism_config, world_size)
        super().__init__(cpu=cpu, parallelism_config=parallelism_config, **kwargs)
        self._take_over(shard)

    @classmethod
    def adopt(cls, accelerator: accelerate.Accelerator, shard: dict[str, Any] | None = None) -> Accelerator:
        """The same accelerator, made one of these in place: for those built by somebody else."""
        if not isinstance(accelerator, cls):
            accelerator.__class__ = cls
            accelerator._take_over(shard)
        return accelerator

    def _take_over(self, shard: dict[str, Any] | None) -> None:
        if self.distributed_type in OTHER_ENGINES:
            raise ValueError(
                f"distributed_type {self.distributed_type.value} brings its own sharding. "
                "Use `distributed_type: MULTI_GPU` (it starts CPU ranks, too) and `Accelerator(shard=dict(stage=...))`."
            )
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            raise ValueError("mixed_precision fp16 does nothing on CPU. Use bf16, or `no` for full precision.")
        if self.context_parallel_size > 1:
            if self.dataloader_config.dispatch_batches:
                raise ValueError("dispatch_batches=True would give context ranks different rows. Leave it out.")
            self.dataloader_config.dispatch_batches = False  # by default it is for iterable datasets
        if self.ddp_handler is not None:
            warnings.warn("DistributedDataParallelKwargs are ignored: zeroshard takes the place of that wrapper", stacklevel=3)
        self._shard_options = dict(shard or {})
        self._sharded: list[torch.nn.Module] = []  # in the order of prepare
        self._attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._writing_state = False
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)
        if self.state.backend == "gloo":
            # A gloo thread that frees the last collective's tensors while the interpreter is being torn down aborts the
            # process, whatever it was running. Sleeping here, before the tear-down, lets that thread finish.
            atexit.register(time.sleep, 0.2)

    # ------------------------------------------------------------------------------------------------- topology

    @property
    def num_replicas(self) -> int:
        """How many ranks, or groups of context ranks, are given different batches."""
        return self.num_processes // self.context_parallel_size

    @property
    def replica(self) -> int:
        """Which of them this rank is, or belongs to: context ranks are the mesh's innermost axis."""
        return self.process_index // self.context_parallel_size

    @property
    def context_parallel_size(self) -> int:
        return self.parallelism_config.cp_size if self.parallelism_config else 1

    @property
    def context_parallel_rank(self) -> int:
        return self.torch_device_mesh.get_local_rank("cp") if self.context_parallel_size > 1 else 0

    @functools.cached_property
    def context_parallel(self) -> ContextParallel | None:
        """Splits sequences over the context ranks; None when each rank has whole sequences."""
        return context_parallel(self.torch_device_mesh["cp"]) if self.context_parallel_size > 1 else None

    # -------------------------------------------------------------------------------------------------- prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's. A model is sharded together with the optimizers that hold its parameters.

        A model given without one is sharded for inference; one that is sharded already stays as it is. Raises ValueError
        for an optimizer over several models, or over a model that was prepared earlier without it.
        """
        optimizers = [a for a in args if _is_plain_optimizer(a)]
        done: dict[int, Any] = {}
        for sharded in [a for a in args if isinstance(a, torch.nn.Module) and self._is_sharded(a)]:
            done[id(sharded)] = self.prepare_model(sharded)
        models = [a for a in args if isinstance(a, torch.nn.Module) and id(a) not in done]
        owned: dict[int, list[torch.optim.Optimizer]] = {id(m): [] for m in models}
        for optimizer in optimizers:
            owners = [m for m in models if _holds(optimizer, m)]
            if len(owners) > 1:
                name = type(optimizer).__name__
                raise ValueError(f"{name} holds parameters of {len(owners)} models. Make one optimizer per model.")
            if owners:
                owned[id(owners[0])].append(optimizer)
        done |= {id(m): self._shard(m, owned[id(m)]) for m in models}
        for optimizer in optimizers:
            prepared = done[id(optimizer)] = self.prepare_optimizer(optimizer)
            prepared._is_accelerate_prepared = True
        return super().prepare(*(done.get(id(a), a) for a in args), device_placement=device_placement)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """`evaluation_mode` leaves the model whole, and free to be sharded by a later `prepare`."""
        inner = self.unwrap_model(model, keep_torch_compile=False)
        sharded = self._is_sharded(model)
        if not sharded and not evaluation_mode:
            return self._shard(model, [])
        if sharded and not any(inner is m for m in self._sharded):
            self._sharded.append(inner)
        self._attach(inner)
        return super().prepare_model(model, False if sharded else device_placement, evaluation_mode=True)

    def _attach(self, model: torch.nn.Module) -> None:
        if self.context_parallel is not None and model not in self._attached:
            attach(model, self.context_parallel)
            self._attached.add(model)

    def _shard(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module:
        self._attach(model)  # first: a model that it refuses stays as it was
        if self.device_placement:
            model.to(self.device)
        mesh = shard_mesh(self.parallelism_config, self.device.type)
        shard(model, optimizers or None, **({"mesh": mesh} | self._shard_options))
        return self.prepare_model(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if any(optimizer is o for m in self._sharded for o in optimizers_of(m)):
            device_placement = False  # accelerate would round-trip the state dict, which gathers every shard
        elif _is_plain_optimizer(optimizer) and any(_holds(optimizer, m) for m in self._sharded):
            raise ValueError(
                f"{type(optimizer).__name__} holds parameters of a model that was prepared without it. "
                "Give both to one call: prepare(model, optimizer)."
            )
        return super().prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__ = Scheduler
            prepared.num_replicas = self.num_replicas
        return prepared

    def _is_sharded(self, model: torch.nn.Module) -> bool:
        return "_zeroshard" in self.unwrap_model(model, keep_torch_compile=False).__dict__

    def free_memory(self, *objects: Any) -> Any:
        self._sharded.clear()
        return super().free_memory(*objects)

    # -------------------------------------------------------------------------------------------------- metrics

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's, each sequence once: context ranks were given the same rows. Scalars come from every rank."""
        stride = self.context_parallel_size
        if stride == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        at_end = self.gradient_state.end_of_dataloader and self.gradient_state.remainder > 0
        rows = slice(self.gradient_state.remainder if at_end else None)  # the last batch was filled up with repeats
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            return [x for part in gather_object([input_data])[::stride] for x in part][rows]

        def once(tensor: torch.Tensor) -> torch.Tensor:
            gathered = self.gather(tensor)
            return torch.cat(gathered.chunk(self.num_processes)[::stride])[rows] if tensor.dim() else gathered

        return recursively_apply(once, input_data)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """As accelerate's, for sharded models on CPU, too: `zeroshard.join` keeps ranks without work in step."""
        sharded = [model for model in joinables if self._is_sharded(model)]
        with contextlib.ExitStack() as stack:
            if len(sharded) < len(joinables):
                others = [model for model in joinables if not self._is_sharded(model)]
                stack.enter_context(super().join_uneven_inputs(others, even_batches))
            elif even_batches is not None:
                stack.enter_context(self._even_batches(even_batches))
            for model in sharded:
                stack.enter_context(join(self.unwrap_model(model, keep_torch_compile=False)))
            yield

    @contextlib.contextmanager
    def _even_batches(self, value: bool) -> Iterator[None]:
        samplers = [loader.batch_sampler for loader in self._dataloaders]
        before = [(sampler, sampler.even_batches) for sampler in samplers if hasattr(sampler, "even_batches")]
        for sampler, _ in before:
            sampler.even_batches = value
        try:
            yield
        finally:
            for sampler, even in before:
                sampler.even_batches = even

    # ---------------------------------------------------------------------------------------------------- state

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Whole CPU tensors on the main process, `{}` on the others. Every rank must call it."""
        if not self._is_sharded(model):
            return super().get_state_dict(model, unwrap)
        if self._writing_state:  # save_state writes shards by itself and needs no whole weights
            return {}
        return full_state_dict(self.unwrap_model(model), rank0_only=True)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As accelerate's; what is sharded is written by `zeroshard.save` and can be loaded by any number of ranks."""
        with self._own_optimizers_hidden():
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        with self._own_optimizers_hidden():
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextlib.contextmanager
    def _own_optimizers_hidden(self) -> Iterator[None]:
        """accelerate would write rank 0's pieces and give them to every rank."""
        everything: list[Any] = self._optimizers
        mine = {id(o) for m in self._sharded for o in optimizers_of(m)}
        self._optimizers = [o for o in everything if id(o.optimizer) not in mine]
        self._writing_state = True
        try:
            yield
        finally:
            self._optimizers, self._writing_state = everything, False

    def _save_sharded(self, models: list[torch.nn.Module], weights: list[Any], folder: str) -> None:
        weights[:] = [w for m, w in zip(models, weights, strict=True) if not self._is_sharded(m)]
        for path, model in self._checkpoints(folder):
            save(path, model, optimizers_of(model))

    def _load_sharded(self, models: list[torch.nn.Module], folder: str) -> None:
        models[:] = [m for m in models if not self._is_sharded(m)]
        for path, model in self._checkpoints(folder):
            load(path, model, optimizers_of(model))

    def _checkpoints(self, folder: str) -> Iterator[tuple[pathlib.Path, torch.nn.Module]]:
        """In the order of `prepare`, which is the same when saving and when loading."""
        for number, model in enumerate(self._sharded):
            yield pathlib.Path(folder, f"zeroshard_{number}"), model


def prepare(accelerator: accelerate.Accelerator, *objects: Any, shard: dict[str, Any] | None = None) -> Any:
    """`accelerator.prepare(*objects)` with models and optimizers sharded, for an accelerator built elsewhere."""
    return Accelerator.adopt(accelerator, shard).prepare(*objects)


def optimizers_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Those that a model was sharded with; none: for inference."""
    kept = [reference() for reference in runtime_of(model, "optimizers_of").optimizers]
    return [optimizer for optimizer in kept if optimizer is not None]


def _is_plain_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) and not getattr(value, "_is_accelerate_prepared", False)


def _holds(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    """Whether any parameter of `optimizer` is one of `model`'s."""
    parameters = {id(p) for p in model.parameters()}
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
