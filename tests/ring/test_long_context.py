"""The plain transformer of examples/long_context.py learns the same on one rank and on two, with three lines added."""

from __future__ import annotations

import re

from tests.harness import REPOSITORY, torchrun

SCRIPT = REPOSITORY / "examples" / "long_context.py"


def losses(world: int) -> list[float]:
    done = torchrun(SCRIPT, "--seq-len", 32, "--steps", 41, "--batch-size", 4, world=world).check()
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", str(done))]


def test_losses_do_not_depend_on_the_ranks() -> None:
    one, two = losses(1), losses(2)
    assert len(one) == 3 and all(abs(a - b) < 1e-3 for a, b in zip(one, two, strict=True)), (one, two)


def test_three_lines_are_marked() -> None:
    assert sum("# <-" in line for line in SCRIPT.read_text().splitlines()[9:]) == 3
