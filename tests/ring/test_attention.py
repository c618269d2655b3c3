"""`ring_attention` against dense attention, value by value, gradients one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ring_attention as ra
from ring_attention import strategies
from tests.harness import RankPools
from tests.ring import drawn
from tests.ring.problems import Problem, check

PROPERTY = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LAYOUTS = ["Contiguous", "ZigZag", "Striped", "Balanced"]


def answers(rank: int, world: int, problems: list[Problem]) -> list[dict[str, Any]]:
    return [problem.ring() for problem in problems]


def run(ranks: RankPools, world: int, problems: list[Problem], tolerance: float | None = None) -> None:
    for problem, *parts in zip(problems, *ranks(world).run(answers, problems), strict=True):
        check(problem, parts, tolerance)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@PROPERTY
@given(problems=st.lists(drawn.problems(), min_size=12, max_size=12))
def test_any_problem_equals_dense(ranks: RankPools, world: int, problems: list[Problem]) -> None:
    run(ranks, world, problems)


def in_portions(rank: int, world: int, problems: list[Problem]) -> list[dict[str, Any]]:
    """The same with a ring that takes one key/value head at a time, as it does with long sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "LATENCIES", 0)
        return answers(rank, world, problems)


@PROPERTY
@given(problems=st.lists(drawn.problems(), min_size=12, max_size=12))
def test_heads_in_portions_change_nothing(ranks: RankPools, problems: list[Problem]) -> None:
    for problem, *parts in zip(problems, *ranks(3).run(in_portions, problems), strict=True):
        check(problem, parts)


def on_a_mesh(rank: int, world: int, shape: tuple[int, int], problems: list[Problem]) -> list[dict[str, Any]]:
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "heads"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "LATENCIES", 0)
        return [problem.ring(mesh) for problem in problems]


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
@PROPERTY
@given(problems=st.lists(drawn.problems(), min_size=12, max_size=12))
def test_any_problem_on_a_mesh_equals_dense(ranks: RankPools, shape: tuple[int, int], problems: list[Problem]) -> None:
    hybrid = [problem.with_(strategy="hybrid") for problem in problems]
    for problem, *parts in zip(hybrid, *ranks(shape[0] * shape[1]).run(on_a_mesh, shape, hybrid), strict=True):
        check(problem, parts)


