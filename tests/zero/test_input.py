"""Bad input is named by the rank that got it, before it waits for others; what may be meant is told, not refused."""

import warnings

import pytest
import torch
from torch import nn

import zeroshard
from tests.harness import RankPools
from tests.models import Net, sgd
from zeroshard import InputWarning, ShardError


class Reader(nn.Module):
    """A table of its own unit, behind a layer of another."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(37, 8)
        self.positions = nn.Embedding(16, 8)
        self.bags = nn.EmbeddingBag(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[-1])) + self.bags(input=bags)[:, None]
        for block in self.blocks:
            x = block(x)
        return x


def out_of_range(rank: int, world: int) -> None:
    model = Reader()
    zeroshard.shard(model, sgd(model.parameters()), stage=1)
    good, bags = torch.full((2, 5), 36), torch.zeros(2, 3, dtype=torch.long)
    for ids, bag, words in (
        (good + (rank == 1), bags, "tokens has 37 rows, and was given ids from 37 to 37"),
        (good - 40 * (rank == 1), bags, "tokens has 37 rows, and was given ids from -4 to -4"),
        (good.expand(2, 5) if rank == 0 else good[:, :1].expand(2, 17), bags, "positions has 16 rows, .* from 0 to 16"),
        (good, bags + 7 * (rank == 1), "bags has 5 rows, and was given ids from 7 to 7"),
    ):
        if rank == 1:
            with pytest.raises(ShardError, match=f"rank 1: {words}"):
                model(ids, bag)
        else:
            model(ids, bag)
    model(good, bags).sum().backward()


def test_ids_beyond_a_table_are_named_with_it(ranks: RankPools) -> None:
    ranks(2).run(out_of_range)


def nan_and_empty(rank: int, world: int) -> None:
    model = Net(depth=2)
    optimizer = sgd(model.parameters())
    zeroshard.shard(model, optimizer, stage=3)
    for batch, words in (
        (torch.ones(2, 7), ""),
        (torch.full((2, 7), float("inf")), ""),  # of a mask, it may be
        (
            torch.ones(2, 7).index_fill(0, torch.tensor([rank]), float("nan")),
            f"rank {rank}, call of Net: its input '0' holds NaN",
        ),
        (torch.ones(0, 7), f"rank {rank}, call of Net: its inputs '0' are empty"),
    ):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", InputWarning)
            model(batch)
            with torch.no_grad():
                model(batch)
        texts = [str(each.message) for each in seen if each.category is InputWarning]
        assert len(texts) == bool(words) and all(words in text for text in texts), texts
    with warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)
        with pytest.raises(InputWarning):
            model(torch.full((2, 7), float("nan")))


def test_nan_and_empty_batches_are_told(ranks: RankPools) -> None:
    ranks(2).run(nan_and_empty)
