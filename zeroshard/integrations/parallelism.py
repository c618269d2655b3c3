"""accelerate's own `parallelism_config` keys, read as this package means them.

    dp_shard_size      replicas of the data; states are sharded over them
    dp_replicate_size  copies of a whole group of shards (hybrid sharding)
    cp_size            ranks that share one sequence; states are sharded over them too

accelerate reserves `cp_size` for libraries such as this one, but starts its own context parallelism (FSDP2, sdpa only)
wherever it sees `cp_enabled`. `Parallelism` therefore answers True to that question only while the mesh is built: the
`cp` axis exists, the dataloader gives all ranks of it the same batch, and nothing else of accelerate's moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.utils import ParallelismConfig, parse_flag_from_env

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ENVIRONMENT = "ACCELERATE_USE_PARALLELISM_CONFIG"  # `accelerate launch` sets it when the YAML has the section


class Parallelism(ParallelismConfig):
    """A `ParallelismConfig` whose context axis belongs to ring_attention, on CPU ranks as on GPU ranks.

    Raises ValueError, before any process group is made, when a size is not supported or the sizes do not multiply to
    the number of processes.
    """

    _building = False

    @classmethod
    def read(cls, config: ParallelismConfig | None, num_processes: int) -> Parallelism | None:
        """`config`, or else the YAML's section, checked against `num_processes`; None when there is neither."""
        if isinstance(config, cls):
            return config
        if config is None:
            if not parse_flag_from_env(ENVIRONMENT):
                return None
            config = ParallelismConfig()
        unsupported = {"tp_size": config.tp_size, "sp_size": config.sp_size}
        for name, size in unsupported.items():
            if size > 1:
                raise ValueError(
                    f"parallelism_config: {name}={size} is not supported. "
                    "Shard states with dp_shard_size, sequences with cp_size."
                )
        names = ("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size", "sp_size")
        sizes = {name: getattr(config, name) for name in names}  # all of them: what is left out comes from the YAML
        if config.total_size == 1:  # the section only says "no split of a sequence"
            sizes["dp_shard_size"] = num_processes
        parallelism = cls(**sizes)
        parallelism._check(num_processes)
        return parallelism

    def _check(self, num_processes: int) -> None:
        if self.total_size != num_processes:
            raise ValueError(
                f"parallelism_config: dp_replicate_size {self.dp_replicate_size} x dp_shard_size {self.dp_shard_size} "
                f"x cp_size {self.cp_size} = {self.total_size}, but there are {num_processes} processes. "
                "Make the product equal num_processes."
            )
        if self.dp_replicate_size > 1 and self.dp_shard_size == 1:
            raise ValueError(
                f"parallelism_config: dp_replicate_size={self.dp_replicate_size} leaves no ranks to shard over. "
                f"Use dp_shard_size={self.dp_replicate_size}; shard=dict(stage=0) keeps everything replicated."
            )

    @property
    def cp_enabled(self) -> bool:
        return self._building and self.cp_size > 1

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        self._building = True
        try:
            return super().build_device_mesh(device_type)
        finally:
            self._building = False

    def _validate_accelerator(self, accelerator: Any) -> None:
        """accelerate's own check refuses every size above 1 on CPU ranks; ours keeps the product."""
        self._check(accelerator.num_processes)


def shard_mesh(config: ParallelismConfig | None, device_type: str) -> DeviceMesh | None:
    """The mesh `zeroshard.shard` wants: None for one shard axis over all ranks, or 2-D (replicate, shard).

    Context ranks hold different tokens of one sequence, so for states and gradients they are data ranks like any other.
    Collective when the answer is a mesh. Ranks are numbered as in the config's own mesh, replicas outermost.
    """
    if config is None or config.dp_replicate_size == 1:
        return None
    shards = config.dp_shard_size * config.cp_size
    merged = ParallelismConfig(
        dp_replicate_size=config.dp_replicate_size, dp_shard_size=shards, cp_size=1, tp_size=1, sp_size=1
    )
    return merged.build_device_mesh(device_type)