@pytest.mark.parametrize("world", [2, 4])
def test_sinks_with_windows_and_documents_on_uneven_shares(ranks: RankPools, world: int) -> None:
    """Layers as gpt-oss has them, with fewer tokens than ranks and with documents and padding across borders."""
    masks: list[dict[str, Any]] = [{"causal": True, "window": (2, 0)}, {"causal": True, "window": (6, 0)}]
    some = [
        Problem(S=S, B=2, heads=heads, mask=mask | extra, layout=name, strategy=strategy, sinks=True)
        for S in (1, world - 1, 2 * world + 1, 29)
        for heads in ((8, 1), (6, 3))
        for mask in masks
        for extra in ({}, {"documents": [min(at // 4, 2) if at % 9 else -1 for at in range(S)]})
        for name, strategy in (("Contiguous", "ring"), ("ZigZag", "ulysses"), ("Striped", "gather"), ("Balanced", "auto"))
    ]
    run(ranks, world, some)


def test_long_enough_for_every_cut_of_the_kernel(ranks: RankPools) -> None:
    """Blocks past the sizes at which the kernel halves, stretches, or takes the native causal form."""
    masks: list[dict[str, Any]] = [
        {"causal": True},
        {"causal": True, "window": (150, 0)},
        {"window": (700, 300)},
        {"causal": True, "documents": [0] * 700 + [1] * 333 + [-1] * 67 + [2] * 100},
    ]
    long = [Problem(S=1200, heads=(2, 1), mask=mask, layout=name) for mask in masks for name in LAYOUTS]
    run(ranks, 2, long)


def test_cross_attention_has_a_layout_of_its_own(ranks: RankPools) -> None:
    cross = [
        Problem(S=13, Sk=Sk, B=2, heads=(4, 2), mask=mask, layout=name, key_layout=key, strategy=strategy, sinks=True)
        for Sk in (3, 20)
        for mask in ({}, {"causal": True}, {"window": (4, 2)}, {"prefix": [2, 5]})
        for name, key in (("ZigZag", "Contiguous"), ("Contiguous", "Striped"))
        for strategy in ("ring", "ulysses")
    ]
    run(ranks, 3, cross)


def test_lengths_that_leave_ranks_empty(ranks: RankPools) -> None:
    small = [Problem(S=S, layout=name, strategy=strategy, sinks=True)
             for S in (1, 2, 3) for name in LAYOUTS for strategy in ("ring", "gather", "ulysses")]  # fmt: skip
    run(ranks, 4, small)


def test_mask_mod(ranks: RankPools) -> None:
    mods = [every_third, by_head, by_row]
    found = [
        Problem(S=14, B=2, heads=(4, 2), mask={"causal": causal, "mask_mod": mod}, layout=name, strategy=strategy)
        for mod in mods
        for causal in (True, False)
        for name, strategy in (("ZigZag", "ring"), ("Striped", "gather"), ("Contiguous", "auto"))
    ]
    run(ranks, 3, found)


def every_third(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k) % 3 < 2


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k).abs() <= 2 + h


def by_row(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k + b) % 2 == 0


def test_fp32(ranks: RankPools) -> None:
    run(ranks, 4, [Problem(S=64, heads=(4, 2), dims=(16, 16), layout=name, dtype=torch.float32) for name in LAYOUTS])


# ------------------------------------------------------------------------------------------------ low precision
def rms_errors(rank: int, world: int, problem: Problem) -> dict[str, torch.Tensor]:
    return problem.ring()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [2, 4])
def test_low_precision_is_that_of_one_call(ranks: RankPools, world: int, dtype: torch.dtype) -> None:
    """Root mean square error of each result at most 1.5 times that of one ordinary call, flat in the ranks."""
    problem = Problem(S=160, B=2, heads=(4, 2), dims=(16, 16), dtype=dtype)
    want, got = problem.dense(), problem.whole(ranks(world).run(rms_errors, problem))
    x = {n: t.requires_grad_(n != "dout") for n, t in problem.tensors().items()}
    out = torch.nn.functional.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, enable_gqa=True)
    out.backward(x["dout"])
    single = {"out": out.detach(), "dq": x["q"].grad, "dk": x["k"].grad, "dv": x["v"].grad}
    for name, one in single.items():
        error = [(y.double() - want[name]).square().mean().sqrt() for y in (got[name], one)]
        assert got[name].dtype == dtype and error[0] <= 1.5 * error[1], (name, error)


# ------------------------------------------------------------------------------------------------ padding
def padded(rank: int, world: int, name: str, scattered: bool, strategy: str, filler: float) -> list[bool]:
    ids = torch.tensor([0] * 9 + [1] * 8 + [-1] * 7)
    if scattered:
        ids = ids[torch.randperm(24, generator=torch.Generator().manual_seed(0))]
    problem = Problem(S=24, B=2, heads=(4, 2), mask={"causal": True, "documents": ids.tolist()}, layout=name)
    layout, x = problem.layouts(world)[0], problem.tensors()
    results = []
    for fill in (0.0, filler):
        for n in ("q", "k", "v", "dout"):
            x[n][:, :, ids < 0] = fill
        leaves = [layout.shard(x[n], rank, 2).requires_grad_() for n in "qkv"] + [x["sinks"][:4].repeat(2)[:4]]
        leaves[3].requires_grad_()
        out = ra.ring_attention(
            *leaves[:3], group=dist.group.WORLD, layout=layout, mask=problem.mask_of(), sinks=leaves[3], strategy=strategy
        )
        out.backward(layout.shard(x["dout"], rank, 2))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("name", ["Contiguous", "ZigZag"])
def test_what_padding_holds_changes_no_bit(ranks: RankPools, name: str, scattered: bool, strategy: str) -> None:
    for filler in (torch.nan, torch.inf):
        for same in ranks(3).run(padded, name, scattered, strategy, filler):
            assert all(same)


# ------------------------------------------------------------------------------------------------ torch around the op
def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return ra.ring_attention(q * 2, k, v, **options) + 1


def wrapped(rank: int, world: int, how: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(result through the wrapper, plain result) of out and all gradients."""
    from torch.utils.checkpoint import checkpoint

    problem = Problem(S=16, B=2, heads=(4, 2), mask={"causal": True, "documents": [0] * 9 + [1] * 7})
    layout, x = problem.layouts(world)[0], problem.tensors()
    options = {"group": dist.group.WORLD, "layout": layout, "mask": problem.mask_of(), "strategy": "auto"}
    results = []
    for wrap in (None, how):
        leaves = [layout.shard(x[n], rank, 2).requires_grad_() for n in "qkv"]
        if wrap is None:
            out = block(*leaves, options)
        elif wrap == "compile":
            out = torch.compile(block, fullgraph=True, backend="aot_eager")(*leaves, options)
        else:
            out = checkpoint(block, *leaves, options, use_reentrant=wrap == "reentrant")
        out.backward(layout.shard(x["dout"], rank, 2))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return list(zip(*reversed(results), strict=True))


@pytest.mark.parametrize("how", ["reentrant", "nonreentrant", "compile"])
def test_checkpoints_and_compile_change_nothing(ranks: RankPools, how: str) -> None:
    for pairs in ranks(2).run(wrapped, how):
        assert all(torch.equal(got, want) for got, want in pairs)


def compiled_many(rank: int, world: int) -> int:
    """New documents in every batch are no reason to compile again."""
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for seed in range(3):
        ids = torch.randint(3, (16,), generator=torch.Generator().manual_seed(seed)).sort().values
        problem = Problem(S=16, seed=seed, mask={"causal": True, "documents": ids.tolist()})
        layout, x = problem.layouts(world)[0], problem.tensors()
        leaves = [layout.shard(x[n], rank, 2) for n in "qkv"]
        options = {"group": dist.group.WORLD, "layout": layout, "mask": problem.mask_of()}
        assert torch.equal(compiled(*leaves, options), block(*leaves, options))
    return counter.frame_count


def test_new_documents_do_not_compile_again(ranks: RankPools) -> None:
    assert ranks(2).run(compiled_many) == [1, 1]


def selective(rank: int, world: int) -> tuple[int, bool]:
    """How often the ring's forward runs in a checkpoint that saves it."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from ring_attention import ring

    calls, plain = [], ring.forward
    ring.forward = lambda *a: (calls.append(1), plain(*a))[1]
    problem = Problem(S=16)
    layout, x = problem.layouts(world)[0], problem.tensors()
    leaves = [layout.shard(x[n], rank, 2).requires_grad_() for n in "qkv"]
    options = {"group": dist.group.WORLD, "layout": layout, "mask": problem.mask_of()}
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.ring_attention.attend.default])
    checkpoint(block, *leaves, options, use_reentrant=False, context_fn=keep).sum().backward()
    ring.forward = plain
    grads = [leaf.grad for leaf in leaves]
    again = [leaf.detach().requires_grad_() for leaf in leaves]
    block(*again, options).sum().backward()
    return len(calls), all(torch.equal(g, a.grad) for g, a in zip(grads, again, strict=True))


