"""A plain torch transformer on sequences that are split over ranks: three lines, marked `# <-`.

    torchrun --nproc-per-node 2 examples/long_context.py --seq-len 1024
    python examples/long_context.py --seq-len 1024                      # one process, the same losses

The second half of every sequence repeats the first, so each prediction there needs a token from half a sequence ago,
which another rank may hold. Attention that saw a rank's own tokens only could not learn it.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attention import ContextParallel

VOCAB, WIDTH, HEADS = 32, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.project(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotated(q, angles), rotated(k, angles), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([Block() for _ in range(num_layers)])

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        rates = 10000.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
        angles = position_ids[:, None, :, None] * rates  # [B, 1, S, D / 2]
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(x)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: halves of the head dim are turned by an angle that grows with the position."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def batch_of(step: int, size: int, seq_len: int) -> dict[str, Tensor]:
    """The same whole sequences on every rank; labels only where the token can be known."""
    half = torch.randint(VOCAB, (size, seq_len // 2), generator=torch.Generator().manual_seed(step))
    ids = torch.cat([half, half], 1)
    labels = ids.clone()
    labels[:, : seq_len // 2] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    cp = ContextParallel(dist.group.WORLD)  # <- in place of nothing
    for step in range(options.steps):
        batch = cp.shard(batch_of(step, options.batch_size, options.seq_len))  # <- this rank's part of it
        with cp:  # <- attention sees the whole sequence, the loss all tokens
            logits = model(batch["input_ids"], batch["position_ids"])
            loss = cp.cross_entropy(logits, batch["shift_labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step:4}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
