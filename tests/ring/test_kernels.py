"""Kernels: the reference one against autograd, the others against the reference one, block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention import kernels, lse, plan
from ring_attention.kernels import Scores, cpu, cuda
from ring_attention.kernels.cpu import CpuKernel
from ring_attention.kernels.cuda import CudaKernel
from ring_attention.kernels.reference import ReferenceKernel
from ring_attention.plan import Block

SCALE = 0.3


def tensors(L: int, K: int, D: int = 8, Dv: int = 8, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = (2, 4, L, D), (2, 2, K, D), (2, 2, K, Dv), (2, 4, L, Dv)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(L: int, K: int, low: int | None = None, high: int | None = None, dense: bool = False) -> Block:
    return Block(slice(None), 0, L, 0, K, low, high, dense)


def through(kernel: Any, block: Block, q: Any, k: Any, v: Any, dout: Any, table: Any = None) -> dict[str, torch.Tensor]:
    """A block through a kernel as the ring does it: cut, merged, and back with the merged result."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    norm = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    pieces = list(kernel.cut(block))
    for b in pieces:
        at, keys, mask = slice(b.q0, b.q1), slice(b.k0, b.k1), None if table is None else table[:, :, b.q0 : b.q1]
        mask = None if mask is None else mask[..., b.k0 : b.k1]
        part = kernel.forward(q[:, :, at], k[:, :, keys], v[:, :, keys], b, mask)
        lse.merge_(out[:, :, at], norm[:, :, at], part[0], part[1].to(norm.dtype))
    grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    kept, finite = out.to(q.dtype), lse.finite(norm).to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    for b in pieces:
        at, keys, mask = slice(b.q0, b.q1), slice(b.k0, b.k1), None if table is None else table[:, :, b.q0 : b.q1]
        mask = None if mask is None else mask[..., b.k0 : b.k1]
        parts = kernel.backward(
            dout[:, :, at], q[:, :, at], k[:, :, keys], v[:, :, keys], kept[:, :, at], finite[:, :, at], b, mask
        )
        for total, part, where in zip(grads, parts, (at, keys, keys), strict=True):
            total[:, :, where] += part
    return {"out": out, "lse": norm, "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    for name, x in want.items():
        same = x == got[name]  # infinities
        assert ((got[name] - x).abs().masked_fill(same, 0) <= tolerance * max(1.0, x[x.isfinite()].abs().max())).all(), name


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("table", [False, True])
def test_the_reference_kernel_is_autograds(softcap: float | None, table: bool) -> None:
    q, k, v, dout = (x.requires_grad_(i < 3) for i, x in enumerate(tensors(9, 7, Dv=5)))
    block, mask = whole(9, 7, 0, 6), None
    allow = plan.banded(block)[None, None]
    if table:
        mask = torch.rand(2, 1, 9, 7) < 0.6
        mask[:, :, 3] = False
        block, allow = whole(9, 7, dense=True), mask
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * SCALE
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allow, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~allow.any(-1, keepdim=True), 0)
    out = weights @ v.repeat_interleave(2, 1)
    out.backward(dout)
    want = {"out": out.detach(), "lse": scores.detach().logsumexp(-1), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if table:
        want["dq"] = want["dq"].nan_to_num()  # autograd of a softmax over nothing
    got = through(ReferenceKernel(SCALE, softcap), block, q.detach(), k.detach(), v.detach(), dout.detach(), mask)
    close({n: got[n] for n in ("out", "lse", "dv")}, {n: want[n] for n in ("out", "lse", "dv")})
    if not table:
        close(got, want)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(data=st.data())
def test_the_cpu_kernel_is_the_reference_one(data: st.DataObject) -> None:
    L, K = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    block = whole(L, K, data.draw(st.none() | st.integers(1 - K, 0)), data.draw(st.none() | st.integers(0, L - 1)))
    block = plan.trimmed(block, (0, L), (0, K))
    block = whole(block.queries, block.keys, block.low, block.high)
    small, unit, native, stretch, wide = data.draw(
        st.sampled_from([(0, 4, 8, 2, 5), (9, 2, 100, 3, 6), (20, 128, 2048, 128, 1024), (1 << 16, 128, 2048, 128, 1024)])
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(
            ("SMALL_PAIRS", "UNIT", "NATIVE", "STRETCH", "WIDE"), (small, unit, native, stretch, wide), strict=True
        ):
            patch.setattr(cpu, name, value)
        torch.manual_seed(0)
        inputs = tensors(block.queries, block.keys, *data.draw(st.sampled_from([(8, 8), (8, 5), (6, 16)])))
        pieces = list(CpuKernel(SCALE).cut(block))
        covered = torch.zeros(block.queries, block.keys, dtype=torch.long)
        for b in pieces:
            assert b.queries and b.keys and plan.banded(b).any(1).all()
            covered[b.q0 : b.q1, b.k0 : b.k1] += plan.banded(b)
        assert torch.equal(covered, plan.banded(block).long())
        close(through(CpuKernel(SCALE), block, *inputs), through(ReferenceKernel(SCALE), block, *inputs))


def test_the_cpu_kernel_takes_tables_with_rows_that_see_nobody() -> None:
    table = torch.rand(2, 1, 12, 9) < 0.4
    table[:, :, 5] = False
    inputs, block = tensors(12, 9), whole(12, 9, dense=True)
    got, want = (through(kernel(SCALE), block, *inputs, table) for kernel in (CpuKernel, ReferenceKernel))
    close(got, want)
    assert (got["lse"][:, :, 5] == -torch.inf).all() and (got["dq"][:, :, 5] == 0).all()


@pytest.mark.parametrize(
    ("block", "calls"),
    [
        (whole(4096, 4096), 1),
        (whole(4096, 4096, low=0), 1),  # the operation's own causal form
        (whole(512, 512, low=0), 3),
        (whole(256, 256, low=0), 1),
        (whole(4096, 4096, low=0, high=1023), 16),  # stretches of 256 queries
        (whole(4096, 4096, low=0, high=99), 32),
    ],
)
def test_bands_take_few_calls(block: Block, calls: int) -> None:
    assert len(list(CpuKernel(SCALE).cut(block))) == calls


def test_a_window_computes_little_that_nobody_sees() -> None:
    block = whole(16384, 16384, low=0, high=1023)
    computed = sum(b.queries * b.keys for b in CpuKernel(SCALE).cut(block))
    assert computed <= 1.25 * (16384 * 1024 - 1024 * 1023 // 2)


# ------------------------------------------------------------------------------------------------ flash attention
class Flash:
    """The operations of flash attention by their signatures, computed by the reference kernel in fp64."""

    @staticmethod
    def mask(q: torch.Tensor, k: torch.Tensor, left: int, right: int) -> torch.Tensor:
        i, j = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])[None, :]
        assert left >= -1 and right >= -1  # what the operation knows; -1 is no limit
        return ((j >= i - left) | (left == -1)) & ((j <= i + right) | (right == -1))

    def forward(
        self, q: Any, k: Any, v: Any, cu_q: None, cu_k: None, max_q: int, max_k: int, dropout: float, causal: bool,
        debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        assert (max_q, max_k) == (q.shape[1], k.shape[1]) and dropout == 0 and not causal
        assert all(x.is_contiguous() and x.shape[-1] % 8 == 0 for x in (q, k, v))
        table = self.mask(q, k, window_size_left, window_size_right)[None, None]
        block = whole(q.shape[1], k.shape[1], dense=True)
        out, norm = ReferenceKernel(scale).forward(*(x.transpose(1, 2) for x in (q, k, v)), block, table)
        return out.transpose(1, 2), norm, torch.empty(0), torch.empty(0), torch.empty(0)

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, norm: Any, cu_q: None, cu_k: None, max_q: int, max_k: int,
        dropout: float, causal: bool, seed: Any, unused: Any, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        table = self.mask(q, k, window_size_left, window_size_right)[None, None]
        block, major = whole(q.shape[1], k.shape[1], dense=True), [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        grads = ReferenceKernel(scale).backward(*major, norm, block, table)
        return tuple(x.transpose(1, 2) for x in grads)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.data())
def test_the_cuda_kernel_speaks_of_bands_as_windows(data: st.DataObject) -> None:
    """Flash lines up the last query with the last key: every band that a plan makes has to come out right."""
    L, K = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 14))
    block = whole(L, K, data.draw(st.none() | st.integers(1 - K, 0)), data.draw(st.none() | st.integers(0, L - 1)))
    block = plan.trimmed(block, (0, L), (0, K))
    block = whole(block.queries, block.keys, block.low, block.high)
    kernel, flash = CudaKernel(SCALE), Flash()
    kernel._forward, kernel._backward = flash.forward, flash.backward
    inputs = tensors(block.queries, block.keys, *data.draw(st.sampled_from([(8, 8), (8, 5), (6, 16)])))
    close(through(kernel, block, *inputs), through(ReferenceKernel(SCALE), block, *inputs))


