"""What hypothesis draws: masks and whole attention problems."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.ring.problems import Problem


@st.composite
def masks(draw: st.DrawFn, S: int, B: int) -> dict[str, Any]:
    """Keywords of a `Mask` for sequences of length S in a batch of B."""
    mask: dict[str, Any] = {"causal": draw(st.booleans())}
    end = st.none() | st.integers(0, S + 1)
    if draw(st.booleans()):
        mask["window"] = draw(st.tuples(end, end))
    if draw(st.booleans()):
        row = st.lists(st.integers(-1, 3), min_size=S, max_size=S)
        if draw(st.booleans()):
            row = row.map(sorted)
        mask["documents"] = draw(st.one_of(row, st.lists(row, min_size=B, max_size=B)))
    if draw(st.booleans()):
        mask["prefix"] = draw(st.lists(st.integers(0, S + 1), min_size=B, max_size=B))
    return mask


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    S, B, kv = draw(st.integers(1, 25)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Problem(
        S=S,
        B=B,
        heads=(kv * draw(st.integers(1, 3)), kv),
        dims=draw(st.sampled_from([(8, 8), (4, 6), (8, 3)])),
        mask=draw(masks(S, B)),
        layout=draw(st.sampled_from(["Contiguous", "ZigZag", "Striped", "Balanced"])),
        strategy=draw(st.sampled_from(["ring", "gather", "ulysses", "auto"])),
        softcap=draw(st.sampled_from([None, None, 2.0])),
        scale=draw(st.sampled_from([None, 0.5])),
        sinks=draw(st.booleans()),
        memory=draw(st.sampled_from(["", "", "q", "k", "v", "d", "qkvd"])),
        seed=draw(st.integers(0, 99)),
    )
