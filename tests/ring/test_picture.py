"""The picture of a plan, and the command that draws it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

import ring_attention as ra
from ring_attention import picture
from ring_attention.__main__ import main, parse_mask
from tests.harness import REPOSITORY


@pytest.mark.parametrize("layout", [ra.Contiguous(20, 3), ra.ZigZag(20, 3), ra.Striped(20, 3)])
@pytest.mark.parametrize("text", ["full", "causal", "causal+window:5,0", "causal+documents:4,9,3", "causal+prefix:6"])
def test_every_pair_is_drawn_once_with_the_rank_that_has_the_query(layout: ra.ZigZag, text: str) -> None:
    mask, at = parse_mask(text, 20), torch.arange(20)
    drawn = picture.steps(layout, mask)
    assert np.array_equal((drawn > 0).sum(0), mask.allows(at, at)[0].long().numpy())
    for rank in range(3):
        assert set(np.unique(drawn[:, layout.held(rank)])) <= {0, rank + 1}
    assert picture.work(layout, mask).sum() == mask.allows(at, at)[0].sum()


def test_zigzag_is_even_and_contiguous_is_not() -> None:
    causal = ra.Mask(causal=True)
    assert picture.balance(picture.work(ra.ZigZag(64, 4), causal)) == 1.0
    assert picture.balance(picture.work(ra.Contiguous(64, 4), causal)) > 1.7


def test_the_command_draws(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    assert main(["plan", "--mask", "causal+window:7,0", "--layout", "Striped", "--ranks", "3", "--output", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and "busiest rank / mean: 1.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--mask", "window:x"],
        ["--mask", "casual"],
        ["--layout", "spiral"],
        ["--output", "/nowhere/at/all.png"],
        ["--ranks", "0"],
    ],
)
def test_a_mistake_is_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m ring_attention: ") and said.count("\n") == 1


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "ring_attention", "plan", "--layout", "spiral"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 2 and "unknown layout 'spiral'" in done.stderr and "Traceback" not in done.stderr
