"""fp16 compute over fp32 masters, with torch's own loss scaler, and one layer that stays in fp32.

    torchrun --nproc-per-node 2 examples/mixed_precision.py
    python examples/mixed_precision.py                          # one process, the same losses but for rounding

Ranks gather weights and exchange gradients in fp16: half the bytes. The optimizer steps each rank's share of fp32 masters. A
gradient that overflows on any rank makes every rank leave the step out; the scale starts too high here to show it.
The lines marked `# <-` are all that sharding adds; with `compute=torch.bfloat16` no scaler is needed.
"""

import torch
import torch.nn.functional as F
from ranks import Place, meeting
from torch import Tensor, nn

import zeroshard

FEATURES, CLASSES, ROWS, STEPS = 32, 8, 48, 40


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.LayerNorm(FEATURES), nn.GELU()) for _ in range(4))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(x)).float(), labels)


def rows_of(step: int) -> tuple[Tensor, Tensor]:
    rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step))
    return rows, rows[:, :CLASSES].argmax(-1)


def main(place: Place) -> None:
    torch.manual_seed(0)
    model = Classifier().to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(place.device.type, init_scale=2.0**22, growth_interval=1000)
    precision = zeroshard.Precision(compute=torch.float16, keep_fp32=("head",))  # <-
    zeroshard.shard(model, optimizer, stage=3, precision=precision)  # <-

    for step in range(STEPS):
        rows, labels = (place.share(x) for x in rows_of(step))
        loss = model(rows, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            place.say(step, loss=loss, scale=torch.tensor(scaler.get_scale()))
    place.say_memory("model", model)


if __name__ == "__main__":
    with meeting() as place:
        main(place)
