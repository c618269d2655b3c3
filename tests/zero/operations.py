"""What people call on a parameter or a gradient: a long table, and how a sharded answer is compared with the plain one.

Every function takes the tensor (a [5, 7] float one) and an equal-shaped plain tensor `other`; the same function runs on
plain torch. The answer, and what the tensor holds afterwards, must be those of plain torch, or there must be an error.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard
from zeroshard.sharded import Partial, Sharded

SHAPE = (5, 7)
Operation = Callable[[Any, Tensor], Any]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _setitem(index: Any, value: Any) -> Operation:
    def operation(t: Any, other: Tensor) -> None:
        t[index] = value

    return operation


def _out(function: Callable[..., Any], *args: Any) -> Operation:
    return lambda t, other: function(t, *args, out=t)


def _dumped(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()))


READS: Mapping[str, Operation] = {
    # ---- norms and reductions over everything
    **{f"norm({p})": lambda t, o, p=p: t.norm(p) for p in (1, 2, 3, 0.5, 0, float("inf"), float("-inf"), -1, "fro")},
    **{f"vector_norm({p})": lambda t, o, p=p: torch.linalg.vector_norm(t, p) for p in (1, 2, 0, float("inf"))},
    "linalg.norm": lambda t, o: torch.linalg.norm(t),
    "matrix_norm fro": lambda t, o: torch.linalg.matrix_norm(t),
    "matrix_norm nuc": lambda t, o: torch.linalg.matrix_norm(t, "nuc"),
    "norm fp64": lambda t, o: torch.linalg.vector_norm(t, dtype=torch.float64),
    "norm keepdim": lambda t, o: torch.linalg.vector_norm(t, keepdim=True),
    "sum": lambda t, o: t.sum(),
    "sum fp64": lambda t, o: t.sum(dtype=torch.float64),
    "sum of squares": lambda t, o: (t * t).sum(),
    "square sum sqrt": lambda t, o: t.pow(2).sum().sqrt(),
    "mean": lambda t, o: t.mean(),
    "abs mean item": lambda t, o: t.abs().mean().item(),
    "max": lambda t, o: t.max(),
    "min": lambda t, o: t.min(),
    "abs max": lambda t, o: t.abs().max(),
    "amax": lambda t, o: t.amax(),
    "amin both dims": lambda t, o: t.amin((0, 1)),
    "aminmax": lambda t, o: tuple(torch.aminmax(t)),
    "prod": lambda t, o: t.prod(),
    "std": lambda t, o: t.std(),
    "var": lambda t, o: t.var(),
    "var_mean": lambda t, o: torch.var_mean(t),
    "median": lambda t, o: t.median(),
    "quantile": lambda t, o: t.quantile(0.3),
    "logsumexp": lambda t, o: t.logsumexp((0, 1)),
    "argmax": lambda t, o: t.argmax(),
    "argmin": lambda t, o: t.argmin(),
    "count_nonzero": lambda t, o: t.count_nonzero(),
    "nonzero": lambda t, o: t.nonzero(),
    "any": lambda t, o: t.any(),
    "all": lambda t, o: t.all(),
    "isnan any": lambda t, o: t.isnan().any(),
    "isfinite all": lambda t, o: torch.isfinite(t).all(),
    "bool of isfinite": lambda t, o: bool(torch.isfinite(t).all()),
    "isinf sum": lambda t, o: t.isinf().sum(),
    "positive sum": lambda t, o: (t > 0).sum(),
    "positive mean": lambda t, o: (t > 0).float().mean(),
    "nansum": lambda t, o: t.nansum(),
    "nanmean": lambda t, o: t.nanmean(),
    "dist": lambda t, o: torch.dist(t, o),
    "cosine": lambda t, o: F.cosine_similarity(t.flatten(), o.flatten(), dim=0),
    "mse": lambda t, o: F.mse_loss(t, o),
    "histc": lambda t, o: torch.histc(t, 4, -1, 1),
    # ---- over one dim
    "sum(0)": lambda t, o: t.sum(0),
    "mean(1)": lambda t, o: t.mean(1, keepdim=True),
    "norm(dim)": lambda t, o: t.norm(dim=1),
    "max(dim)": lambda t, o: tuple(t.max(0)),
    "any(dim)": lambda t, o: (t > 0).any(1),
    "cumsum": lambda t, o: t.cumsum(1),
    "softmax": lambda t, o: t.softmax(1),
    "normalize": lambda t, o: F.normalize(t, dim=1),
    "argsort": lambda t, o: t.argsort(1),
    "sort": lambda t, o: tuple(t.sort(0)),
    "topk": lambda t, o: tuple(t.topk(2)),
    "unique": lambda t, o: t.unique(),
    # ---- element by element
    "neg": lambda t, o: -t,
    "abs": lambda t, o: abs(t),
    "arithmetic": lambda t, o: (2 * t + 1) / 3 - t**2,
    "reversed operands": lambda t, o: 1 - t,
    "with a whole tensor": lambda t, o: t + o,
    "whole tensor first": lambda t, o: o - t,
    "with a row": lambda t, o: t * o[0],
    "with a column": lambda t, o: t * o[:, :1],
    "with a 0-dim tensor": lambda t, o: t * o[0, 0],
    "broadcast up": lambda t, o: t + o.expand(2, *SHAPE),
    "with itself": lambda t, o: t * t + t,
    "in-place on a whole tensor": lambda t, o: o.clone().add_(t, alpha=2),
    "copy into a whole tensor": lambda t, o: torch.empty(SHAPE).copy_(t),
    "compare": lambda t, o: t > 0,
    "compare with whole": lambda t, o: t >= o,
    "equal": lambda t, o: torch.equal(t, t.clone()),
    "not equal": lambda t, o: torch.equal(t, o),
    "allclose": lambda t, o: torch.allclose(t, t + 1e-12),
    "isclose": lambda t, o: torch.isclose(t, o),
    "sign": lambda t, o: t.sign(),
    "clamp": lambda t, o: t.clamp(-0.1, 0.1),
    "clamp tensor": lambda t, o: t.clamp(min=-o.abs()),
    "nan_to_num": lambda t, o: t.nan_to_num(0.0),
    "where": lambda t, o: torch.where(t > 0, t, torch.zeros_like(t)),
    "where whole": lambda t, o: torch.where(o > 0, t, o),
    "masked_fill": lambda t, o: t.masked_fill(o > 0, 0.5),
    "masked_select": lambda t, o: t.masked_select(o > 0),
    "maximum": lambda t, o: torch.maximum(t, o),
    "lerp": lambda t, o: torch.lerp(t, o, 0.25),
    "addcmul": lambda t, o: torch.addcmul(t, o, o, value=0.5),
    "relu": lambda t, o: F.relu(t),
    "tanh": lambda t, o: torch.tanh(t),
    "exp log": lambda t, o: t.abs().add(1).log().exp(),
    "round": lambda t, o: (t * 10).round(),
    "floor_divide": lambda t, o: t // 0.1,
    "remainder": lambda t, o: t % 0.3,
    "logical_not": lambda t, o: torch.logical_not(t > 0),
    "frexp": lambda t, o: tuple(torch.frexp(t)),
    # ---- new tensors
    "clone": lambda t, o: t.clone(),
    "detach": lambda t, o: t.detach(),
    "data": lambda t, o: t.data,
    "to fp64": lambda t, o: t.to(torch.float64),
    "to itself": lambda t, o: t.to("cpu"),
    "double": lambda t, o: t.double(),
    "bfloat16": lambda t, o: t.bfloat16(),
    "half float": lambda t, o: t.half().float(),
    "type_as": lambda t, o: t.type_as(o.double()),
    "cpu": lambda t, o: t.cpu(),
    "contiguous": lambda t, o: t.contiguous(),
    "zeros_like": lambda t, o: torch.zeros_like(t),
    "ones_like": lambda t, o: torch.ones_like(t),
    "full_like": lambda t, o: torch.full_like(t, 3.0),
    "empty_like shape": lambda t, o: tuple(torch.empty_like(t).shape),
    "empty_like fp64": lambda t, o: torch.empty_like(t, dtype=torch.float64).dtype,
    "new_zeros": lambda t, o: t.new_zeros(3),
    "new_full": lambda t, o: t.new_full((2, 2), 1.5),
    "new_empty": lambda t, o: tuple(t.new_empty(SHAPE).shape),
    "rand_like shape": lambda t, o: tuple(torch.rand_like(t).shape),
    "deepcopy": lambda t, o: copy.deepcopy(t),
    "copy": lambda t, o: copy.copy(t).sum(),
    "asarray": lambda t, o: torch.asarray(t).sum(),
    # ---- shapes, parts, views
    "shape": lambda t, o: (tuple(t.shape), t.size(0), t.dim(), t.ndim, t.numel(), len(t), t.nelement()),
    "about": lambda t, o: (t.dtype, t.device, t.is_floating_point(), t.element_size(), t.nbytes, t.layout),
    "strides": lambda t, o: (t.stride(), t.is_contiguous(), t.storage_offset()),
    "view": lambda t, o: t.view(-1),
    "view 3d": lambda t, o: t.view(5, 1, 7),
    "reshape": lambda t, o: t.reshape(7, 5),
    "flatten norm": lambda t, o: t.flatten().norm(),
    "ravel": lambda t, o: t.ravel(),
    "unsqueeze": lambda t, o: t.unsqueeze(0),
    "squeeze": lambda t, o: t.squeeze(),
    "t": lambda t, o: t.t(),
    "T": lambda t, o: t.T,
    "mT": lambda t, o: t.mT,
    "permute": lambda t, o: t.permute(1, 0),
    "movedim": lambda t, o: t.movedim(0, 1),
    "index": lambda t, o: t[1],
    "last row": lambda t, o: t[-1],
    "element": lambda t, o: t[4, 6],
    "element item": lambda t, o: t[4, 6].item(),
    "column": lambda t, o: t[:, 1],
    "slice": lambda t, o: t[1:3, ::2],
    "all of it": lambda t, o: t[:],
    "ellipsis": lambda t, o: t[...],
    "None index": lambda t, o: t[None],
    "mask index": lambda t, o: t[o > 0],
    "own mask index": lambda t, o: t[t > 0],
    "list index": lambda t, o: t[[0, 2]],
    "index_select": lambda t, o: t.index_select(0, torch.tensor([4, 0])),
    "gather": lambda t, o: t.gather(1, torch.zeros(5, 1, dtype=torch.int64)),
    "take": lambda t, o: t.take(torch.tensor([0, 34])),
    "chunk": lambda t, o: list(t.chunk(2)),
    "split": lambda t, o: list(t.split(2)),
    "unbind": lambda t, o: list(t.unbind()),
    "iterate": lambda t, o: [row.sum() for row in t],
    "narrow": lambda t, o: t.narrow(0, 1, 2),
    "diagonal": lambda t, o: t.diagonal(),
    "diag": lambda t, o: torch.diag(t),
    "tril": lambda t, o: t.tril(),
    "trace": lambda t, o: torch.trace(t),
    "flip": lambda t, o: t.flip(0),
    "roll": lambda t, o: t.roll(1, 0),
    "repeat": lambda t, o: t.repeat(2, 1),
    "expand": lambda t, o: t.expand(2, 5, 7),
    "unfold": lambda t, o: t.unfold(0, 2, 1),
    "as_strided": lambda t, o: t.as_strided((2, 2), (7, 1)),
    "view as real": lambda t, o: t.view(torch.int32),
    # ---- products and lists of tensors
    "matmul": lambda t, o: t @ o.T,
    "matmul second": lambda t, o: o.T @ t,
    "mm with itself": lambda t, o: t @ t.t(),
    "mv": lambda t, o: torch.mv(t, o[0]),
    "dot": lambda t, o: torch.dot(t.flatten(), o.flatten()),
    "inner": lambda t, o: torch.inner(t, o),
    "einsum": lambda t, o: torch.einsum("ij,ij->", t, o),
    "linear": lambda t, o: F.linear(o, t),
    "svd": lambda t, o: torch.linalg.svdvals(t),
    "stack": lambda t, o: torch.stack([t, t]),
    "stack of norms": lambda t, o: torch.stack([t.norm(), t.sum()]).norm(),
    "cat": lambda t, o: torch.cat([t, o]),
    "cat of flats": lambda t, o: torch.cat([t.flatten(), o.flatten()]).norm(),
    "hstack": lambda t, o: torch.hstack([t, o]),
    "block_diag": lambda t, o: torch.block_diag(t, o),
    "_foreach_norm": lambda t, o: torch._foreach_norm([t, t]),
    "_foreach_norm inf": lambda t, o: torch._foreach_norm([t], float("inf")),
    "_foreach_mul": lambda t, o: torch._foreach_mul([t, t], 2.0),
    "_foreach_mul mixed": lambda t, o: torch._foreach_mul([t, o], [o, o]),
    "get_total_norm": lambda t, o: nn.utils.get_total_norm([t, o]),
    "get_total_norm loop": lambda t, o: nn.utils.get_total_norm([t], foreach=False),
    "parameters_to_vector": lambda t, o: nn.utils.parameters_to_vector([t, o]),
    "sum of a list": lambda t, o: sum(x.pow(2).sum() for x in [t, t]),
    # ---- out into Python
    "tolist": lambda t, o: t.tolist(),
    "numpy": lambda t, o: torch.from_numpy(t.detach().numpy()),
    "array": lambda t, o: torch.from_numpy(t.detach().__array__()),
    "float of a sum": lambda t, o: float(t.sum()),
    "int of a count": lambda t, o: int((t > 0).sum()),
    "format of a norm": lambda t, o: f"{t.norm():.3f}",
    "branch on a sum": lambda t, o: "yes" if t.sum() > 0 else "no",
    "item of many": lambda t, o: t.item(),
    "bool of many": lambda t, o: bool(t),
    "in": lambda t, o: 123.0 in t,
    "pickle": lambda t, o: pickle.loads(pickle.dumps(t.data)),
    "torch.save": lambda t, o: _dumped(t.data),
    "data_ptr": lambda t, o: t.data_ptr() * 0,
    "storage": lambda t, o: t.untyped_storage().nbytes(),
    "to_sparse": lambda t, o: t.to_sparse().to_dense(),
    "dlpack": lambda t, o: torch.from_dlpack(t.detach()),
    "func norm": lambda t, o: torch.func.functional_call(nn.Identity(), {}, (t,)).norm(),
}

WRITES: Mapping[str, Operation] = {
    "mul_": lambda t, o: t.mul_(0.5),
    "div_ tensor": lambda t, o: t.div_(o[0, 0]),
    "add_": lambda t, o: t.add_(o, alpha=0.5),
    "sub_ row": lambda t, o: t.sub_(o[1]),
    "add_ itself": lambda t, o: t.add_(t),
    "mul_ own norm": lambda t, o: t.mul_(1 / (t.norm() + 1)),
    "div_ own norm": lambda t, o: t.div_(t.norm()),
    "sub_ own mean": lambda t, o: t.sub_(t.mean()),
    "zero_": lambda t, o: t.zero_(),
    "fill_": lambda t, o: t.fill_(0.25),
    "fill_ tensor": lambda t, o: t.fill_(o[0, 0]),
    "copy_": lambda t, o: t.copy_(o),
    "copy_ row": lambda t, o: t.copy_(o[2]),
    "copy_ fp64": lambda t, o: t.copy_(o.double()),
    "copy_ own": lambda t, o: t.copy_(t.clone() * 2),
    "copy_ transposed": lambda t, o: t.copy_(o.t().contiguous().t()),
    "clamp_": lambda t, o: t.clamp_(-0.1, 0.1),
    "clip_": lambda t, o: t.clip_(max=0.05),
    "nan_to_num_": lambda t, o: t.nan_to_num_(0.0),
    "masked_fill_": lambda t, o: t.masked_fill_(o > 0, 0.0),
    "masked_fill_ own": lambda t, o: t.masked_fill_(t > 0, 0.0),
    "masked_scatter_": lambda t, o: t.masked_scatter_(o > 0, o),
    "addcmul_": lambda t, o: t.addcmul_(o, o, value=0.5),
    "addcdiv_": lambda t, o: t.addcdiv_(o, o.abs() + 1, value=0.5),
    "lerp_": lambda t, o: t.lerp_(o, 0.25),
    "sqrt_": lambda t, o: t.abs_().sqrt_(),
    "neg_ sign_": lambda t, o: t.neg_().sign_(),
    "pow_": lambda t, o: t.pow_(2),
    "+=": lambda t, o: t.__iadd__(1),
    "*=": lambda t, o: t.__imul__(o),
    "normal_": lambda t, o: t.normal_(0, 0.5, generator=_generator()),
    "uniform_": lambda t, o: t.uniform_(-1, 1, generator=_generator()),
    "bernoulli_": lambda t, o: t.bernoulli_(0.5, generator=_generator()),
    "add_ noise": lambda t, o: t.add_(torch.randn(SHAPE, generator=_generator()), alpha=0.1),
    "add_ outer": lambda t, o: t.addmm_(o, o.t() @ o),
    "addr_": lambda t, o: t.addr_(o[:, 0], o[0]),
    "_foreach_mul_": lambda t, o: torch._foreach_mul_([t], 0.5),
    "_foreach_mul_ tensor": lambda t, o: torch._foreach_mul_([t], torch.tensor(0.5)),
    "_foreach_add_": lambda t, o: torch._foreach_add_([t], [o], alpha=2),
    "_foreach_zero_": lambda t, o: torch._foreach_zero_([t]),
    "_foreach_copy_": lambda t, o: torch._foreach_copy_([t], [o]),
    "_foreach_div_ norm": lambda t, o: torch._foreach_div_([t], torch._foreach_norm([t])),
    "_foreach_clamp_": lambda t, o: torch._foreach_clamp_max_([t], 0.1),
    "_foreach_lerp_": lambda t, o: torch._foreach_lerp_([t], [o], 0.5),
    "out mul": _out(torch.mul, 2.0),
    "out clamp": _out(torch.clamp, -0.1, 0.1),
    "out sin": _out(torch.sin),
    "row": _setitem(0, 0.0),
    "last element": _setitem((4, 6), 5.0),
    "column set": _setitem((slice(None), 1), 2.0),
    "all set": _setitem(slice(None), 1.0),
    "ellipsis set": _setitem(..., 0.5),
    "list set": _setitem([0, 3], 0.5),
    "mask set": lambda t, o: t.__setitem__(o > 0, 0.5),
    "own mask set": lambda t, o: t.__setitem__(t > 0, 0.5),
    "nan mask set": lambda t, o: t.__setitem__(t.isnan(), 0.0),
    "index_fill_": lambda t, o: t.index_fill_(0, torch.tensor([1]), 0.5),
    "index_add_": lambda t, o: t.index_add_(0, torch.tensor([1]), o[:1]),
    "index_copy_": lambda t, o: t.index_copy_(0, torch.tensor([1]), o[:1]),
    "scatter_": lambda t, o: t.scatter_(1, torch.zeros(5, 1, dtype=torch.int64), 0.5),
    "fill_diagonal_": lambda t, o: t.fill_diagonal_(1.0),
    "tril_": lambda t, o: t.tril_(),
    "cumsum_": lambda t, o: t.cumsum_(0),
    "zero a row": lambda t, o: t[0].zero_(),
    "mul_ a slice": lambda t, o: t[1:3].mul_(2),
    "copy_ to a row": lambda t, o: t[2].copy_(o[2]),
    "view mul_": lambda t, o: t.view(-1).mul_(2),
    "flatten mul_": lambda t, o: t.flatten().mul_(2),
    "reshape zero_": lambda t, o: t.reshape(-1).zero_(),
    "view slice": lambda t, o: t.view(-1)[3:9].zero_(),
    "t mul_": lambda t, o: t.t().mul_(2),
    "T set": lambda t, o: t.T.__setitem__(0, 1.0),
    "unsqueeze mul_": lambda t, o: t.unsqueeze(0).mul_(2),
    "unbind mul_": lambda t, o: [row.mul_(2) for row in t.unbind()],
    "chunk mul_": lambda t, o: [part.mul_(2) for part in t.chunk(2)],
    "iterate mul_": lambda t, o: [row.mul_(2) for row in t],
    "narrow zero_": lambda t, o: t.narrow(0, 0, 1).zero_(),
    "select fill_": lambda t, o: t.select(1, 0).fill_(1.0),
    "diagonal zero_": lambda t, o: t.diagonal().zero_(),
    "detach mul_": lambda t, o: t.detach().mul_(2),
    "data mul_": lambda t, o: t.data.mul_(2),
    "data row": lambda t, o: t.data.__setitem__(0, 0.0),
    "data view": lambda t, o: t.data.view(-1).add_(1),
    "data add_ own": lambda t, o: t.data.add_(t.data),
    "numpy write": lambda t, o: t.detach().numpy().fill(1.0),
    "contiguous mul_": lambda t, o: t.contiguous().mul_(2),
    "to itself mul_": lambda t, o: t.to("cpu").mul_(2),
    "clone mul_": lambda t, o: t.clone().mul_(2) * 0,
    "init normal_": lambda t, o: nn.init.normal_(t, generator=_generator()),
    "init constant_": lambda t, o: nn.init.constant_(t, 0.5),
    "init kaiming": lambda t, o: nn.init.kaiming_uniform_(t, generator=_generator()),
    "init xavier": lambda t, o: nn.init.xavier_normal_(t, generator=_generator()),
    "init orthogonal": lambda t, o: nn.init.orthogonal_(t, generator=_generator()) * 0,
    "init trunc_normal": lambda t, o: nn.init.trunc_normal_(t, std=0.1, generator=_generator()),
    "init eye": lambda t, o: nn.init.eye_(t),
    "resize_": lambda t, o: t.resize_(2, 2),
    "set_": lambda t, o: t.set_(o),
    "t_": lambda t, o: t.t_(),
    "squeeze_": lambda t, o: t.squeeze_(0),
    "unsqueeze_": lambda t, o: t.unsqueeze_(0),
    "share_memory_": lambda t, o: t.share_memory_().sum(),
    "vector_to_parameters": lambda t, o: nn.utils.vector_to_parameters(o.flatten(), [t]),
    "unscale": lambda t, o: torch._amp_foreach_non_finite_check_and_unscale_([t], torch.zeros(()), torch.tensor(0.5)),
}


def plain_answer(operation: Operation, value: Tensor, other: Tensor, leaf: bool) -> tuple[Any, Tensor, str]:
    """(answer, what the tensor holds afterwards, the error's class or ""). `leaf`: it requires grad, as a parameter does."""
    value = value.clone().requires_grad_(leaf)
    try:
        return operation(value, other.clone()), value, ""
    except Exception as error:
        return None, value, type(error).__name__


def difference(got: Any, want: Any) -> str:
    """What is wrong with a sharded answer, or ""."""
    if isinstance(got, Partial):
        got = got.resolved()
    if isinstance(got, Sharded):
        if not isinstance(want, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
            return f"Sharded of {tuple(got.shape)} {got.dtype}, expected {_about(want)}"
        got, want = got.piece, got.spec.cut(want)
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor):
            return f"{type(got).__name__}, expected a tensor"
        got = got.detach().as_subclass(Tensor)
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{_about(got)}, expected {_about(want)}"
        close = torch.allclose(got.double(), want.detach().double(), rtol=1e-5, atol=1e-6, equal_nan=True)
        return "" if close else f"{got.flatten()[:4].tolist()}..., expected {want.flatten()[:4].tolist()}..."
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(want):
            return f"{type(got).__name__}, expected {len(want)} items"
        return next((text for g, w in zip(got, want, strict=True) if (text := difference(g, w))), "")
    if isinstance(want, float) and isinstance(got, float):
        return "" if abs(got - want) <= 1e-5 + 1e-5 * abs(want) else f"{got}, expected {want}"
    return "" if got == want else f"{got!r}, expected {want!r}"


def _about(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


def verdict(
    operation: Operation, tensor: Any, other: Tensor, value: Tensor, after: Callable[[], Tensor], leaf: bool = False
) -> str:
    """Compares one operation on a sharded `tensor` of values `value`; "" if right, "refused" if it raised as it may."""
    want, left, error = plain_answer(operation, value, other, leaf)
    try:
        got = operation(tensor, other.clone())
    except zeroshard.DivergenceError:
        raise
    except Exception as raised:
        kept = difference(after(), value)
        if kept:
            return f"raised {raised!r} and left {kept}"
        if error and not isinstance(raised, (RuntimeError, ValueError, TypeError, IndexError)):
            return f"raised {raised!r}"
        in_graph = leaf and "leaf Variable" in str(raised)
        if not error and not in_graph and not isinstance(raised, zeroshard.ShardError):
            return f"raised {type(raised).__name__} that names no remedy: {str(raised)[:150]}"
        return "refused"
    if error:
        return f"gave {_about(got)} where torch raises {error}"
    wrong = difference(got, want)
    kept = difference(after(), left)
    return " · ".join(filter(None, [wrong and f"answer: {wrong}", kept and f"afterwards: {kept}"]))


def wrong_ones(of_ranks: list[dict[str, str]]) -> dict[str, str]:
    """The verdicts that are neither right nor a refusal."""
    named = [(f"{name}, rank {rank}", text) for rank, found in enumerate(of_ranks) for name, text in found.items()]
    return {name: text for name, text in named if text not in ("", "refused")}
