"""A student learns from a frozen teacher that is sharded, too: `shard` without an optimizer.

    torchrun --nproc-per-node 2 examples/distillation.py
    python examples/distillation.py                             # one process, the same losses

A teacher is often what does not fit. Sharded at stage 3, a rank holds its share of the weights and, while it computes, two or
three layers; there are no gradients and no optimizer state. The lines marked `# <-` are all that sharding adds.
"""

import torch
import torch.nn.functional as F
from ranks import Place, meeting
from torch import Tensor, nn

import zeroshard

FEATURES, CLASSES, ROWS, STEPS, TEMPERATURE = 16, 10, 48, 40, 2.0


def network(width: int, depth: int) -> nn.Sequential:
    middle = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
    return nn.Sequential(nn.Linear(FEATURES, width), *middle, nn.Linear(width, CLASSES))


def rows_of(step: int) -> Tensor:
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step))


def main(place: Place) -> None:
    torch.manual_seed(0)
    teacher, student = network(256, 6).to(place.device), network(32, 1).to(place.device)
    with torch.no_grad():
        teacher[-1].weight.mul_(100)  # so that it has something to say
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    zeroshard.shard(teacher.requires_grad_(False), stage=3)  # <- no optimizer: for inference
    zeroshard.shard(student, optimizer, stage=2)  # <-

    for step in range(STEPS):
        rows = place.share(rows_of(step))
        with torch.no_grad():
            taught = F.softmax(teacher(rows) / TEMPERATURE, -1)
        loss = F.kl_div(F.log_softmax(student(rows) / TEMPERATURE, -1), taught, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            place.say(step, loss=loss)
    place.say_memory("teacher", teacher)
    place.say_memory("student", student)


if __name__ == "__main__":
    with meeting() as place:
        main(place)
