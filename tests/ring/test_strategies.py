"""The automatic choice: from work and bytes, the same on every rank, and explained."""

from __future__ import annotations

import pytest
import torch

import ring_attention as ra
from ring_attention import strategies
from ring_attention.strategies import Sizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def sizes(heads: int = 8, kv_heads: int = 8, batch: int = 1) -> Sizes:
    return Sizes(batch, heads, kv_heads, 64, 64, 4)


def test_short_sequences_gather_and_long_ones_ring() -> None:
    mask = ra.Mask(causal=True)
    short = strategies.choose(sizes(7, 1), ra.ZigZag(64, 4), mask, CPU)
    long = strategies.choose(sizes(7, 1), ra.ZigZag(65536, 4), mask, CPU)
    assert (short.strategy, long.strategy) == ("gather", "ring")


def test_work_that_a_layout_leaves_uneven_goes_by_heads() -> None:
    uneven = strategies.choose(sizes(), ra.Contiguous(65536, 4), ra.Mask(causal=True), CPU)
    assert uneven.strategy == "ulysses" and "busiest rank over mean 1.75" in uneven.why


def test_too_few_heads_stay_with_the_ring() -> None:
    choice = strategies.choose(sizes(2, 1), ra.Contiguous(65536, 8), ra.Mask(causal=True), CPU)
    assert choice.strategy == "ring" and "by heads 4.00" in choice.why


def test_one_rank_has_nothing_to_choose() -> None:
    assert strategies.choose(sizes(), ra.ZigZag(64, 1), ra.Mask(), CUDA).why == "one rank: nothing travels"


@pytest.mark.parametrize(
    ("strategy", "axes", "words"),
    [("rnig", 1, "'rnig'"), ("hybrid", 1, "2-D"), ("ring", 2, "2-D mesh"), ("ring", 1, None), ("auto", 2, None)],
)
def test_what_fits_a_handle(strategy: str, axes: int, words: str | None) -> None:
    problem = strategies.check(strategy, axes)
    assert problem is None if words is None else words in str(problem)
