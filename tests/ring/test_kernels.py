"""Kernels: the reference one against autograd, the others against the reference one, block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention

from ring_attention import kernels, lse, plan
from ring_attention.kernels import Scores, cpu, cuda
from ring_attention.kernels.cpu import CpuKernel
from ring_attention.kernels.cuda import CudaKernel
from ring_attention.kernels.flex import FlexKernel
from ring_attention.kernels.reference import ReferenceKernel
from ring_attention.plan import Block
from ring_attention.sums import Place

SCALE = 0.3


def tensors(L: int, K: int, D: int = 8, Dv: int = 8, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = (2, 4, L, D), (2, 2, K, D), (2, 2, K, Dv), (2, 4, L, Dv)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(L: int, K: int, low: int | None = None, high: int | None = None, dense: bool = False) -> Block:
    return Block(slice(None), 0, L, 0, K, low, high, dense)


def of(b: Block, table: Any) -> tuple[Place, Place, Any]:
    """Where a block's queries and keys are, and its part of the table."""
    mask = None if table is None else table[:, :, b.q0 : b.q1, b.k0 : b.k1]
    return Place(b.rows, b.q0, b.q1, b.count, b.stride), Place(b.rows, b.k0, b.k1, b.count, b.stride), mask


def through(kernel: Any, block: Block, q: Any, k: Any, v: Any, dout: Any, table: Any = None) -> dict[str, torch.Tensor]:
    """A block through a kernel as the ring does it: cut, merged, and back with the merged result."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    norm = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    pieces = [
        plan.replace(b, rows=slice(row, row + 1)) if b.count > 1 else b
        for b in kernel.cut(block)
        for row in (range(len(q)) if b.count > 1 else [0])
    ]
    for b in pieces:
        at, keys, mask = of(b, table)
        part = kernel.forward(at.of(q), keys.of(k), keys.of(v), b, mask)
        lse.merge_(at.of(out), at.of(norm), part[0], part[1].to(norm.dtype))
    grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    kept, finite = out.to(q.dtype), lse.finite(norm).to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    for b in pieces:
        at, keys, mask = of(b, table)
        parts = kernel.backward(at.of(dout), at.of(q), keys.of(k), keys.of(v), at.of(kept), at.of(finite), b, mask)
        for total, part, where in zip(grads, parts, (at, keys, keys), strict=True):
            where.of(total).add_(part)
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
    L, K = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    block = whole(L, K, data.draw(st.none() | st.integers(1 - K, 0)), data.draw(st.none() | st.integers(0, L - 1)))
    block = plan.trimmed(block, (0, L), (0, K))
    block = whole(block.queries, block.keys, block.low, block.high)
    sizes = [(0, 1, 8, 2, 3, 4, 1), (9, 2, 100, 3, 6, 7, 2), (20, 4, 12, 3, 9, 99, 4), (1 << 16, 128, 2048, 128, 256, 2048, 16)]
    names = ("SMALL_PAIRS", "BASE", "NATIVE", "STRETCH", "NARROW", "TOGETHER", "ALIGN")
    drawn = data.draw(st.sampled_from(sizes))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(names, drawn, strict=True):
            patch.setattr(cpu, name, value)
        torch.manual_seed(0)
        inputs = tensors(block.queries, block.keys, *data.draw(st.sampled_from([(8, 8), (8, 5), (6, 16)])))
        pieces = list(CpuKernel(SCALE).cut(block))
        covered = torch.zeros(block.queries, block.keys, dtype=torch.long)
        for b in pieces:
            assert b.queries and b.keys and plan.banded(b).any(1).all()
            for on in range(0, b.count * b.stride or 1, b.stride or 1):
                covered[b.q0 + on : b.q1 + on, b.k0 + on : b.k1 + on] += plan.banded(b)
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
        (whole(512, 512, low=0), 3),  # 4 small triangles, 2 and 1 rectangles of rising size
        (whole(256, 256, low=0), 1),
        (whole(4096, 4096, low=0, high=1023), 15),
        (whole(4096, 4096, low=0, high=99), 4),  # stretches of 128 queries, those that share no keys together
    ],
)
def test_bands_take_few_calls(block: Block, calls: int) -> None:
    assert len(list(CpuKernel(SCALE).cut(block))) == calls


def test_a_window_computes_little_that_nobody_sees() -> None:
    block = whole(16384, 16384, low=0, high=1023)
    computed = sum(b.count * b.queries * b.keys for b in CpuKernel(SCALE).cut(block))
    assert computed <= 1.15 * (16384 * 1024 - 1024 * 1023 // 2)


@pytest.mark.parametrize("length", [1024, 937, 1500])
def test_a_document_computes_little_that_nobody_sees(length: int) -> None:
    computed = sum(b.count * b.queries * b.keys for b in CpuKernel(SCALE).cut(whole(length, length, low=0)))
    assert computed <= 1.26 * (length * (length + 1) // 2)


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
    assert isinstance(kernels.choose(on_cuda, bf16, Scores(1.0, 30.0), 64), FlexKernel)
    assert isinstance(kernels.choose(on_cuda, torch.float64, Scores(1.0), 64), ReferenceKernel)
    assert isinstance(kernels.choose(on_cuda, bf16, Scores(1.0), cuda.MAX_HEAD_DIM + 8), ReferenceKernel)


# ------------------------------------------------------------------------------------------------ flex attention
def differentiable(
    q: Any, k: Any, v: Any, *, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool, return_aux: Any
) -> tuple[torch.Tensor, AuxOutput]:
    """Flex attention's answer in plain operations, since its own backward needs a GPU."""
    assert enable_gqa and return_aux == AuxRequest(lse=True)
    groups = q.shape[1] // k.shape[1]
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    scores = scores if score_mod is None else score_mod(scores, b, h, i, j)
    seen = torch.ones((), dtype=torch.bool) if block_mask is None else block_mask.mask_mod(b, h, i, j)
    alone = ~seen.expand(scores.shape).any(-1)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(alone[..., None], 0.0)
    weights = scores.softmax(-1).masked_fill(alone[..., None], 0.0)
    return weights @ v.repeat_interleave(groups, 1), AuxOutput(lse=scores.logsumexp(-1).masked_fill(alone, -torch.inf))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", [None, (2, 1), (1, 4), (1, 1)])
