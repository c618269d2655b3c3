"""A convolutional classifier with BatchNorm, computed in bf16.

    torchrun --nproc-per-node 2 examples/image_classifier.py

BatchNorm computes in fp32 whatever `compute` is. Each rank normalizes by the images of its own and keeps its own running
statistics, as without sharding; those of rank 0 are saved, and given to all by `load`. So losses differ a little with
the number of ranks, as they do under any data parallelism. The lines marked `# <-` are all that sharding adds.
"""

import torch
import torch.nn.functional as F
from ranks import Place, meeting
from torch import Tensor, nn

import zeroshard

CLASSES, SIZE, IMAGES, STEPS = 4, 12, 48, 40


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


def images_of(step: int) -> tuple[Tensor, Tensor]:
    """Noise with a bright stripe at one of four angles. [N, 1, SIZE, SIZE], [N]"""
    random = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (IMAGES,), generator=random)
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")
    angle = labels[:, None, None] * torch.pi / CLASSES
    stripe = torch.exp(-8 * (x * angle.sin() - y * angle.cos()) ** 2)
    return (stripe + 1.5 * torch.randn(IMAGES, SIZE, SIZE, generator=random))[:, None], labels


def main(place: Place) -> None:
    torch.manual_seed(0)
    stem, head = nn.Conv2d(1, 16, 3, padding=1), nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, CLASSES))
    model = nn.Sequential(stem, *(Residual(16) for _ in range(3)), head).to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    precision = zeroshard.Precision(compute=torch.bfloat16)  # <-
    zeroshard.shard(model, optimizer, stage=3, precision=precision)  # <-

    for step in range(STEPS):
        images, labels = (place.share(x) for x in images_of(step))
        logits = model(images).float()
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            place.say(step, loss=loss, accuracy=(logits.argmax(-1) == labels).float().mean())

    model.eval()
    with torch.no_grad():
        images, labels = (place.share(x) for x in images_of(STEPS))
        place.say(STEPS, held_out_accuracy=(model(images).argmax(-1) == labels).float().mean())
    place.say_memory("model", model)


if __name__ == "__main__":
    with meeting() as place:
        main(place)