def test_the_cuda_operations_have_the_signatures_that_are_used() -> None:
    forward, backward = torch.ops.aten._flash_attention_forward.default, torch.ops.aten._flash_attention_backward.default
    names = [argument.name for argument in forward._schema.arguments]
    assert names[:10] == [
        "query",
        "key",
        "value",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
    ]
    assert {"scale", "window_size_left", "window_size_right"} <= set(names)
    names = [argument.name for argument in backward._schema.arguments]
    assert names[:12] == [
        "grad_out",
        "query",
        "key",
        "value",
        "out",
        "logsumexp",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
    ]
    assert names[12:14] == ["rng_state", "unused"] and {"scale", "window_size_left", "window_size_right"} <= set(names)


def test_the_fastest_kernel_that_can_is_chosen() -> None:
    on_cpu, on_cuda, bf16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
    assert isinstance(kernels.choose(on_cpu, torch.float32, Scores(1.0), 64), CpuKernel)
    assert isinstance(kernels.choose(on_cpu, torch.float32, Scores(1.0, 30.0), 64), ReferenceKernel)
    assert isinstance(kernels.choose(on_cuda, bf16, Scores(1.0), 64), CudaKernel)
    assert isinstance(kernels.choose(on_cuda, torch.float64, Scores(1.0), 64), ReferenceKernel)
    assert isinstance(kernels.choose(on_cuda, bf16, Scores(1.0), cuda.MAX_HEAD_DIM + 8), ReferenceKernel)
