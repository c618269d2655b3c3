"""Merging partial attention results. `out` is softmax-normalised over the keys seen so far, `lse` is the logarithm of
the sum of exponentials that normalised it:

    lse = log(exp(lse_a) + exp(lse_b))        out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

A row that has seen no key has out 0 and lse -inf. B batch, H query heads, L queries, Dv head dim of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Merges a partial result into the accumulators, in place."""
    total = torch.logaddexp(lse, lse_b)
    share = torch.exp(lse_b - total)  # [B, H, L], the part of the weight that is in b
    share.masked_fill_(total == -torch.inf, 0.0)
    # lerp is exact at both ends: a row of which one side has seen nothing is the other side, bit for bit.
    out.lerp_(out_b.to(out.dtype), share[..., None])
    lse.copy_(total)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """One more logit per head that takes weight and gives no value; rows that have seen nobody stay as they are."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    total = torch.where(lse == -torch.inf, lse, total)
    share = torch.exp(lse - total).masked_fill_(total == -torch.inf, 1.0)
    out.mul_(share[..., None])
    lse.copy_(total)


def sinks_gradient(sinks: Tensor, lse: Tensor, out: Tensor, dout: Tensor) -> Tensor:
    """-sum over rows of softmax(sink) * <dout, out>, with `lse` and `out` after the sinks. [H]"""
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    weight = weight.masked_fill_(lse == -torch.inf, 0.0)
    inner = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).masked_fill_(lse == -torch.inf, 0.0)
    return -(weight * inner).sum((0, 2))


def finite(lse: Tensor) -> Tensor:
    """For a kernel's backward: exp(score - lse) of a row that sees nobody has to be 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
