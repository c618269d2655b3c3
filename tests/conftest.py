"""Fixtures of all tests: `ranks(world).run(fn, ...)` runs a function on living gloo ranks (see harness.py)."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankPools, rank_environment


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def same_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test computes in its own process starts as on a rank: one thread, one seed, and nothing left by another test."""
    for name, value in rank_environment().items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert not dist.is_initialized(), "the test has left a process group behind"