def test_a_selective_checkpoint_runs_forward_once(ranks: RankPools) -> None:
    assert ranks(2).run(selective) == [(1, True)] * 2


def opcheck(rank: int, world: int) -> None:
    from torch.library import opcheck as check_op

    problem = Problem(S=12, mask={"causal": True})
    layout, x = problem.layouts(world)[0], problem.tensors()
    q, k, v = (layout.shard(x[n], rank, 2).requires_grad_() for n in "qkv")
    request = "\n".join((dist.group.WORLD.group_name, layout.spec, layout.spec, problem.mask_of().spec, "ring", "None"))
    tests = ("test_schema", "test_faketensor")
    check_op(torch.ops.ring_attention.attend, (q, k, v, None, None, None, None, request, None, None), test_utils=tests)


def test_the_op_is_what_it_says(ranks: RankPools) -> None:
    ranks(1).run(opcheck)


def no_second_order(rank: int, world: int) -> str:
    problem = Problem(S=12)
    layout, x = problem.layouts(world)[0], problem.tensors()
    q, k, v = (layout.shard(x[n], rank, 2).requires_grad_() for n in "qkv")
    out = ra.ring_attention(q, k, v, group=dist.group.WORLD, layout=layout, mask=ra.Mask())
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    try:
        grad.sum().backward()
    except ra.UsageError as error:
        return str(error)
    return "accepted"


def test_second_order_is_refused(ranks: RankPools) -> None:
    assert "create_graph" in ranks(1).run(no_second_order)[0]


# ------------------------------------------------------------------------------------------------ groups
def on_meshes(rank: int, world: int) -> list[list[dict[str, Any]]]:
    found = []
    for shape in ((2, 2), (4, 1), (1, 4)):
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "heads"))
        found.append([problem.ring(mesh) for problem in mesh_problems()])
    return found


