"""`ContextParallel`: ties layout, masks and attention to a model and its batches."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, overload

from torch import Tensor, nn

from ring_attention import batch as batches
from ring_attention import comm, loss
from ring_attention import decode as decoding
from ring_attention.batch import IGNORE_INDEX
from ring_attention.comm import Group, Team
from ring_attention.errors import UsageError
from ring_attention.inside import Inside, Sharding
from ring_attention.integrations import transformers
from ring_attention.layouts import Layout, ZigZag
from ring_attention.masks import Mask
from ring_attention.strategies import check


class ContextParallel:
    """Splits sequences over the ranks of a group, and makes attention see them whole.

        cp = ContextParallel(mesh["cp"])
        batch = cp.shard(batch)
        with cp:
            loss = cp.cross_entropy(model(...).logits, batch["shift_labels"])

    Args:
        group: a `ProcessGroup`, a 1-D `DeviceMesh`, or a 2-D one (ring x heads) for the strategy "hybrid".
        layout: the class of the layouts: which positions a rank holds.
        strategy: "ring", "gather", "ulysses", "hybrid" or "auto".

    Raises:
        UsageError: no group, an unknown strategy.
    """

    def __init__(self, group: Group, layout: type[Layout] = ZigZag, strategy: str = "auto") -> None:
        self._groups = comm.group_names(group)
        self._teams = [Team(name) for name in self._groups.split("|")]
        problem = check(strategy, len(self._teams))
        if problem is not None:
            raise UsageError(problem)
        self.rank, self.world_size = comm.place(self._teams), comm.total(self._teams)
        self._layout, self._strategy = layout, strategy
        self._attached: list[transformers.Attachment] = []
        self._entered: list[Inside] = []
        self._counted_over: set[int] = set()  # numbers of ranks that num_tokens has been asked to count over
        self._whole: Layout | None = None  # of the last batch, where the layout depends on it
        self.sharding = self._sharding(None, None, None)

    # -- batches and tensors
    @overload
    def shard(self, x: Tensor, dim: int = 1) -> Tensor: ...
    @overload
    def shard(self, x: Mapping[str, Any], dim: int = 1) -> dict[str, Any]: ...
    def shard(self, x: Tensor | Mapping[str, Any], dim: int = 1) -> Tensor | dict[str, Any]:
        """This rank's part of a tensor along `dim`, or of a batch of whole sequences (a new dict).

        Of a batch: `shift_labels` (shifted over the whole sequence) take the place of `labels`, `position_ids` are
        added when missing, every `[B, S]` tensor is split. Documents, restarting positions and padding in it hold for
        the attention calls that follow.
        """
        if isinstance(x, Tensor):
            return self.layout(x.shape[dim]).shard(x, self.rank, dim)
        whole, self.sharding = self.placed(batches.documents_of(x), batches.whole_shape(x)[1])
        self.sharding.counted = x.get("position_ids") is None
        self._whole = whole if self._layout.needs_mask else None
        return batches.shard(x, whole, self.rank)

    def placed(self, documents: Tensor | None, seq_len: int) -> tuple[Layout, Sharding]:
        """How a whole sequence of this length is split; changes nothing."""
        whole = self._layout.build(Mask(causal=True, documents=documents), seq_len, self.world_size)
        return whole, self._sharding(documents, seq_len, whole if self._layout.needs_mask else None)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor, in order, on every rank. In backward a part's gradient is the sum of all ranks'."""
        return batches.unshard(x, dim, self._teams, self.sharding.layout)

    def layout(self, seq_len: int) -> Layout:
        """The layout of a sequence of this length."""
        if self._whole is not None and self._whole.seq_len == seq_len:
            return self._whole
        return self._layout.build(Mask(causal=True), seq_len, self.world_size)

    def positions(self, seq_len: int) -> Tensor:
        """Global positions of this rank's tokens, ascending. int64 `[S_local]`"""
        return self.layout(seq_len).positions(self.rank)

    def _sharding(self, documents: Tensor | None, seq_len: int | None, whole: Layout | None) -> Sharding:
        layout = self._layout.pending(self.world_size) if whole is None else whole.spec
        return Sharding(self._groups, layout, self._strategy, documents, seq_len)

    # -- attention
    def __enter__(self) -> ContextParallel:
        self._check_attached()
        inside = Inside(self)
        inside.open()
        self._entered.append(inside)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.pop().close(failed=error is not None)
        if error is None:
            self._check_attached()

    @property
    def active(self) -> bool:
        """Whether attention sees whole sequences at this moment: in this thread, or in a backward pass, inside `with cp`."""
        return any(inside.active for inside in self._entered)

    def attach(self, model: nn.Module) -> None:
        """Lets a transformers model take its attention from here inside `with cp`.

        `with cp: model.generate(...)` is given the whole prompt on every rank, padded on the left, and answers with the
        whole sequences on every rank. Keys and values stay sharded: each position is on one rank. Greedy tokens are
        those of one process; sampling draws from rank 0's generator.

        Raises:
            UsageError: the model computes attention by itself, takes no `position_ids`, or has layers that carry state
                along the sequence.
        """
        model = transformers.unwrapped(model)
        attachment = transformers.attach(model)
        self._attached = [a for a in self._attached if a.model() is not model] + [attachment]

    def detach(self, model: nn.Module) -> None:
        """Gives the model its former attention back."""
        model = transformers.unwrapped(model)
        for attachment in [a for a in self._attached if a.model() is model]:
            transformers.detach(attachment)
            self._attached.remove(attachment)

    def _check_attached(self) -> None:
        for attachment in self._attached:
            swapped = attachment.swapped()
            if swapped is not None:
                self.sharding.refuse(
                    f"the attention implementation of an attached model was changed to {swapped!r}; each rank would "
                    "attend to its own tokens only. Detach the model first, or attach it again"
                )

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, *,
        scale: float | None = None, sinks: Tensor | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of queries that all ranks hold alike over keys of which each is on exactly one rank.

        For decoding loops with a key/value cache of their own: prefill leaves each rank the keys of its part of the
        prompt, a new token's key is kept by one rank, and every query sees all keys given.

        Args:
            query: `[B, Hq, L, D]`, the same on every rank.
            key: `[B, Hkv, K, D]`, this rank's part; K may differ between ranks and be 0.
            value: `[B, Hkv, K, Dv]`.
            scale, sinks, softcap: as in `ring_attention`.

        Returns:
            `[B, Hq, L, Dv]`, the same bits on every rank.

        Raises:
            UsageError: shapes or dtypes that do not fit, a call that wants a gradient, on all ranks.
            DivergenceError: the ranks disagree.
        """
        return decoding.decode(self._teams, query, key, value, scale, sinks, softcap)

    def explain(self) -> str:
        """The strategy of the last attention call, and why."""
        return self.sharding.explain()

    # -- losses
    def cross_entropy(
        self,
        logits: Tensor,
        shift_labels: Tensor,
        ignore_index: int = IGNORE_INDEX,
        *,
        tokens: Tensor | int | None = None,
    ) -> Tensor:
        """Mean over the valid tokens of all ranks of the group; the same value on every rank.

        Args:
            logits: `[..., V]` of this rank's tokens.
            shift_labels: `[...]`, shifted already.
            tokens: the number of valid tokens of all ranks whose gradients are averaged, where replicas hold different
                counts: `num_tokens(shift_labels, group=...)`, results of arithmetic with it included, or a plain number
                counted over all ranks of the job.

        Raises:
            UsageError: a plain number, where this context has counted over fewer ranks than the job has.
        """
        return loss.cross_entropy(logits, shift_labels, self._teams, ignore_index, self._known(tokens))

    def linear_cross_entropy(
        self, hidden: Tensor, weight: Tensor, shift_labels: Tensor, ignore_index: int = IGNORE_INDEX, *,
        bias: Tensor | None = None, tokens: Tensor | int | None = None, chunk_tokens: int | None = None,
    ) -> Tensor:  # fmt: skip
        """`cross_entropy(hidden @ weight.T + bias, shift_labels)`, without ever holding all logits.

        Args:
            hidden: `[..., E]` of this rank's tokens.
            weight: `[V, E]`.
            chunk_tokens: how many tokens' logits exist at a time; at most 2,048 by default.
        """
        tokens = self._known(tokens)
        return loss.linear_cross_entropy(hidden, weight, shift_labels, self._teams, ignore_index, tokens, bias, chunk_tokens)

    def num_tokens(self, shift_labels: Tensor, group: Group | None = None, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """Number of valid labels, summed over `group`, or over the ranks of this context. int64 scalar

        The tensor knows over how many ranks it was counted, which a loss given it as `tokens=` needs to know.
        """
        teams = self._teams if group is None else [Team(name) for name in comm.group_names(group).split("|")]
        count = loss.num_tokens(shift_labels, teams, ignore_index)
        self._counted_over.add(count.num_ranks)
        return count

    def _known(self, tokens: Tensor | int | None) -> Tensor | int | None:
        """Refuses a plain number that may be such a count with the number of its ranks lost, by `.item()` for instance."""
        others = self._counted_over - {comm.num_ranks()}
        if tokens is not None and not isinstance(tokens, loss.TokenCount) and others:
            self.sharding.refuse(
                f"tokens is a plain number, which stands for a count over all {comm.num_ranks()} ranks of the job, but "
                f"num_tokens has counted over {max(others)}: pass what num_tokens(shift_labels, group=...) returned"
            )
        return tokens
