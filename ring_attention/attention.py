"""`ring_attention()` and the custom op behind it.

The op is opaque to `torch.compile` and to selective checkpointing. What it cannot carry as an object travels as text:
process groups by name, layouts and masks by their `spec`. It answers with the output, the log-sum-exp, and the number
that all ranks gave the call: backward tells it, so that ranks which come back in another order are found out.
"""

import torch
from torch import Tensor

from ring_attention import comm, lse, masks, ring, sums
from ring_attention.comm import Group, Team
from ring_attention.errors import UsageError
from ring_attention.layouts import Layout
from ring_attention.masks import Mask
from ring_attention.plan import MaskTensors
from ring_attention.setting import Asked, request_text


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group,
    layout: Layout,
    mask: Mask,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    strategy: str = "ring",
    key_layout: Layout | None = None,
) -> Tensor:
    """Attention of this rank's queries over the whole sequence, exact, differentiable in all inputs.

    Args:
        query: `[B, Hq, S_local, D]`, the positions `layout.positions(rank)`.
        key: `[B, Hkv, S_local, D]`; Hkv divides Hq, query head h reads head `h // (Hq / Hkv)`.
        value: `[B, Hkv, S_local, Dv]`.
        group: process group or device mesh that the sequence is split over (2-D: ring x heads, for "hybrid").
        layout: which positions each rank holds.
        mask: who sees whom.
        scale: of the scores; `D ** -0.5` if None.
        sinks: `[Hq]`, one more logit per head in each row's softmax; neither scaled nor capped.
        softcap: scores become `softcap * tanh(scores / softcap)` before the mask.
        strategy: "ring", "gather", "ulysses", "hybrid" or "auto".
        key_layout: layout of keys and values in cross attention; that of the queries if None.

    Returns:
        `[B, Hq, S_local, Dv]` in the query's dtype. A row that sees nobody is 0.

    Raises:
        UsageError: what cannot be answered exactly, on all ranks.
        DivergenceError: the ranks disagree.
        PeerError: a rank died.
    """
    table = None
    if mask.mask_mod is not None:
        table = mod_table(mask, group, layout, key_layout or layout, query)
    request = request_text(
        groups=comm.group_names(group),
        layout=layout.spec,
        key_layout=(key_layout or layout).spec,
        mask=mask.spec,
        strategy=strategy,
        mask_mod=masks.mod_name(mask.mask_mod),
    )
    return call(query, key, value, sinks, mask, table, request, scale, softcap)


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    mask: Mask,
    table: Tensor | None,
    request: str,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """The op, with inputs cast as autocast casts those of attention."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    return attend(query, key, value, sinks, mask.documents, mask.prefix, table, request, scale, softcap)[0]


def mod_table(mask: Mask, group: Group, layout: Layout, key_layout: Layout, query: Tensor) -> Tensor | None:
    """This rank's queries x all keys, by position."""
    teams = [Team(name) for name in comm.group_names(group).split("|")]
    mine = layout.positions(min(comm.place(teams), layout.world_size - 1))
    return mask.mod_table(mine, torch.arange(key_layout.seq_len), query.shape[0], query.shape[1])


# ------------------------------------------------------------------------------------------------ the op
@torch.library.custom_op("ring_attention::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    prefix: Tensor | None,
    table: Tensor | None,
    request: str,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> out [B, Hq, S, Dv], lse [B, Hq, S] with the sinks in it, and the number of this call (int64 [1], CPU)."""
    tensors = (query, key, value)
    asked = Asked.of(tensors, sinks, MaskTensors(documents, prefix), table, request, scale, softcap)
    answer = comm.agree(asked.teams, asked.call("ring_attention"))
    setting = asked.settle(answer.lengths)
    out, norm = ring.forward(setting.rounds, *setting.to_heads(query, key, value))
    if sinks is not None:
        lse.add_sinks_(out, norm, setting.my_heads(sinks))
    out, norm = setting.to_sequence(out.to(query.dtype), norm)
    return sums.laid_out(out, sums.major(query)), sums.laid_out(norm, "seq"), torch.tensor([answer.number])


@attend.register_fake
def _(query, key, value, sinks, documents, prefix, table, request, scale, softcap):  # type: ignore[no-untyped-def]
    shape = (*query.shape[:3], value.shape[-1])
    norm = sums.new_empty(shape[:3], lse.wide(query.dtype), query.device, "seq")
    out = sums.new_empty(shape, query.dtype, query.device, sums.major(query))
    return out, norm, torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("ring_attention::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    saved: list[Tensor],
    sinks: Tensor | None,
    documents: Tensor | None,
    prefix: Tensor | None,
    table: Tensor | None,
    request: str,
    scale: float | None,
    softcap: float | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, dsinks; one that is not needed is empty. `saved`: query, key, value and what `attend` answered."""
    query, key, value, out, norm, number = saved
    tensors = (query, key, value)
    asked = Asked.of(tensors, sinks, MaskTensors(documents, prefix), table, request, scale, softcap)
    told = asked.call("backward of ring_attention")
    told.described |= {"order of calls": f"the call numbered {int(number)}", "inputs that need gradients": str(needs)}
    setting = asked.settle(comm.agree(asked.teams, told).lengths)
    dsinks = query.new_empty(0)
    q, k, v = setting.to_heads(query, key, value)
    dout, out, norm = setting.queries_to_heads(dout, out, norm)
    if sinks is not None and needs[3]:
        dsinks = torch.zeros_like(sinks)
        setting.my_heads(dsinks).copy_(lse.sinks_gradient(setting.my_heads(sinks), norm, out, dout))
    grads = ring.backward(setting.rounds, dout, q, k, v, out, norm, (needs[1], needs[2]))
    wide = list(reversed(setting.grads_to_sequence(*grads)))
    del grads
    dq, dk, dv = [_wanted(wide.pop(), x, need) for x, need in zip(tensors, needs, strict=False)]  # one wide copy less each
    return dq, dk, dv, dsinks


def _wanted(grad: Tensor, x: Tensor, need: bool) -> Tensor:
    return sums.laid_out(grad.to(x.dtype), sums.major(x)) if need else x.new_empty(0)


@attend_backward.register_fake
def _(dout, saved, sinks, documents, prefix, table, request, scale, softcap, needs):  # type: ignore[no-untyped-def]
    grads = [
        sums.new_empty(x.shape, x.dtype, x.device, sums.major(x)) if need else x.new_empty(0)
        for x, need in zip(saved[:3], needs[:3], strict=True)
    ]
    dsinks = torch.empty_like(sinks) if sinks is not None and needs[3] else saved[0].new_empty(0)
    return (*grads, dsinks)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, sinks, documents, prefix, table, *ctx.plain = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, sinks, documents, prefix, table)


def _backward(ctx, dout, _dlse, _dnumber):  # type: ignore[no-untyped-def]
    if dout is None:
        return (None,) * 10
    *saved, sinks, documents, prefix, table = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    grads = attend_backward(dout, saved, sinks, documents, prefix, table, *ctx.plain, needs)
    return (*[grad if need else None for grad, need in zip(grads, needs, strict=True)], *[None] * 6)


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise UsageError("ring_attention has no second derivative: leave create_graph out of the first backward")


attend.register_autograd(_backward, setup_context=_setup)
attend_backward.register_autograd(_refuse)
