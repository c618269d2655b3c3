"""The mask's rule in words, its work per row, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ring_attention as ra
from ring_attention import masks
from tests.ring.drawn import masks as drawn_masks
from tests.ring.problems import Problem


@st.composite
def drawn(draw: st.DrawFn) -> Problem:
    S, B = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    return Problem(S=S, B=B, mask=draw(drawn_masks(S, B)))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(problem=drawn())
def test_allows_is_the_contract(problem: Problem) -> None:
    mask, at = problem.mask_of(), torch.arange(problem.S)
    want = problem.visible()[:, 0]
    assert torch.equal(mask.allows(at, at).expand(want.shape), want)
    some, others = at[::2], at[1::3]
    assert torch.equal(mask.allows(some, others).expand(problem.B, -1, -1), want[:, some][:, :, others])


@settings(deadline=None, max_examples=200, derandomize=True)
@given(problem=drawn())
def test_row_work_counts_what_a_query_sees(problem: Problem) -> None:
    mask = problem.mask_of()
    want = problem.visible()[: mask.batch, 0].sum((0, 2))
    assert mask.row_work(problem.S).tolist() == want.tolist()


@settings(deadline=None, max_examples=100, derandomize=True)
@given(problem=drawn())
def test_the_spec_and_the_tensors_say_it_all(problem: Problem) -> None:
    mask, at = problem.mask_of(), torch.arange(problem.S)
    again = masks.parse(mask.spec, mask.documents, mask.prefix)
    assert torch.equal(again.allows(at, at), mask.allows(at, at))


def test_mask_mod_is_broadcast_over_what_it_does_not_use() -> None:
    at = torch.arange(5)
    plain = ra.Mask(mask_mod=lambda b, h, q, k: q - k < 2).mod_table(at, at, 2, 3)
    by_head = ra.Mask(mask_mod=lambda b, h, q, k: q - k < h).mod_table(at, at, 2, 3)
    assert plain is not None and plain.shape == (1, 1, 5, 5)
    assert by_head is not None and by_head.shape == (1, 3, 5, 5) and not by_head[0, 0].equal(by_head[0, 2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 5}, "window must be a pair"),
        ({"window": (1.5, 0)}, "window must be a pair"),
        ({"documents": torch.zeros(3)}, "documents must be an integer tensor"),
        ({"documents": [0, 1]}, "documents must be an integer tensor"),
        ({"documents": torch.zeros(1, 1, 3).long()}, "documents must be an integer tensor"),
        ({"prefix": 3}, "prefix must be an integer tensor"),
    ],
)
def test_mistakes_are_named(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ra.Mask(**options)


def test_masks_show_what_they_are() -> None:
    mask = ra.Mask(causal=True, window=(3, None), documents=torch.zeros(4).long())
    assert repr(mask) == "Mask(causal=True, window=(3, None), documents=int64[4], prefix=None, mask_mod=None)"
    assert mask.summary() == "causal + window (3, None) + documents" and ra.Mask().summary() == "full attention"


@settings(deadline=None, max_examples=100, derandomize=True)
@given(problem=drawn())
def test_extent_is_the_furthest_that_anybody_sees(problem: Problem) -> None:
    """Never less than that; exactly that where documents alone decide."""
    seen = problem.visible().any(0)[0].nonzero()
    furthest = int((seen[:, 0] - seen[:, 1]).abs().max()) + 1 if len(seen) else 0
    extent = problem.mask_of().extent(problem.S)
    assert furthest <= extent <= problem.S
    if set(problem.mask) <= {"causal", "documents"}:
        assert extent == furthest
