"""Muon for the matrices of the blocks, AdamW for the rest: a list of optimizers.

    torchrun --nproc-per-node 2 examples/muon.py
    python examples/muon.py                                     # one process, the same losses

Muon orthogonalizes whole matrices, which a share of one cannot be: each matrix is given to one rank for the step, and
its momentum stays there. AdamW steps each rank's share of the rest. The line that sharding adds is marked `# <-`.
"""

import torch
import torch.nn.functional as F
from ranks import Place, meeting
from torch import Tensor, nn

import zeroshard

VOCAB, WIDTH, LENGTH, ROWS, STEPS = 16, 32, 8, 24, 40


class Mixer(nn.Module):
    """Predicts a token from those before it: blocks of two matrices between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        blocks = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for shift, block in enumerate(self.blocks):
            past = F.pad(x, (0, 0, shift, 0))[:, : x.shape[1]]
            x = x + block(F.layer_norm(x + past, (WIDTH,)))
        return self.head(x)


def ids_of(step: int) -> Tensor:
    """Each token is the sum of the two before it."""
    ids = torch.randint(VOCAB, (ROWS, 2), generator=torch.Generator().manual_seed(step))
    for _ in range(LENGTH):
        ids = torch.cat([ids, ids[:, -2:].sum(1, keepdim=True) % VOCAB], 1)
    return ids


def main(place: Place) -> None:
    torch.manual_seed(0)
    model = Mixer().to(place.device)
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    rest = [param for param in model.parameters() if not any(param is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0)
    adamw = torch.optim.AdamW(rest, lr=3e-3)
    zeroshard.shard(model, [muon, adamw], stage=3)  # <-

    for step in range(STEPS):
        ids = place.share(ids_of(step))
        loss = F.cross_entropy(model(ids[:, :-1])[:, 1:].flatten(0, 1), ids[:, 2:].flatten())
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            place.say(step, loss=loss)
    place.say_memory("model", model)


if __name__ == "__main__":
    with meeting() as place:
        main(place)
