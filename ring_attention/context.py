"""`ContextParallel`: ties layout, masks and attention to a model and its batches."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, overload

from torch import Tensor, nn

from ring_attention import batch as batches
from ring_attention import comm, loss
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
        self._whole: Layout | None = None  # of the last batch, where the layout depends on it
        self.sharding = self._sharding(None, None)

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
        documents = batches.documents_of(x)
        seq_len = batches.whole_shape(x)[1]
        whole = self._layout.build(Mask(causal=True, documents=documents), seq_len, self.world_size)
        self._whole = whole if self._layout.needs_mask else None
        self.sharding = self._sharding(documents, seq_len)
        return batches.shard(x, whole, self.rank)

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

    def _sharding(self, documents: Tensor | None, seq_len: int | None) -> Sharding:
        layout = self._layout.pending(self.world_size) if self._whole is None else self._whole.spec
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

    def attach(self, model: nn.Module) -> None:
        """Lets a transformers model take its attention from here inside `with cp`.

        Raises:
            UsageError: the model computes attention by itself, or has layers that carry state along the sequence.
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
                counts: `num_tokens(shift_labels, group=...)`, or a plain number counted over all ranks of the job.
        """
        return loss.cross_entropy(logits, shift_labels, self._teams, ignore_index, tokens)

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
        return loss.linear_cross_entropy(hidden, weight, shift_labels, self._teams, ignore_index, tokens, bias, chunk_tokens)

    def num_tokens(self, shift_labels: Tensor, group: Group | None = None, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """Number of valid labels, summed over `group`, or over the ranks of this context. int64 scalar"""
        teams = self._teams if group is None else [Team(name) for name in comm.group_names(group).split("|")]
        return loss.num_tokens(shift_labels, teams, ignore_index)
