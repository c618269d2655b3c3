"""Ranks are killed, again and again, and nothing is lost: what is left on disk, and how a run goes on, is checked.

    python examples/benchmarks/soak.py saves --kills 50       # kill -9 at seeded moments of a save, on any rank
    python examples/benchmarks/soak.py restarts --every 60    # the main example under torchrun, a rank killed each minute

`saves`: after each kill the path must hold the old checkpoint or the new one, bit for bit, the other ranks must have ended by
themselves, and the next save must leave nothing behind of the one that was broken off. `restarts`: the run must end, with the
losses of one that nobody disturbed. Ends with one line of JSON, and exit status 1 if anything was not as it must be.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import zeroshard

EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "finetune_long_context.py"
PATIENCE_S = 60.0
Connection = multiprocessing.connection.Connection

# ------------------------------------------------------------------------------------------ kills while saving


@dataclasses.dataclass(frozen=True)
class Kill:
    """Of `victim`: before it touches its `event`-th file, or after this share of the time that a whole save takes."""

    victim: int
    event: int | None
    share: float
    first: bool  # of the path: there is no checkpoint yet
    blocking: bool

    @staticmethod
    def draw(seed: int, number: int, ranks: int) -> Kill:
        source = random.Random(f"{seed} {number}")
        victim = source.choice([0, source.randrange(ranks)])
        event = source.randrange(7 if victim == 0 else 1) if source.random() < 0.5 else None
        return Kill(victim, event, source.random(), source.random() < 0.25, source.random() < 0.6)


def die_at(event: int, checkpoint: pathlib.Path) -> None:
    """SIGKILL when this process is about to open for writing, make, rename or remove the `event`-th path of a checkpoint,
    in its folder or in a hidden one beside it."""
    left, starts = [event], (str(checkpoint), str(checkpoint.with_name(f".{checkpoint.name}")))

    def audit(name: str, args: tuple[Any, ...]) -> None:
        writes = name == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        touches = writes or name in ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
        if touches and any(os.fsdecode(arg).startswith(starts) for arg in args if isinstance(arg, (str, bytes, os.PathLike))):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def build(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeroshard.shard(model, optimizer, stage=stage)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        rows = torch.randn(4, 256, generator=torch.Generator().manual_seed(step))
        (model(rows) - rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_twice(rank: int, ranks: int, folder: str, kill: Kill, parent: Connection) -> None:
    """An old checkpoint, then a new one during which one rank dies; both once more beside it, for comparison."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    timeout = datetime.timedelta(seconds=PATIENCE_S / 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    model, optimizer = build(stage=3)
    path = f"{folder}/checkpoint"
    for extra, steps in (("old", range(2)), ("new", range(2, 4))):
        train(model, optimizer, steps)
        zeroshard.save(f"{folder}/{extra}", model, optimizer)
        if extra == "old" and not kill.first:
            zeroshard.save(path, model, optimizer, extra=extra)
    if rank == kill.victim and kill.event is not None:
        die_at(kill.event, pathlib.Path(path))
    dist.barrier()
    parent.send("saving")
    try:
        saving = zeroshard.save(path, model, optimizer, extra="new", blocking=kill.blocking)
        if saving is not None:
            saving.wait()
        parent.send("saved")
    except zeroshard.ShardError as error:
        parent.send(str(error))
    parent.recv()  # the victim is there to be killed until the parent is done with it
    os._exit(0)  # a process group that has lost a rank cannot be closed


def check(folder: str, parent: Connection) -> None:
    """Alone, at another stage: what is in the path, and whether the next save clears what was left."""
    torch.set_num_threads(1)
    path, parts = pathlib.Path(folder, "checkpoint"), []
    for place in (path, None):
        model, optimizer = build(stage=1)
        extra = "nothing" if place is None or not place.exists() else zeroshard.load(place, model, optimizer)
        if place is None and parts[0][0] != "nothing":
            zeroshard.load(f"{folder}/{parts[0][0]}", model, optimizer)
        state = [optimizer.state[param][key] for param in model.parameters() for key in sorted(optimizer.state[param])]
        parts.append((extra, [*zeroshard.full_state_dict(model).values(), *state]))
    (found, got), (_, want) = parts
    same = len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    zeroshard.save(path, model, optimizer)
    left = sorted(str(each.relative_to(folder)) for each in pathlib.Path(folder).glob(".checkpoint*"))
    names = sorted(each.name for each in path.rglob("*") if each.is_file())
    clean = not left and names == [".metadata", "__0_0.distcp"]
    parent.send((found, "" if same and clean else f"{found}: same bits {same}, files {names}, beside it {left}"))


def start(context: Any, target: Any, *arguments: Any) -> tuple[Any, Connection]:
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there))
    process.start()
    there.close()
    return process, here


def told(connection: Connection) -> Any:
    """What a process says within the time; `None` when it has died or says nothing."""
    try:
        return connection.recv() if connection.poll(PATIENCE_S) else None
    except (EOFError, ConnectionResetError):
        return None


