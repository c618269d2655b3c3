"""Direct preference optimization: two forwards of one sharded model, two of its frozen copy, one backward.

    torchrun --nproc-per-node 2 examples/preferences.py
    python examples/preferences.py                              # one process, the same losses

The loss compares how much more likely the model has made the preferred of two sequences than its copy of before training does
(https://arxiv.org/abs/2305.18290). The lines marked `# <-` are all that sharding adds; nothing counts the forwards.
"""

import copy

import torch
import torch.nn.functional as F
from ranks import Place, meeting
from torch import Tensor, nn

import zeroshard

VOCAB, WIDTH, LENGTH, ROWS, STEPS, BETA = 16, 32, 12, 24, 40, 0.1


class Recurrent(nn.Module):
    """A language model whose layers are GRUs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def log_likelihood(model: nn.Module, ids: Tensor) -> Tensor:
    """Of each sequence after its first token. [B]"""
    logits = F.log_softmax(model(ids[:, :-1]), -1)
    return logits.gather(-1, ids[:, 1:, None]).sum((1, 2))


def pairs_of(step: int) -> tuple[Tensor, Tensor]:
    """The preferred sequences count upwards, the others are random."""
    random = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (ROWS, 1), generator=random)
    return (start + torch.arange(LENGTH)) % VOCAB, torch.randint(VOCAB, (ROWS, LENGTH), generator=random)


def main(place: Place) -> None:
    torch.manual_seed(0)
    model = Recurrent().to(place.device)
    before = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeroshard.shard(model, optimizer, stage=3)  # <-
    zeroshard.shard(before, stage=3)  # <- no optimizer: for inference

    for step in range(STEPS):
        preferred, rejected = (place.share(ids) for ids in pairs_of(step))
        gain = log_likelihood(model, preferred) - log_likelihood(model, rejected)
        with torch.no_grad():
            gain_before = log_likelihood(before, preferred) - log_likelihood(before, rejected)
        loss = -F.logsigmoid(BETA * (gain - gain_before)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            place.say(step, loss=loss, margin=(gain - gain_before).mean())
    place.say_memory("model", model)
    place.say_memory("copy", before)


if __name__ == "__main__":
    with meeting() as place:
        main(place)
