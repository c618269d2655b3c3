"""Lightning with its module and optimizers sharded: one argument of the Trainer, the LightningModule as it was.

    from zeroshard.integrations.lightning import ZeroShardStrategy

    trainer = L.Trainer(accelerator="gpu", devices=8, strategy=ZeroShardStrategy(stage=3, context=2))

Ranks are those of torchrun, `accelerate launch`, SLURM, or of Lightning itself, which runs the script again for each.

Sequences. With `context=2`, two ranks each share a batch. A transformers or PEFT model that is an attribute of the
LightningModule takes whole batches, `self.model(**batch).loss`, and computes its own part. For any other model
`self.trainer.strategy.context_parallel` is the `ContextParallel` of the plain loop:

    def training_step(self, batch, batch_idx):
        cp = self.trainer.strategy.context_parallel
        batch = cp.shard(batch)
        with cp:
            return cp.cross_entropy(self.model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"])

Left out, every rank computes the whole batch: slower, and still right.

Checkpoints. `ModelCheckpoint` and `Trainer.save_checkpoint` write a folder, every rank its share, which `ckpt_path=` reads at
any stage and number of ranks. With `save_weights_only=True` they write one plain file of whole weights, for
`load_from_checkpoint` anywhere. `ckpt_path=` takes the plain files of other strategies, too.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from zeroshard.api import shard
from zeroshard.checkpoint import load, materialize, save
from zeroshard.comm import Channel
from zeroshard.config import Options, Precision
from zeroshard.integrations.context import attach, context_parallel
from zeroshard.integrations.parallelism import Parallelism
from zeroshard.join import join
from zeroshard.optimizer import Stepper
from zeroshard.reading import full_state_dict
from zeroshard.runtime import runtime_of

if TYPE_CHECKING:
    from ring_attention import ContextParallel

# The same library under two names, each of which takes only its own classes: the one that the script has imported.
_OLD_NAME = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_PACKAGE = "pytorch_lightning" if _OLD_NAME else "lightning.pytorch"
DDPStrategy: Any = importlib.import_module(f"{_PACKAGE}.strategies").DDPStrategy
_callbacks = importlib.import_module(f"{_PACKAGE}.callbacks")
_NoOptimizer: Any = importlib.import_module(f"{_PACKAGE}.core.optimizer")._MockOptimizer

CONTEXT = "_zeroshard_context"  # where a sharded module remembers how many ranks share a batch


class ZeroShardStrategy(DDPStrategy):
    """Shards the LightningModule and its optimizers over all ranks; `context` ranks each share their sequences.

    Args:
        stage, mesh, units, precision, reduce, prefetch: as `zeroshard.shard` takes them. A `mesh` can be made when the script
            has called `init_process_group` before it makes the Trainer.
        context: how many ranks, next to each other, share one batch. They are given the same one; samplers count the others.
        process_group_backend, timeout: of the process group, as `DDPStrategy` takes them.

    The Trainer's `precision` is what it is on one device; `zeroshard.Precision` here keeps fp32 masters of what it casts.
    The module stays sharded when the Trainer is done; `zeroshard.export` and `full_state_dict` give whole weights.

    Raises:
        ShardError: an argument that `zeroshard.shard` would refuse.
        ValueError: a context degree that does not divide the ranks, a callback that copies the module, a module that has been
            sharded with other arguments.
    """

    def __init__(
        self,
        stage: int = 3,
        context: int = 1,
        *,
        mesh: Any = None,
        units: Any = None,
        precision: Precision | None = None,
        reduce: str = "mean",
        prefetch: int = 1,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
    ):
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if isinstance(context, bool) or not isinstance(context, int) or context < 1:
            raise ValueError(f"context={context!r}: expected a number of ranks, 1 or more")
        self.context, self.context_parallel = context, None
        self._options = Options.check(stage, units, precision, reduce, prefetch)
        self._shard_arguments = {
            "stage": stage, "mesh": mesh, "units": units, "precision": precision, "reduce": reduce, "prefetch": prefetch
        }  # fmt: skip
        self._channel: Channel | None = None  # of the ranks that share a batch
        self._joined = contextlib.ExitStack()

    model: Any  # the LightningModule itself, never a wrapper
    context_parallel: ContextParallel | None
    """Splits sequences over the ranks that share a batch, once the ranks have met; None when each has its own."""

    # -------------------------------------------------------------------------------------------------- the ranks

    def _configure_launcher(self) -> None:
        if self.world_size % self.context:
            raise ValueError(
                f"context={self.context} does not divide the {self.world_size} ranks (devices x num_nodes). "
                "Ranks = replicas x context."
            )
        super()._configure_launcher()

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.root_device.type == "cpu":
            # A gloo thread that frees the last collective's tensors while the interpreter is being torn down aborts the
            # process. Sleeping here, before the tear-down, lets that thread finish.
            atexit.register(time.sleep, 0.2)
        if self.context > 1 and self.context_parallel is None:
            sizes = {"dp_replicate_size": 1, "dp_shard_size": self.world_size // self.context, "cp_size": self.context}
            mesh = Parallelism(**sizes, tp_size=1, sp_size=1).build_device_mesh(self.root_device.type)
            assert mesh is not None
            self.context_parallel = context_parallel(mesh["cp"])
            self._channel = Channel(mesh["cp"].get_group(), device=self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Ranks that share a batch are one replica to a sampler."""
        return {"num_replicas": self.world_size // self.context, "rank": self.global_rank // self.context}

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The batch of the first of the ranks that share it: random crops and masks may differ from rank to rank."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._channel is None:
            return batch
        sent = _packed(batch) if self._channel.rank == 0 else b""
        size = self._channel.exchange_all("batch size", torch.tensor([len(sent)]))[0]
        data = torch.frombuffer(bytearray(sent or int(size)), dtype=torch.uint8).to(self.root_device)
        self._channel.broadcast("batch", data)
        if sent:
            return batch
        return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location=self.root_device, weights_only=False)

    # ------------------------------------------------------------------------------------------ module, optimizers

    def setup(self, trainer: Any) -> None:
        """As every strategy's, with the module sharded when its device and dtypes are settled, before its optimizers."""
        self._refuse_copies(trainer)
        self.accelerator.setup(trainer)
        state = self.model.__dict__
        if "_zeroshard" not in state:
            if self._layer_sync is not None and trainer.state.fn == "fit":
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            self._shard()
        elif (state["_zeroshard"].options, state.get(CONTEXT, 1)) != (self._options, self.context):
            raise ValueError(
                f"{type(self.model).__name__} has been sharded with other arguments than context={self.context} and "
                f"{self._options}. Give this Trainer's strategy those of the first, or make the module anew"
            )
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _refuse_copies(self, trainer: Any) -> None:
        copying = [getattr(_callbacks, n, None) for n in ("StochasticWeightAveraging", "WeightAveraging")]
        for callback in trainer.callbacks:
            if isinstance(callback, tuple(kind for kind in copying if kind is not None)):
                raise ValueError(
                    f"{type(callback).__name__} keeps a copy of the whole module. For an average of the weights make "
                    "zeroshard.EMA(self, decay) in on_fit_start and call its update() in on_train_batch_end"
                )

    def _shard(self) -> None:
        module = self.model
        on_meta = any(p.is_meta for p in module.parameters())
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.root_device))
        shard(module, **self._shard_arguments)
        if on_meta:
            materialize(module)
        if self.context_parallel is not None:
            for model in module.children():
                attach(model, self.context_parallel)
        module.__dict__[CONTEXT] = self.context

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        runtime = runtime_of(self.model, "ZeroShardStrategy")
        known = [reference() for reference in runtime.optimizers]
        for optimizer in self._stepping:
            if not any(optimizer is each for each in known):
                Stepper(optimizer, runtime)

    @property
    def _stepping(self) -> list[torch.optim.Optimizer]:
        return [each for each in self.optimizers if not isinstance(each, _NoOptimizer)]

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """`Trainer.init_module(empty_init=True)` makes no values: `setup` materializes them a unit at a time."""
        with torch.device("meta") if empty_init else contextlib.nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def teardown(self) -> None:
        """Leaves module and optimizers where they are: shards do not move."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ------------------------------------------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step is the module's own call, so that what is gathered for it is gathered once. A step that steps optimizers
        itself is not: inside it weights change."""
        with self.precision_plugin.train_step_context():
            if self.lightning_module.automatic_optimization:
                return self._called("training_step", *args, **kwargs)
            return self.lightning_module.training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._called("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._called("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._called("predict_step", *args, **kwargs)

    def _called(self, step: str, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self.model, self.lightning_module, step, *args, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.model.no_sync():
            yield

    def on_validation_start(self) -> None:
        self._share_buffers()

    def on_test_start(self) -> None:
        self._share_buffers()

    def on_predict_start(self) -> None:
        """Lightning repeats no row to make the ranks' shares equal when it predicts: some may be done before others."""
        self._share_buffers()
        self._joined.enter_context(join(self.model))

    def on_predict_end(self) -> None:
        self._joined.close()

    def on_exception(self, exception: BaseException) -> None:
        self._joined.__exit__(type(exception), exception, exception.__traceback__)

    def _share_buffers(self) -> None:
        """Running statistics are evaluated as they are saved, and as under DDP: rank 0's."""
        topology = runtime_of(self.model, "ZeroShardStrategy").topology
        for name, buffer in self.model.named_buffers():
            values = buffer.detach().contiguous()
            topology.broadcast(f"buffer {name}", values)
            buffer.detach().copy_(values)

    # ------------------------------------------------------------------------------------------------ checkpoints

    restore_checkpoint_after_setup = True  # pieces are read into what has been sharded

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # written by save_checkpoint, without being made whole

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A folder of everybody's share; whole weights in one file where only weights are asked for. Collective."""
        if storage_options is not None:
            raise TypeError("save_checkpoint(storage_options=...) is for a CheckpointIO, which writes no sharded states")
        path = self.broadcast(str(filepath))
        if "optimizer_states" not in checkpoint:
            if os.path.isdir(path):
                raise IsADirectoryError(f"{path} is a folder with all states; save the weights alone under another name")
            super().save_checkpoint({**checkpoint, "state_dict": full_state_dict(self.model, rank0_only=True)}, path)
        else:
            everything_else = self.broadcast(_packed({**checkpoint, "optimizer_states": []}))
            save(path, self.model, self._stepping or None, extra=everything_else)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(str(checkpoint_path))
        if not os.path.isdir(path):
            return super().load_checkpoint(path, weights_only)
        fitting = self.lightning_module.trainer.state.fn == "fit"
        everything_else = load(path, self.model, (self._stepping or None) if fitting else None)
        return torch.load(io.BytesIO(everything_else), map_location="cpu", weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if checkpoint["state_dict"]:  # of a plain file; a folder's is in place
            super().load_model_state_dict(checkpoint, strict)


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
