"""Losses over split sequences equal those of one process, in value and in gradients averaged over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ring_attention as ra
import zeroshard
from tests.harness import RankPools

V, E = 23, 8


def losses(rank: int, world: int, labels: torch.Tensor, linear: bool, ignore_index: int, **options: Any) -> tuple[Any, ...]:
    """This rank's loss and gradients beside those of one process; `labels` are shifted already."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*labels.shape, E, dtype=torch.float64, generator=generator)
    weight, bias = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((V, E), (V,)))
    one = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    valid = (labels != ignore_index).sum().clamp(min=1)
    want = F.cross_entropy(F.linear(*one).flatten(0, 1), labels.flatten(), ignore_index=ignore_index, reduction="sum") / valid
    want.backward()
    cp = ra.ContextParallel(dist.group.WORLD)
    mine = cp.positions(labels.shape[1])
    h, w, b = (x.clone().requires_grad_() for x in (hidden[:, mine], weight, bias))
    if linear:
        loss = cp.linear_cross_entropy(h, w, labels[:, mine], ignore_index, bias=b, **options)
    else:
        loss = cp.cross_entropy(F.linear(h, w, b), labels[:, mine], ignore_index, **options)
    loss.backward()
    grads = [w.grad.clone(), b.grad.clone()]
    for grad in grads:
        dist.all_reduce(grad)
    return (
        (loss.detach(), want.detach()), (h.grad / world, one[0].grad[:, mine]),
        (grads[0] / world, one[1].grad), (grads[1] / world, one[2].grad),
    )  # fmt: skip