def mesh_problems() -> list[Problem]:
    return [
        Problem(S=S, B=2, heads=heads, layout=name, strategy=strategy, sinks=True, mask={"causal": True, "window": (7, 0)})
        for S in (3, 17)
        for heads in ((8, 4), (6, 2), (3, 1))
        for name in ("ZigZag", "Striped")
        for strategy in ("hybrid", "auto")
    ]


def test_hybrid_on_any_mesh(ranks: RankPools) -> None:
    by_rank = ranks(4).run(on_meshes)
    for shape in range(3):
        for at, problem in enumerate(mesh_problems()):
            check(problem, [found[shape][at] for found in by_rank])


def on_subgroups(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([r]) for r in range(world)]
    return Problem(S=12, seed=rank // 2).ring(pairs[rank // 2]), Problem(S=5 + rank, seed=rank).ring(alone[rank])


def test_groups_do_not_touch_each_other(ranks: RankPools) -> None:
    found = ranks(4).run(on_subgroups)
    for pair in (0, 1):
        check(Problem(S=12, seed=pair), [found[2 * pair][0], found[2 * pair + 1][0]])
    for rank in range(4):
        check(Problem(S=5 + rank, seed=rank), [found[rank][1]])


def autocast(rank: int, world: int) -> tuple[torch.dtype, torch.dtype]:
    problem = Problem(S=12, dtype=torch.float32)
    layout, x = problem.layouts(world)[0], problem.tensors()
    q, k, v = (layout.shard(x[n], rank, 2).requires_grad_() for n in "qkv")
    with torch.autocast("cpu", torch.bfloat16):
        out = ra.ring_attention(q, k, v.bfloat16(), group=dist.group.WORLD, layout=layout, mask=ra.Mask(causal=True))
    out.sum().backward()
    return out.dtype, q.grad.dtype


def test_autocast_casts_as_it_does_for_attention(ranks: RankPools) -> None:
    assert ranks(2).run(autocast)[0] == (torch.bfloat16, torch.float32)


# ------------------------------------------------------------------------------------------------ refusals
def refused(rank: int, world: int) -> list[str]:
    problem = Problem(S=4 * world, heads=(4, 2))
    layout, x = problem.layouts(world)[0], problem.tensors()
    q, k, v = (layout.shard(x[n], rank, 2) for n in "qkv")
    good = {"group": dist.group.WORLD, "layout": layout, "mask": ra.Mask(causal=True)}
    mesh = dist.init_device_mesh("cpu", (1, world))
    said = []
    for q_, k_, options in [
        (q, k, {"group": None}),
        (q, k[:, :, :, :4], {}),
        (q.long(), k.long(), {}),
        (q[:, :3], k, {}),
        (q, k, {"layout": ra.ZigZag(4 * world, world + 1)}),
        (q, k, {"mask": ra.Mask(documents=torch.zeros(3).long())}),
        (q, k, {"mask": ra.Mask(documents=torch.zeros(5, 4 * world).long())}),
        (q, k, {"strategy": "rnig"}),
        (q, k, {"strategy": "hybrid"}),
        (q, k, {"strategy": "ring", "group": mesh}),
        (q, k, {"softcap": -1.0}),
        (q, k, {"sinks": torch.zeros(3)}),
        (q, k, {"strategy": "ulysses", "mask": ra.Mask(mask_mod=by_head)}),
        (q, k, {"key_layout": ra.ZigZag(4 * world + 1, world)}),
    ]:
        with pytest.raises(ra.RingError) as error:
            ra.ring_attention(q_, k_, v if q_.is_floating_point() else v.long(), **(good | options))
        assert isinstance(error.value, ValueError)
        said.append(str(error.value))
    return said


def test_mistakes_are_named(ranks: RankPools) -> None:
    words = [
        "group is None", "one head dim", "floating dtype", "heads must divide", "world_size 3, the group has 2 ranks",
        "documents have length 3", "batch of 5", "'rnig'", "2-D device mesh", "needs a process group", "softcap must be",
        "sinks must be floating", "cannot carry a mask_mod", "local key lengths",
    ]  # fmt: skip
    for said in ranks(2).run(refused):
        assert all(word in text for word, text in zip(words, said, strict=True)), said
