"""Sums of parts, and results whose heads lie side by side."""

from __future__ import annotations

import torch

from ring_attention import sums
from ring_attention.sums import Place


def test_a_sum_writes_first_and_adds_later() -> None:
    total = sums.Sum((2, 1, 6, 3), torch.float64, torch.device("cpu"))
    want = torch.zeros(2, 1, 6, 3, dtype=torch.float64)
    everything = slice(None)
    for rows, tokens in ((slice(0, 1), slice(0, 3)), (everything, slice(2, 5)), (slice(1, 2), slice(0, 4))):
        part = torch.randn_like(want[rows, :, tokens])
        total.add(Place(rows, tokens.start, tokens.stop), part)
        want[rows, :, tokens] += part
    assert torch.allclose(total.value(), want) and (total.value()[:, :, 5] == 0).all()


def test_a_first_part_that_covers_all_is_the_sum() -> None:
    total, part = sums.Sum((1, 1, 4, 2), torch.float32, torch.device("cpu")), torch.randn(1, 1, 4, 2)
    total.add(Place(slice(None), 0, 4), part)
    assert total.value() is part


def test_portions_of_heads_make_one_result() -> None:
    """What nobody adds to is `empty`; a result of one portion is its sum, of several a tensor that nobody copies."""
    like, heads = torch.empty(2, 3, 4, 5, dtype=torch.bfloat16), [slice(0, 2), slice(2, 3)]
    made = sums.Portioned(like.shape, like, heads, empty=-1.0)
    part = torch.randn(2, 2, 3, 5)
    made.sums[0].add(Place(slice(None), 1, 4), part)
    value = made.value()
    assert value.dtype == torch.float32 and torch.equal(value[:, :2, 1:], part)
    assert (value[:, :2, 0] == -1).all() and (value[:, 2:] == -1).all()
    assert made.sums[1].value().data_ptr() == value[:, 2:].data_ptr()


def test_runs_of_one_row_are_written_and_added_in_their_places() -> None:
    """A place of several runs is a view: what is added there is added to the sum, holes stay holes."""
    total = sums.Sum((2, 3, 11, 2), torch.float64, torch.device("cpu"))
    want = torch.zeros(2, 3, 11, 2, dtype=torch.float64)
    for row, start, length, count, stride in ((1, 1, 2, 3, 4), (0, 0, 3, 2, 5), (1, 0, 4, 2, 6)):
        part = torch.randn(count, 3, length, 2, dtype=torch.float64)
        total.add(Place(slice(row, row + 1), start, start + length, count, stride), part)
        for number, run in enumerate(part):
            at = start + number * stride
            want[row, :, at : at + length] += run
    assert torch.equal(total.value(), want)
