"""An exponential moving average of the weights, kept as each rank's share of it, used for evaluation and saved.

    torchrun --nproc-per-node 2 examples/average.py
    python examples/average.py                                  # one process, the same losses

`update` communicates nothing; inside `applied` the model's weights are the average. With labels this noisy and a constant
learning rate the average is better than any one step's weights. The lines marked `# <-` are what sharding and averaging add.
"""

import pathlib

import torch
import torch.nn.functional as F
from ranks import Place, meeting
from torch import Tensor, nn

import zeroshard

FEATURES, ROWS, STEPS = 16, 24, 90


def rows_of(step: int, noise: float) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    rows = torch.randn(ROWS, FEATURES, generator=random)
    return rows, rows.roll(1, 1) + noise * torch.randn(ROWS, FEATURES, generator=random)


def main(place: Place, checkpoint: pathlib.Path = pathlib.Path("runs/average")) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(2)))
    model.append(nn.Linear(FEATURES, FEATURES)).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    zeroshard.shard(model, optimizer, stage=3)  # <-
    ema = zeroshard.EMA(model, decay=0.95)  # <-

    def held_out() -> Tensor:
        rows, targets = (place.share(x) for x in rows_of(10_000, noise=0.0))
        with torch.no_grad():
            return F.mse_loss(model(rows), targets)

    for step in range(STEPS):
        rows, targets = (place.share(x) for x in rows_of(step, noise=2.0))
        loss = F.mse_loss(model(rows), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()  # <-
        if step % 30 == 29:
            weights = held_out()
            with ema.applied():  # <-
                place.say(step, loss=loss, held_out_loss=weights, held_out_loss_of_average=held_out())
    zeroshard.save(checkpoint, model, optimizer, ema=ema)  # <- and load(..., ema=ema)
    place.say_memory("model", model)


if __name__ == "__main__":
    with meeting() as place:
        main(place)
