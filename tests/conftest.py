"""Fixtures of all tests: `ranks(world).run(fn, ...)` runs a function on living gloo ranks (see harness.py)."""

from collections.abc import Iterator

import pytest
import torch

from tests.harness import RankPools, rank_environment


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def one_thread_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same start for what a test computes in its own process as a rank has."""
    for name, value in rank_environment().items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)
    torch.manual_seed(0)
