"""A rank that dies, hangs or runs out of memory: the others say who, when and where, and none of them writes a checkpoint."""

import json
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

import zeroshard
from tests.harness import RankPools, RanksFailed
from tests.zero.checkpoints import files_in, meet, pair, steps
from zeroshard import ShardError, StallError

TIMEOUT_S = 3.0


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    time.sleep(TIMEOUT_S + 4)
    raise KeyboardInterrupt


def runs_out_of_memory() -> None:
    raise MemoryError


def at(phase: str, model: Any, optimizer: Any, call: Callable[[], None]) -> None:
    """Calls it once, in the middle of the phase."""
    block = model.blocks[1]
    if phase == "forward":
        block.register_forward_pre_hook(lambda *_: call())
    elif phase == "backward":
        block.register_forward_hook(lambda _, args, output: output.register_hook(lambda grad: call()) and None)
    else:
        optimizer.register_step_pre_hook(lambda *_: call())


def lose_a_rank(rank: int, world: int, folder: str, failure: Callable[[], None], phase: str) -> None:
    path = pathlib.Path(folder, "checkpoint")
    model, optimizer = pair("net", "adamw", stage=3)
    steps(model, optimizer, "net", range(2), rank)
    zeroshard.save(path, model, optimizer, extra="good")
    begun = zeroshard.save(path, model, optimizer, extra="never published", blocking=False)
    assert begun is not None
    meet()
    if rank == 1:
        at(phase, model, optimizer, failure)
    said: list[str] = []
    try:
        steps(model, optimizer, "net", range(2, 5), rank)
    except ShardError as error:
        said.append(f"{type(error).__name__}: {error}")
    for write in (begun.wait, lambda: zeroshard.save(path, model, optimizer, extra="of a survivor")):
        with pytest.raises(StallError):
            write()
    pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(said))


def load_alone(rank: int, world: int, path: str) -> Any:
    model, optimizer = pair("net", "adamw", seed=4)
    return zeroshard.load(path, model, optimizer)


@pytest.mark.parametrize(
    "failure, phase", [(dies, "forward"), (hangs, "backward"), (runs_out_of_memory, "backward"), (dies, "step")]
)
def test_the_others_stop_and_say_where(
    ranks: RankPools, tmp_path: pathlib.Path, failure: Callable[[], None], phase: str
) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed):
        ranks(3).run(lose_a_rank, str(tmp_path), failure, phase, group_timeout=TIMEOUT_S, dirty=True)
    assert time.monotonic() - started < 30
    # What it had sent before lets the others go on a little: gathers ahead, a step after its gradients.
    where = {"forward": "in (for|back)ward, step 3", "backward": "in backward, step 3", "step": "in forward, step 4"}[phase]
    for rank in (0, 2):
        (text,) = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert re.search(rf"StallError: rank \d did not arrive at '[^']*(blocks\.\d|Net)[^']*' {where} ", text), text
    assert "rank 1 " in "".join((tmp_path / f"rank{rank}.json").read_text() for rank in (0, 2))
    assert ranks(1).run(load_alone, str(tmp_path / "checkpoint")) == ["good"]
    assert sum(file.name == ".metadata" for file in files_in(tmp_path / "checkpoint")) == 1
    assert not list(tmp_path.glob(".*"))
