"""A plain torch loop with one line added: parameters, gradients and optimizer state are cut over the ranks.

    torchrun --nproc-per-node 2 examples/plain_loop.py
    python examples/plain_loop.py                               # one process, the same losses

The line is marked `# <-`. Clipping, the scheduler and the optimizer are torch's own and see the whole model.
"""

import torch
import torch.nn.functional as F
from ranks import Place, meeting
from torch import Tensor, nn

import zeroshard

FEATURES, ROWS, STEPS = 32, 24, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 128), nn.Linear(128, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def rows_of(step: int) -> Tensor:
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step))


def main(place: Place) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    zeroshard.shard(model, optimizer, stage=3)  # <-

    for step in range(STEPS):
        rows = place.share(rows_of(step))
        loss = F.mse_loss(model(rows), rows * rows.roll(1, 1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            place.say(step, loss=loss, norm=norm)
    place.say_memory("model", model)


if __name__ == "__main__":
    with meeting() as place:
        main(place)