def some_labels(kind: str) -> torch.Tensor:
    labels = torch.randint(V, (2, 21), generator=torch.Generator().manual_seed(1))
    ignored = {"all": slice(0, 0), "few": slice(2, None), "none": slice(None), "prompt": slice(0, 9)}[kind]
    labels[:, ignored] = -100
    return labels


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("kind", ["all", "few", "none", "prompt"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_mean_over_all_tokens(ranks: RankPools, world: int, kind: str, linear: bool) -> None:
    for pairs in ranks(world).run(losses, some_labels(kind), linear, -100):
        assert all(torch.allclose(got, want, atol=1e-13, rtol=1e-12) for got, want in pairs), pairs


@pytest.mark.parametrize("linear", [False, True])
def test_another_ignore_index(ranks: RankPools, linear: bool) -> None:
    labels = some_labels("all").clamp(max=4)
    for pairs in ranks(2).run(losses, labels, linear, 3):
        assert all(torch.allclose(got, want, atol=1e-13) for got, want in pairs)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_of_any_size(ranks: RankPools, chunk: int) -> None:
    for pairs in ranks(2).run(losses, some_labels("prompt"), True, -100, chunk_tokens=chunk):
        assert all(torch.allclose(got, want, atol=1e-13) for got, want in pairs)


def values(rank: int, world: int) -> list[float]:
    labels = torch.full((1, 4), -100) if rank else torch.tensor([[1, 2, 3, -100]])
    logits, cp = torch.randn(1, 4, V), ra.ContextParallel(dist.group.WORLD)
    with torch.no_grad():
        plain, halved = cp.cross_entropy(logits, labels), cp.cross_entropy(logits, labels, tokens=6)
        counted = cp.num_tokens(labels, group=dist.group.WORLD)
        in_bf16 = cp.linear_cross_entropy(torch.randn(1, 4, E).bfloat16(), torch.randn(V, E).bfloat16(), labels)
    assert in_bf16.dtype == torch.float32
    return [plain.item(), halved.item(), counted.item(), in_bf16.item()]


def test_all_ranks_report_the_same_number(ranks: RankPools) -> None:
    found = ranks(3).run(values)
    assert found[0] == found[1] == found[2] and found[0][2] == 3
    assert abs(found[0][0] - 2 * found[0][1]) < 1e-6


def mean_over_replicas(rank: int, world: int, as_tensor: bool) -> tuple[float, float]:
    """2 replicas with unequal numbers of tokens: `tokens` is the count of both, gradients averaged over all ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    cp, replica = ra.ContextParallel(mesh["context"]), mesh["data"].get_local_rank()
    labels = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(replica))
    labels[:, : 3 + 5 * replica] = -100
    logits = torch.randn(1, 12, V, generator=torch.Generator().manual_seed(9 + replica), dtype=torch.float64)
    scale, mine = torch.ones((), dtype=torch.float64, requires_grad=True), cp.positions(12)
    tokens: torch.Tensor | int = cp.num_tokens(labels[:, mine], group=dist.group.WORLD)
    tokens = tokens if as_tensor else int(tokens)
    cp.cross_entropy(logits[:, mine] * scale, labels[:, mine], tokens=tokens).backward()
    got = scale.grad.clone()
    dist.all_reduce(got)
    both, total, count = torch.ones((), dtype=torch.float64, requires_grad=True), 0.0, 0
    for r in range(2):
        y = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(r))
        y[:, : 3 + 5 * r] = -100
        x = torch.randn(1, 12, V, generator=torch.Generator().manual_seed(9 + r), dtype=torch.float64)
        total, count = total + F.cross_entropy((x * both)[0], y[0], reduction="sum"), count + (y >= 0).sum()
    (total / count).backward()
    return got.item() / world, both.grad.item()


def test_replicas_with_unequal_tokens(ranks: RankPools) -> None:
    for as_tensor in (True, False):
        for got, want in ranks(4).run(mean_over_replicas, as_tensor):
            assert abs(got - want) < 1e-12


def mismatched(rank: int, world: int) -> str:
    cp = ra.ContextParallel(dist.group.WORLD)
    with pytest.raises(ra.UsageError) as error:
        cp.cross_entropy(torch.randn(1, 5, V), torch.zeros(1, 4).long())
    return str(error.value)


def test_labels_of_another_length_are_refused(ranks: RankPools) -> None:
    assert "shift_labels" in ranks(1).run(mismatched)[0]


def weight_of_a_sharded_model(rank: int, world: int, stage: int) -> dict[str, Any]:
    """The head's weight handed over outside any forward, in bf16 compute; its gradient, and how often it was gathered."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(E, E), torch.nn.Linear(E, 512))
    precision = zeroshard.Precision(compute=torch.bfloat16)
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision=precision, units=["0", "1"])
    hidden, labels = model[0](torch.randn(1, 40, E).bfloat16()), torch.randint(0, 512, (1, 40))
    cp = ra.ContextParallel(dist.group.WORLD)
    before = zeroshard.stats(model).gathers
    loss = cp.linear_cross_entropy(hidden, model[1].weight, labels, bias=model[1].bias, chunk_tokens=7)
    gathers = zeroshard.stats(model).gathers - before
    loss.backward()
    return {"loss": loss.detach(), "gathers": gathers, **zeroshard.full_gradients(model)}


def test_the_weight_of_a_sharded_model_is_gathered_once(ranks: RankPools) -> None:
    whole, sharded = (ranks(2).run(weight_of_a_sharded_model, stage) for stage in (0, 3))
    for one, two in zip(whole, sharded, strict=True):
        assert two.pop("gathers") <= 2  # weight and bias
        one.pop("gathers")
        torch.testing.assert_close(two, one, rtol=0, atol=0)


def counted(rank: int, world: int) -> tuple[list[float], str, str]:
    """Losses given the count over a part of the job, as it is and after arithmetic; what is refused."""
    half = dist.new_subgroups(2)[0]
    cp = ra.ContextParallel(half)
    logits, labels = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([[1, 2, 3]])
    count = cp.num_tokens(labels, group=half)
    total = torch.stack([count.to(torch.float64), count.clone() * 0 + 0]).sum()
    found = [cp.cross_entropy(logits, labels, tokens=tokens).item() for tokens in (count, count + 0, total)]
    with pytest.raises(ra.UsageError) as plain:
        cp.cross_entropy(logits, labels, tokens=count.item())
    with pytest.raises(ra.UsageError) as mixed:
        _ = count + cp.num_tokens(labels, group=dist.group.WORLD)
    return [*found, cp.cross_entropy(logits, labels).item()], str(plain.value), str(mixed.value)


def test_a_count_knows_its_ranks(ranks: RankPools) -> None:
    for found, plain, mixed in ranks(4).run(counted):
        assert max(found) - min(found) < 1e-6, found
        assert "all 4 ranks" in plain and "over 2" in plain and "2 and 4" in mixed