def test_the_flex_kernel_is_the_reference_one(softcap: float | None, shape: tuple[int, int] | None) -> None:
    """Backward from the merged result, through the cotangents of a part; a band of two calls, tables of all shapes."""
    inputs, table, block = tensors(12, 9), None, whole(12, 9, low=-3, high=5)
    if shape is not None:
        table, block = torch.rand(*shape, 12, 9) < 0.6, whole(12, 9, dense=True)
    flex, want = FlexKernel(SCALE, softcap, differentiable), ReferenceKernel(SCALE, softcap)
    close(through(Halved(flex), block, *inputs, table), through(want, block, *inputs, table))


class Halved:
    """A kernel that is given each block in two parts, so that what it answers has to be merged."""

    def __init__(self, kernel: FlexKernel) -> None:
        self.forward, self.backward = kernel.forward, kernel.backward

    def cut(self, block: Block) -> list[Block]:
        half = block.keys // 2
        return [plan.part(block, (0, block.queries), keys) for keys in ((0, half), (half, block.keys))]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_flex_attention_takes_what_the_kernel_gives_it(softcap: float | None) -> None:
    """The real operation, forward, as it runs on a CPU."""
    inputs = tensors(40, 24, 16, 16, dtype=torch.float32)
    table = torch.rand(2, 1, 40, 24) < 0.4
    table[:, :, 5] = False
    for block, seen in ((whole(40, 24, dense=True), table), (whole(40, 24, low=0), None)):
        got = FlexKernel(SCALE, softcap, flex_attention).forward(*inputs[:3], block, seen)
        want = ReferenceKernel(SCALE, softcap).forward(*inputs[:3], block, seen)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
