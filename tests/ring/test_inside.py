"""`scaled_dot_product_attention` while `with cp:` is open, and torch as it was afterwards."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ring_attention as ra
from ring_attention import inside
from tests.harness import RankPools


class Block(nn.Module):
    """Attention as people write it, with grouped heads."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal, self.project = causal, nn.Linear(16, 64, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (-1, 8)).transpose(1, 2).split((4, 2, 2), dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True).transpose(1, 2).flatten(2)


WRAPS = {
    "plain": lambda block, x: block(x),
    "nonreentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "compile": lambda block, x: torch.compile(block, fullgraph=True, backend="aot_eager")(x),
}


def wrapped(rank: int, world: int, how: str, backward_inside: bool) -> tuple[Any, ...]:
    block, x, dout = Block(), torch.randn(2, 24, 16, dtype=torch.float64), torch.randn(2, 24, 32, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    want = block(whole)
    want_grads = torch.autograd.grad(want, (whole, block.project.weight), dout)
    cp = ra.ContextParallel(dist.group.WORLD)
    part, mine = cp.shard(x).requires_grad_(), cp.positions(24)
    with cp:
        out = WRAPS[how](block, part)
        if backward_inside:
            out.backward(dout[:, mine])
    if not backward_inside:
        out.backward(dout[:, mine])
    weight = block.project.weight.grad.clone()
    dist.all_reduce(weight)
    pairs = (out, want[:, mine]), (part.grad, want_grads[0][:, mine]), (weight, want_grads[1])
    return tuple((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("how", list(WRAPS))
def test_attention_sees_the_whole_sequence(ranks: RankPools, how: str) -> None:
    for errors in ranks(2).run(wrapped, how, True):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("how", ["plain", "compile"])
def test_backward_may_run_outside(ranks: RankPools, how: str) -> None:
    for errors in ranks(2).run(wrapped, how, False):
        assert max(errors) < 1e-12


def too_late(rank: int, world: int, how: str) -> str:
    with pytest.raises(ra.UsageError) as error:
        wrapped(rank, world, how, False)
    return str(error.value)


@pytest.mark.parametrize("how", ["reentrant", "nonreentrant"])
def test_a_checkpoint_recomputed_too_late_is_refused(ranks: RankPools, how: str) -> None:
    for text in ranks(2).run(too_late, how):
        assert "a checkpoint around" in text and "inside `with cp`" in text


LAYERS = {
    "lstm": lambda: nn.LSTM(6, 6, batch_first=True),
    "gru": lambda: nn.GRU(6, 6, bidirectional=True),
    "rnn_tanh": lambda: nn.RNN(6, 6, batch_first=True),
    "conv1d": lambda: nn.Conv1d(6, 6, 3, padding=1),
}
SHAPES = {"lstm": (2, -1, 6), "gru": (-1, 2, 6), "rnn_tanh": (2, -1, 6), "conv1d": (2, 6, -1)}


def along_tokens(rank: int, world: int) -> list[str]:
    """Each layer over this rank's tokens, and over a dim of another length; after `with cp` torch is as it was."""
    cp, said = ra.ContextParallel(dist.group.WORLD), []
    length = cp.shard({"input_ids": torch.zeros(2, 13, dtype=torch.int64)})["input_ids"].shape[1]
    for name, make in LAYERS.items():
        layer = make()
        other, mine = (torch.randn([size if at == -1 else at for at in SHAPES[name]]) for size in (20, length))
        want = layer(other)
        with cp:
            got = layer(other)
            with pytest.raises(ra.UsageError) as error:
                layer(mine)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True) if isinstance(a, torch.Tensor))
        layer(mine)
        said.append(str(error.value))
    with cp:
        nn.Conv1d(6, 6, 1)(torch.ones(1, 6, length))  # a kernel of one token is a linear layer
    return said


def test_layers_that_run_along_tokens_are_refused(ranks: RankPools) -> None:
    for said in ranks(3).run(along_tokens):
        for name, text in zip(LAYERS, said, strict=True):
            assert text.count(name) and "cannot be split" in text


def encoder(rank: int, world: int) -> list[float]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, cp, errors = torch.randn(2, 13, 16, dtype=torch.float64), ra.ContextParallel(dist.group.WORLD), []
    mine, mask = cp.positions(13), nn.Transformer.generate_square_subsequent_mask(13, dtype=torch.float64)
    for train in (True, False):  # evaluation has a fast path that never calls the function
        layer.train(train)
        with torch.set_grad_enabled(train):
            want, causal = layer(x), layer(x, src_mask=mask, is_causal=True)
            with cp:
                errors.append((layer(cp.shard(x)) - want[:, mine]).abs().max().item())
                local = layer(cp.shard(x), src_mask=mask[mine][:, mine], is_causal=True)
                errors.append((local - causal[:, mine]).abs().max().item())
    return errors


def test_torchs_own_encoder_layer(ranks: RankPools) -> None:
    for errors in ranks(2).run(encoder):
        assert max(errors) < 1e-12


def odd_shapes(rank: int, world: int) -> list[float]:
    cp, errors = ra.ContextParallel(dist.group.WORLD), []
    for shape in ((10, 8), (3, 10, 8), (2, 3, 2, 10, 8)):
        x = torch.randn(shape, dtype=torch.float64)
        want, mine = F.scaled_dot_product_attention(x, x, x, is_causal=True), cp.positions(10)
        part = cp.shard(x, dim=-2)
        with cp:
            got = F.scaled_dot_product_attention(part, part, part, is_causal=True)
        errors.append((got - want.index_select(-2, mine)).abs().max().item())
    return errors


def test_any_number_of_leading_dims(ranks: RankPools) -> None:
    assert max(ranks(2).run(odd_shapes)[0]) < 1e-12


# ------------------------------------------------------------------------------------------------ torch afterwards
def restored(rank: int, world: int) -> None:
    plain = F.scaled_dot_product_attention, F.multi_head_attention_forward
    cp, other = ra.ContextParallel(dist.group.WORLD), ra.ContextParallel(dist.group.WORLD, ra.Striped)
    as_it_was = lambda: plain == (F.scaled_dot_product_attention, F.multi_head_attention_forward)  # noqa: E731
    with cp:
        assert inside.current().holder is cp
        with other:
            assert inside.current().holder is other
        assert inside.current().holder is cp
        with cp:
            pass
    assert as_it_was() and inside.current() is None and torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError), cp, other:
        raise KeyError
    assert as_it_was() and inside.current() is None


