"""Two sharded models against each other: one call of `shard` for each, with its own optimizer.

    torchrun --nproc-per-node 2 examples/gan.py
    python examples/gan.py                                      # one process, the same losses

The generator's loss flows back through the discriminator and leaves gradients there, which `zero_grad` clears as in any loop;
the discriminator runs twice before its one backward. The lines marked `# <-` are all that sharding adds.
"""

import torch
import torch.nn.functional as F
from ranks import Place, meeting
from torch import Tensor, nn

import zeroshard

NOISE, WIDTH, ROWS, STEPS = 8, 64, 48, 40


def layers(inputs: int, outputs: int) -> nn.Sequential:
    middle = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)) for _ in range(3))
    return nn.Sequential(nn.Linear(inputs, WIDTH), *middle, nn.Linear(WIDTH, outputs))


def real_rows(random: torch.Generator) -> Tensor:
    """Points on a ring."""
    angle = torch.rand(ROWS, 1, generator=random) * 6.2832
    return torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(ROWS, 2, generator=random)


def main(place: Place) -> None:
    torch.manual_seed(0)
    generator, discriminator = layers(NOISE, 2).to(place.device), layers(2, 1).to(place.device)
    making = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    judging = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    zeroshard.shard(generator, making, stage=3)  # <-
    zeroshard.shard(discriminator, judging, stage=3)  # <-

    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        real, noise = place.share(real_rows(random)), place.share(torch.randn(ROWS, NOISE, generator=random))
        made = generator(noise)

        judged = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made.detach())).mean()
        judged.backward()
        judging.step()
        judging.zero_grad()

        fooled = F.softplus(-discriminator(made)).mean()
        fooled.backward()
        making.step()
        making.zero_grad()
        judging.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            place.say(step, discriminator_loss=judged, generator_loss=fooled)
    place.say_memory("generator", generator)
    place.say_memory("discriminator", discriminator)


if __name__ == "__main__":
    with meeting() as place:
        main(place)
