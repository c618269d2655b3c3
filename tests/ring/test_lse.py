"""Merging partial results: equal to one softmax over all keys, whatever the order, with rows that see nothing."""

from __future__ import annotations

import itertools

import torch

from ring_attention import lse


def partial(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    norm = scores.logsumexp(-1)
    return (scores - norm.masked_fill(norm == -torch.inf, 0)[..., None]).exp() @ values, norm


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    out, norm = (x.clone() for x in parts[0])
    for part in parts[1:]:
        lse.merge_(out, norm, *part)
    return out, norm


def test_any_order_gives_one_softmax() -> None:
    scores, values = torch.randn(2, 3, 5, 12, dtype=torch.float64) * 50, torch.randn(2, 3, 12, 4, dtype=torch.float64)
    scores[..., 1, :] = -torch.inf  # a row that sees nothing at all
    scores[..., 2, 4:8] = -torch.inf  # one that sees nothing of the second part
    parts = [partial(scores[..., a:b], values[:, :, a:b]) for a, b in ((0, 4), (4, 8), (8, 12))]
    want = partial(scores, values)
    for order in itertools.permutations(parts):
        out, norm = merged(list(order))
        assert torch.allclose(out, want[0], atol=1e-12, rtol=0) and torch.equal(norm == -torch.inf, want[1] == -torch.inf)
        assert (out[..., 1, :] == 0).all() and torch.allclose(norm[..., 2], want[1][..., 2])


def test_a_side_that_saw_nothing_changes_no_bit() -> None:
    out, norm = torch.randn(1, 1, 4, 3), torch.randn(1, 1, 4)
    nothing = torch.zeros(1, 1, 4, 3), torch.full((1, 1, 4), -torch.inf)
    for order in ([(out, norm), nothing], [nothing, (out, norm)]):
        found = merged(order)
        assert torch.equal(found[0], out) and torch.equal(found[1], norm)


def test_sinks_and_their_gradient() -> None:
    scores, values = torch.randn(2, 3, 5, 6, dtype=torch.float64), torch.randn(2, 3, 6, 4, dtype=torch.float64)
    scores[:, :, 2] = -torch.inf
    sinks, dout = torch.randn(3, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    column = sinks.view(1, 3, 1, 1).expand(2, 3, 5, 1)
    want = torch.cat([scores, column], -1).softmax(-1)[..., :6] @ values
    want.backward(dout)
    out, norm = partial(scores, values)
    lse.add_sinks_(out, norm, sinks.detach())
    dout[:, :, 2] = torch.nan  # the row that sees nobody has no gradient, whatever comes in
    got = lse.sinks_gradient(sinks.detach(), norm, out, dout)
    assert torch.allclose(out, want, atol=1e-14) and torch.allclose(got, sinks.grad, atol=1e-13)


def test_finite_has_no_infinity() -> None:
    assert lse.finite(torch.tensor([-torch.inf, 2.0])).tolist() == [0.0, 2.0]
