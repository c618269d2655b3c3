"""Losses over sequences that are split: means over the valid tokens of all ranks.

The value is the same on every rank. The gradient of each rank is that of its own tokens, times the number of ranks, so
that *averaging* gradients over the ranks, as data parallelism does, gives the gradient of the mean over all tokens.
N tokens of this rank, V size of the vocabulary, E hidden size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ring_attention import comm
from ring_attention.comm import Call, Team
from ring_attention.errors import UsageError
from ring_attention.lse import wide

CHUNK_TOKENS = 2048
CHUNK_LOGITS = 1 << 21  # logits of one chunk, so that a small vocabulary does not mean one big chunk


def cross_entropy(logits: Tensor, labels: Tensor, teams: list[Team], ignore_index: int, tokens: Tensor | int | None) -> Tensor:
    """Cross entropy of logits [..., V] and labels [...], a scalar in fp32 (fp64 for fp64)."""
    _agree("cross_entropy", "logits", logits.shape[:-1], labels, teams, tokens)
    flat = logits.flatten(0, -2).to(wide(logits.dtype))
    total = F.cross_entropy(flat, labels.flatten(), ignore_index=ignore_index, reduction="sum")
    return _mean(total, labels, teams, ignore_index, tokens)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, teams: list[Team], ignore_index: int, tokens: Tensor | int | None,
    bias: Tensor | None = None, chunk_tokens: int | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of logits hidden @ weight.T + bias, a chunk of tokens at a time; logits are never whole.

    hidden [..., E], weight [V, E], bias [V]. The chunk's logits and their gradients are made in forward, which leaves
    dhidden, dweight and dbias to be scaled in backward (as in Liger, arXiv 2410.10989).
    """
    size = chunk_tokens or max(1, min(CHUNK_TOKENS, CHUNK_LOGITS // max(1, weight.shape[0])))
    most = _agree("linear_cross_entropy", "hidden", hidden.shape[:-1], labels, teams, tokens)
    num_chunks = max(1, -(-most // size))  # the same on every rank, though their shares differ
    weight = weight.view_as(weight)  # a parameter that is kept elsewhere, or in another dtype, is fetched here, once
    bias = None if bias is None else bias.view_as(bias)
    total = ChunkedLoss.apply(hidden.flatten(0, -2), weight, bias, labels.flatten(), ignore_index, num_chunks)
    return _mean(total, labels, teams, ignore_index, tokens)


def num_tokens(labels: Tensor, teams: list[Team], ignore_index: int) -> TokenCount:
    """Number of valid labels over all ranks, int64."""
    comm.agree(teams, Call({"call": "num_tokens"}))
    return TokenCount.over(comm.total(teams), comm.sum_over(teams, (labels != ignore_index).sum()))


class TokenCount(Tensor):
    """A number of tokens that knows over how many ranks it was counted, and so do the results of arithmetic with it.

    A plain number in its place stands for a count over all ranks of the job.
    """

    num_ranks: int

    @staticmethod
    def over(num_ranks: int, count: Tensor) -> TokenCount:
        made = count.as_subclass(TokenCount)
        made.num_ranks = num_ranks
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises UsageError for counts over different numbers of ranks in one expression."""
        result = super().__torch_function__(func, types, args, kwargs)
        counts = [x for x in tree_leaves((args, kwargs)) if isinstance(x, TokenCount)]
        ranks = {x.__dict__["num_ranks"] for x in counts if "num_ranks" in x.__dict__}
        if len(ranks) > 1:
            raise UsageError(f"counts of tokens over {' and '.join(map(str, sorted(ranks)))} ranks in one expression")
        for x in tree_leaves(result):
            if ranks and isinstance(x, TokenCount):
                x.num_ranks = next(iter(ranks))
        return result


def _agree(name: str, what: str, shape: torch.Size, labels: Tensor, teams: list[Team], tokens: Tensor | int | None) -> int:
    """The largest number of tokens that a rank has. `shape`: that of the tokens behind `what`."""
    problem = None
    if labels.shape != shape:
        problem = (
            f"{what} are for tokens {list(shape)}, labels are {list(labels.shape)}; pass this rank's shift_labels, "
            "which are not shifted again"
        )
    told = {"call": name, "tokens given": str(tokens is not None)}
    return max(lengths[0] for lengths in comm.agree(teams, Call(told, (labels.numel(), 0), problem)).lengths)


def _mean(total: Tensor, labels: Tensor, teams: list[Team], ignore_index: int, tokens: Tensor | int | None) -> Tensor:
    counted = torch.stack([total.detach().double(), (labels != ignore_index).sum().to(total.device).double()])
    summed, count = comm.sum_over(teams, counted)
    ranks = size = comm.total(teams)
    if tokens is not None:
        ranks = tokens.num_ranks if isinstance(tokens, TokenCount) else comm.num_ranks()
        count = torch.as_tensor(float(tokens), dtype=torch.float64, device=total.device)
    count = count.clamp(min=1)
    value = summed * ranks / (size * count)  # its mean over replicas is the mean over all their tokens
    return Shared.apply(total, value.to(total.dtype), (ranks / count).to(total.dtype))


class Shared(torch.autograd.Function):
    """A value that all ranks share, with the gradient `factor` for this rank's own `total`. All scalars."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor, None, None


class ChunkedLoss(torch.autograd.Function):
    """Sum of cross entropies over [N] tokens, in `num_chunks` chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, num_chunks: int
    ) -> Tensor:
        sums = wide(hidden.dtype)
        total = torch.zeros((), dtype=sums, device=hidden.device)
        wants = ctx.needs_input_grad
        dhidden = torch.empty_like(hidden) if wants[0] else None
        dweight = torch.zeros_like(weight, dtype=sums) if wants[1] else None
        dbias = torch.zeros_like(bias, dtype=sums) if wants[2] and bias is not None else None
        border = [len(hidden) * chunk // num_chunks for chunk in range(num_chunks + 1)]
        for start, stop in pairwise(border):
            y = labels[start:stop]
            valid = y != ignore_index
            h = hidden[start:stop].masked_fill(~valid[:, None], 0)  # whatever an ignored token holds stays there
            logits = F.linear(h, weight, bias).to(sums)  # [chunk, V]
            target = y.masked_fill(~valid, 0)[:, None]
            norm = torch.logsumexp(logits, -1, keepdim=True)
            total += ((norm - logits.gather(1, target))[:, 0] * valid).sum()
            if not any(wants):
                continue
            slope = logits.sub_(norm).exp_()  # softmax - onehot, in the place of the logits
            slope.scatter_add_(1, target, torch.full_like(norm, -1.0)).mul_(valid[:, None])
            if dhidden is not None:
                dhidden[start:stop] = slope.to(weight.dtype) @ weight
            if dweight is not None:
                dweight.addmm_(slope.T, h.to(sums))
            if dbias is not None:
                dbias += slope.sum(0)
        ctx.save_for_backward(dhidden, dweight, dbias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def scaled(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            return None if x is None else (x * grad).to(dtype)

        grads = [scaled(x, dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return (*grads, None, None, None)
