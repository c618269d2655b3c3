"""What the short examples share beside their loops: how ranks meet, whose rows are whose, what is printed.

    if __name__ == "__main__":
        with meeting() as place:
            main(place)
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard


@dataclasses.dataclass(frozen=True)
class Place:
    """One process among those that torchrun started, or the only one."""

    rank: int = 0
    ranks: int = 1
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def share(self, rows: Tensor) -> Tensor:
        """This rank's part of the rows of a step, as many as every other's: means over ranks are those of one process."""
        return rows.to(self.device).chunk(self.ranks)[self.rank]

    def say(self, step: int, **values: Tensor) -> None:
        """A line of means over all ranks, printed once."""
        means = {name: self._mean(value.detach()) for name, value in values.items()}
        if self.rank == 0:
            print(f"step {step:4}", *(f"{name} {value:.6f}" for name, value in means.items()), sep="  ", flush=True)

    def say_memory(self, what: str, model: nn.Module) -> None:
        """What every rank holds of a sharded model and its optimizer between steps."""
        held = zeroshard.stats(model).resident_bytes
        lines = [{name: size for name, size in held.items() if size}] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(lines, lines[0])
        if self.rank == 0:
            for rank, line in enumerate(lines):
                sizes = ", ".join(f"{name} {size / 1024:.1f}" for name, size in line.items())
                print(f"rank {rank} holds of the {what}, in KiB: {sizes}", flush=True)

    def _mean(self, value: Tensor) -> float:
        total = value.double().clone()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total.item() / self.ranks


@contextlib.contextmanager
def meeting() -> Iterator[Place]:
    """Joins the ranks of this launch: NCCL between GPUs, gloo between CPUs. Started by `python`, there is one."""
    if "RANK" not in os.environ:
        yield Place()
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield Place(dist.get_rank(), dist.get_world_size(), device)
    dist.barrier()
    dist.destroy_process_group()
