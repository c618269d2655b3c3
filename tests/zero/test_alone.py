"""One rank alone: gradients stay where autograd leaves them, and are what two ranks with the same data get.

The mean of two equal gradients is that gradient, to the bit, so two ranks that see the same batches are the reference.
"""

import pytest
import torch
from torch import nn

import zeroshard
from tests.harness import RankPools


class Net(nn.Module):
    """A sparse embedding, a norm that may stay fp32, and a layer that is used every other time only."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8, sparse=True)
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.norm(self.tokens(ids).float())
        x = self.first(x.to(self.first.weight.dtype))
        return (self.second(x) if both else x).float().square().mean()


def trained(rank: int, world: int, stage: int, low: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    precision = zeroshard.Precision(compute=torch.bfloat16, keep_fp32=("norm",)) if low else None
    model = Net()
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, precision=precision)
    generator = torch.Generator().manual_seed(3)
    seen = {}
    for step in range(3):
        ids = torch.randint(0, 11, (2, 2, 5), generator=generator)
        with model.no_sync():
            (model(ids[0], step != 1) / 2).backward()
        (model(ids[1], step == 2) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen[f"norm {step}"] = torch.as_tensor(float(norm))
        if step == 1:
            seen |= {f"gradient of {n}": g for n, g in zeroshard.full_gradients(model).items() if g is not None}
        optimizer.step()
        optimizer.zero_grad()
    return seen | zeroshard.full_state_dict(model)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_as_two_ranks_with_the_same_data(ranks: RankPools, stage: int, low: bool) -> None:
    (alone,) = ranks(1).run(trained, stage, low)
    together, _ = ranks(2).run(trained, 0, low)
    assert alone.keys() == together.keys()
    for name, value in together.items():
        torch.testing.assert_close(alone[name], value, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def left_by_autograd(rank: int, world: int, stage: int) -> tuple[bool, int, int, int]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    weight = model[0].weight
    storages: list[int] = []
    model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    weight.register_post_accumulate_grad_hook(lambda p: storages.append(p.grad.data_ptr()))
    model(torch.ones(2, 16)).sum().backward()
    stats = zeroshard.stats(model)
    due = sum(p.numel() * 4 for p in model.parameters())
    return weight.grad.data_ptr() == storages[0], stats.resident_bytes["gradients"] - due, stats.reductions, stats.bytes_sent


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_is_copied_or_sent_and_the_books_are_right(ranks: RankPools, stage: int) -> None:
    assert ranks(1).run(left_by_autograd, stage) == [(True, 0, 0, 0)]


def no_optimizer(rank: int, world: int) -> str:
    model, _ = zeroshard.shard(nn.Linear(2, 2), stage=2)
    with pytest.raises(zeroshard.ShardError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


def test_a_model_for_inference_still_refuses_gradients(ranks: RankPools) -> None:
    (text,) = ranks(1).run(no_optimizer)
    assert "no optimizer" in text