def test_nothing_is_left_behind(ranks: RankPools) -> None:
    ranks(1).run(restored)


def threads(rank: int, world: int) -> None:
    """Another thread has its own attention while a context is open here, in whatever order they close."""
    plain, cp = F.scaled_dot_product_attention, ra.ContextParallel(dist.group.WORLD)
    x = torch.randn(1, 2, 6, 4)
    want, found, opened, close = plain(x, x, x, is_causal=True), [], threading.Event(), threading.Event()

    def elsewhere() -> None:
        found.append(F.scaled_dot_product_attention(x, x, x, is_causal=True))  # not of this thread
        with ra.ContextParallel(dist.group.WORLD):
            opened.set()
            close.wait(20)

    thread = threading.Thread(target=elsewhere)
    with cp:
        thread.start()
        opened.wait(20)
    assert torch.equal(F.scaled_dot_product_attention(x, x, x, is_causal=True), want)  # the other is still open
    close.set()
    thread.join()
    assert torch.equal(found[0], want) and F.scaled_dot_product_attention is plain


def test_threads_do_not_meet(ranks: RankPools) -> None:
    ranks(1).run(threads)


# ------------------------------------------------------------------------------------------------ refusals
def refused(rank: int, world: int) -> list[str]:
    cp, x, said = ra.ContextParallel(dist.group.WORLD), torch.randn(1, 4, 4, 8), []
    heads = nn.MultiheadAttention(8, 2, batch_first=True)
    for action in (
        lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
        lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool)),
        lambda: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2]),
        lambda: heads(x[:, 0], x[:, 0], x[:, 0]),
    ):
        with pytest.raises(ra.UsageError) as error, cp:
            action()
        said.append(str(error.value))
    return said


def test_what_a_part_cannot_know_is_refused(ranks: RankPools) -> None:
    for said in ranks(2).run(refused):
        for word, text in zip(("dropout", "attn_mask", "enable_gqa", "need_weights"), said, strict=True):
            assert word in text


def on_one_rank(rank: int, world: int) -> str:
    cp, x = ra.ContextParallel(dist.group.WORLD), torch.randn(1, 2, 4, 8)
    with pytest.raises(ra.UsageError) as error, cp:
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if rank == 1 else 0.0)
    return str(error.value)


def test_one_ranks_refusal_stops_all(ranks: RankPools) -> None:
    assert all("rank 1" in text and "dropout" in text for text in ranks(2).run(on_one_rank))


def captured_names(rank: int, world: int) -> tuple[float, float, str, bool]:
    """A module that took functions by their names: errors while open, after a nested one closed; a refusal; put back."""
    module = types.ModuleType("module_of_a_user")
    exec(
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "from torch.nn.attention.flex_attention import flex_attention",
        module.__dict__,
    )
    sys.modules["module_of_a_user"] = module
    before = dict(module.__dict__)
    x, cp = torch.randn(1, 2, 10, 8, dtype=torch.float64), ra.ContextParallel(dist.group.WORLD)
    want, part = F.scaled_dot_product_attention(x, x, x, is_causal=True), cp.shard(x, dim=2)
    want = want[:, :, cp.positions(10)]
    with cp:
        with cp:
            first = (module.sdpa(part, part, part, is_causal=True) - want).abs().max().item()
        second = (module.sdpa(part, part, part, is_causal=True) - want).abs().max().item()
        with pytest.raises(ra.UsageError) as error:
            module.flex_attention(part, part, part)
    del sys.modules["module_of_a_user"]
    return first, second, str(error.value), all(module.__dict__[name] is value for name, value in before.items())


def test_functions_taken_by_their_names_are_reached(ranks: RankPools) -> None:
    for first, second, text, put_back in ranks(2).run(captured_names):
        assert first < 1e-12 and second < 1e-12 and put_back
        assert "flex_attention" in text and "this rank's tokens only" in text
