"""The example that resumes: on other ranks at another stage, and after a kill, its losses are those of one run."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.harness import REPOSITORY, Finished, free_port, rank_environment, run_program, torchrun

SCRIPT = REPOSITORY / "examples" / "resume_on_fewer_ranks.py"
STEPS = 24


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  ranks \d+  loss ([\d.]+)", text)}


def restarted(arguments: list[str], log: pathlib.Path, kill_after: int, timeout: float = 100) -> Finished:
    """torchrun with restarts on two ranks; rank 1 is killed once, when step `kill_after` has been printed."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    command = [sys.executable, *launcher, f"--master-port={free_port()}", str(SCRIPT), *arguments]
    with open(log, "w") as out:
        environment = {**os.environ, **rank_environment(), "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    deadline, killed = time.monotonic() + timeout, False
    while process.poll() is None and time.monotonic() < deadline:
        if not killed and f"step {kill_after} " in log.read_text():
            os.kill(psutil.Process(process.pid).children()[1].pid, signal.SIGKILL)
            killed = True
        time.sleep(0.01)
    for each in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
        each.kill()
    assert killed
    return Finished(command, process.wait(), log.read_text(), "")


def test_on_other_ranks_and_after_a_kill_it_goes_on_as_one_run(tmp_path: pathlib.Path) -> None:
    whole = run_program([sys.executable, str(SCRIPT), "--steps", str(STEPS), "--checkpoint", str(tmp_path / "whole")])
    want = losses(whole.check().stdout)
    path = tmp_path / "checkpoint"
    first = torchrun(SCRIPT, "--steps", 5, "--stage", 3, "--checkpoint", path, "--save-every", 3, world=3).check()
    rest = ["--steps", str(STEPS), "--stage", "1", "--checkpoint", str(path), "--save-every", "3"]
    second = restarted(rest, tmp_path / "log", kill_after=7).check()
    assert list(losses(first.stdout)) == [1, 2, 3, 4, 5]
    assert "step 5 " not in second.stdout
    got = losses(first.stdout) | losses(second.stdout)
    assert got == {step: pytest.approx(loss, abs=3e-6) for step, loss in want.items()}
    assert not list(tmp_path.glob(".*"))
