"""A plain loop that goes on where its checkpoint is, on however many ranks it is started, at whatever stage.

    torchrun --nproc-per-node 4 examples/resume_on_fewer_ranks.py --stage 3 --steps 20
    torchrun --nproc-per-node 2 examples/resume_on_fewer_ranks.py --stage 1 --steps 40      # goes on from step 20
    python examples/resume_on_fewer_ranks.py --steps 60                                     # and from step 40

The lines marked `# <-` are what sharding and checkpoints add. Each step's rows depend on the step alone and are shared out
over the ranks, so the losses are those of one run that nothing interrupted. Kill it at any moment and start it again, or let
`torchrun --max-restarts 10` do so: a save replaces the checkpoint in one instant.
"""

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

import zeroshard

FEATURES, HIDDEN, ROWS = 16, 64, 24  # the rows of a step are divided among 1, 2, 3, 4, 6, ... ranks


def rows_of(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """This rank's share of the step's rows, and what is to be predicted from them."""
    rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step))
    return rows.chunk(ranks)[rank], (rows * rows.roll(1, 1)).chunk(ranks)[rank]


def join_the_others() -> tuple[int, int]:
    """This rank and the number of ranks. Each restart by torchrun has keys of its own in the store, which outlives it."""
    store, rank, ranks = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, ranks = next(rendezvous("env://"))
        store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return rank, ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="in all, those of earlier runs included")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=pathlib.Path("runs/resume/checkpoint"))
    options = parser.parse_args()

    rank, ranks = join_the_others()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, FEATURES)) for _ in range(3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    zeroshard.shard(model, optimizer, stage=options.stage)  # <-

    done = 0
    if options.checkpoint.exists():  # <- whoever saved it
        extra = zeroshard.load(options.checkpoint, model, optimizer)  # <-
        done = extra["done"]
        scheduler.load_state_dict(extra["scheduler"])
    for step in range(done, options.steps):
        rows, targets = rows_of(step, rank, ranks)
        loss = F.mse_loss(model(rows), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(loss := loss.detach())
        if rank == 0:
            print(f"step {step + 1}  ranks {ranks}  loss {loss / ranks:.6f}", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            extra = {"done": step + 1, "scheduler": scheduler.state_dict()}
            zeroshard.save(options.checkpoint, model, optimizer, extra=extra)  # <-
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