def one_kill(context: Any, ranks: int, kill: Kill, whole_s: float) -> tuple[str, str, float]:
    """(what is in the path, what is wrong, seconds of the save). Of a kill that came too late: "too late"."""
    with tempfile.TemporaryDirectory() as folder:
        started = [start(context, save_twice, rank, ranks, folder, kill) for rank in range(ranks)]
        victim, line = started[kill.victim]
        wrong, begin, ended = "", 0.0, None
        if told(line) == "saving":
            begin = time.monotonic()
            if kill.event is None and whole_s:
                time.sleep(kill.share * whole_s)
                ended = line.recv() if line.poll(0) else None
                os.kill(victim.pid, signal.SIGKILL)
            ended = ended or told(line)
        seconds = time.monotonic() - begin
        survivors = [each for rank, (_, each) in enumerate(started) if rank != kill.victim]
        for process in survivors:
            answers = [told(process), told(process)]
            if None in answers:
                wrong = f"a survivor did not end by itself: {answers}"
        for process, _ in started:
            process.kill()
            process.join()
        if ended is not None:
            return "too late", wrong, seconds
        checker, line = start(context, check, folder)
        found, problem = told(line) or ("", "what is there cannot be loaded")
        checker.kill()
        checker.join()
    return found, wrong or problem, seconds


def saves(args: argparse.Namespace) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "psutil", "zeroshard"])
    whole_s = one_kill(context, args.ranks, Kill(0, None, 0.0, False, True), 0.0)[2]
    found: collections.Counter[str] = collections.Counter()
    problems, number = [], 0
    while found.total() - found["too late"] < args.kills:
        kill = Kill.draw(args.seed, number, args.ranks)
        there, problem, _ = one_kill(context, args.ranks, kill, whole_s)
        found[there] += 1
        number += 1
        if problem:
            problems.append(f"{kill}: {problem}")
            print(problems[-1], file=sys.stderr, flush=True)
    late = found.pop("too late", 0)
    print(json.dumps({"kills": found.total(), "found": dict(found), "too_late": late, "problems": problems}))
    return 1 if problems else 0


# ------------------------------------------------------------------------------------------ restarts


def launch(args: argparse.Namespace, output: pathlib.Path, log: Any) -> subprocess.Popen[bytes]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    torchrun += ["--max-restarts=1000", "--monitor-interval=0.5"]
    example = [str(EXAMPLE), "--output", str(output), "--auto-resume", *args.example]
    return subprocess.Popen([sys.executable, *torchrun, *example], stdout=log, stderr=log)


def entries(output: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [entry for entry in found if entry["kind"] == kind]


def last_step(output: pathlib.Path) -> int:
    return max((entry["step"] for entry in entries(output, "train")), default=0)


def inode(output: pathlib.Path) -> int | None:
    """Of metrics.jsonl, which a run that starts or goes on writes anew."""
    path = output / "metrics.jsonl"
    return path.stat().st_ino if path.exists() else None


@dataclasses.dataclass
class Damage:
    """What was done to a run. Steps lost are those done twice. killed: (inode, last step) then, until it has gone on."""

    kills: int = 0
    lost: int = 0
    killed: tuple[int | None, int] | None = None

    def kill(self, job: psutil.Process, output: pathlib.Path, source: random.Random) -> None:
        ranks = [each for each in job.children() if EXAMPLE.name in " ".join(each.cmdline())]
        if ranks:
            self.killed = (inode(output), last_step(output))
            source.choice(ranks).kill()
            self.kills += 1

    def look(self, output: pathlib.Path) -> None:
        if self.killed is not None and inode(output) != self.killed[0]:
            time.sleep(1)  # its first line says where it goes on
            self.lost += self.killed[1] - entries(output, "run")[-1]["step"]
            self.killed = None


def disturbed(args: argparse.Namespace, output: pathlib.Path, log: Any) -> tuple[int, Damage]:
    """Runs the example; in each period one rank is killed at a random moment, unless it has not gone on from the last."""
    source, damage = random.Random(args.seed), Damage()
    process = launch(args, output, log)
    job, begin, period = psutil.Process(process.pid), time.monotonic(), 0
    due = source.random() * args.every
    while process.poll() is None:
        time.sleep(0.1)
        damage.look(output)
        if time.monotonic() - begin >= due and damage.killed is None:
            damage.kill(job, output, source)
            period = max(period + 1, int((time.monotonic() - begin) // args.every))
            due = (period + source.random()) * args.every
    return process.wait(), damage


def restarts(args: argparse.Namespace) -> int:
    args.folder.mkdir(parents=True, exist_ok=True)
    outputs = [args.folder / name for name in ("undisturbed", "disturbed")]
    for output in outputs:
        shutil.rmtree(output, ignore_errors=True)
    with open(args.folder / "log.txt", "wb") as log:
        status = launch(args, outputs[0], log).wait()
        whole = time.monotonic()
        status, damage = (status, Damage()) if status else disturbed(args, outputs[1], log)
        seconds = time.monotonic() - whole
    runs = [{entry["step"]: entry["loss"] for entry in entries(output, "train")} for output in outputs]
    same = status == 0 and runs[0] == runs[1]
    print(
        json.dumps(
            {
                "kills": damage.kills, "steps": len(runs[0]), "steps_lost": damage.lost, "seconds": round(seconds),
                "final_loss": [run.get(len(runs[0])) for run in runs], "all_losses_equal": same, "status": status,
            }
        )
    )  # fmt: skip
    return 0 if same else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    whole = functools.partial(commands.add_parser, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    one = whole("saves", help="kill ranks while they save")
    one.add_argument("--kills", type=int, default=50)
    one.add_argument("--ranks", type=int, default=3)
    one.set_defaults(call=saves)
    two = whole("restarts", help="kill ranks of the main example while it trains")
    two.add_argument("--every", type=float, default=60.0, help="seconds in which one rank is killed once")
    two.add_argument("--ranks", type=int, default=2)
    two.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/soak"))
    two.add_argument("example", nargs="*", help="options of the example, behind --")
    two.set_defaults(call=restarts)
    for each in (one, two):
        each.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return int(args.call(args))


if __name__ == "__main__":
    sys.exit(main())
