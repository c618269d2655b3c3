"""Ranks for tests: processes that stay alive between tests, with hard timeouts and every rank's traceback.

    def halves(rank, world, x):                       # top level, so that it can be pickled
        return x.chunk(world)[rank]

    def test_halves(ranks):                           # fixture of conftest.py
        first, second = ranks(2).run(halves, torch.arange(4))

A pool of ranks is one process per rank, started from a server process that has imported torch and computed nothing,
so a new pool is cheap and no test sees threads or random state of another. Each run has its own default process
group (gloo), seed 0 and one thread per rank. What a rank prints goes to its log and is shown when something fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy
import psutil
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

TIMEOUT = 60.0  # seconds for one run, unless the test says otherwise
GRACE = 5.0  # seconds the other ranks get once one has failed: enough to fail by themselves and say why
LOG_TAIL = 4000  # characters of a rank's output shown with a failure
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

# Imported once by the server process that ranks are forked from; torch.optim imports dynamo at its first step.
PRELOAD = ["torch", "torch.distributed", "torch.distributed.checkpoint", "torch._dynamo", "numpy", "psutil"]


# ------------------------------------------------------------------------------------------------- failures


@dataclasses.dataclass(frozen=True)
class Report:
    """How one rank ended: `kind` is "returned", "raised", "died" or "hung"; `error` the exception's class name."""

    rank: int
    kind: str
    error: str = ""
    message: str = ""
    details: str = ""  # traceback of a rank that raised, stacks of all threads of one that hung

    def __str__(self) -> str:
        title = f" rank {self.rank} {self.kind}{': ' + self.error if self.error else ''} "
        return f"{title:-^100}\n{self.details.rstrip()}"


class RanksFailed(AssertionError):
    """A run in which not every rank returned. `reports` holds one `Report` per rank, in rank order."""

    def __init__(self, name: str, reports: Sequence[Report]):
        self.reports = list(reports)
        bad = [report for report in reports if report.kind != "returned"]
        summary = ", ".join(f"rank {r.rank} {r.kind}" + (f" {r.error}" if r.error else "") for r in bad)
        super().__init__("\n".join([f"{name}: {summary}", *map(str, bad)]))


# ------------------------------------------------------------------------------------------------- one rank


@dataclasses.dataclass(frozen=True)
class _Request:
    call: bytes  # pickled (fn, args, kwargs): unpickled inside the guarded part, an import error is a report
    store: str  # a new file for every run: a new default process group
    group_timeout: float


def _serve(rank: int, world: int, folder: str, pipe: multiprocessing.connection.Connection) -> None:
    """The life of a rank: answers each request with a pickled `Report` and the function's result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group; the pool decides
    threading.Thread(target=_leave_with_parent, args=(folder,), daemon=True).start()
    log = open(pathlib.Path(folder, f"rank{rank}.log"), "w", buffering=1)  # noqa: SIM115 (kept for the life of the rank)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    stacks = open(pathlib.Path(folder, f"rank{rank}.stacks"), "w")  # noqa: SIM115
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # works while the GIL is held
    os.environ.update(rank_environment())
    torch.set_num_threads(1)
    gc.freeze()
    while (request := _receive(pipe)) is not None:
        pipe.send_bytes(_answer(rank, world, request))
        gc.collect()
    os._exit(0)  # no interpreter shutdown: gloo's worker threads may abort during it


def _leave_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _receive(pipe: multiprocessing.connection.Connection) -> _Request | None:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:  # the pool closed its end
        return None


def _answer(rank: int, world: int, request: _Request) -> bytes:
    environment = dict(os.environ)
    try:
        _fresh_state(rank, world, request)
        fn, args, kwargs = pickle.loads(request.call)
        return pickle.dumps((Report(rank, "returned"), fn(rank, world, *args, **kwargs)))
    except BaseException as error:
        report = Report(rank, "raised", type(error).__name__, str(error), traceback.format_exc())
        return pickle.dumps((report, None))
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _fresh_state(rank: int, world: int, request: _Request) -> None:
    if dist.is_initialized():  # left from the run before, when every rank had answered: nobody still reads from it
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{request.store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=request.group_timeout),
    )
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


# ------------------------------------------------------------------------------------------------- all ranks


class Pool:
    """`world` living ranks. Good for many runs until one of them is not clean; then `close` it and make another."""

    def __init__(self, world: int):
        self.world = world
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="ranks-"))
        self._runs = 0
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, str(self._folder), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, call: bytes, name: str, timeout: float, group_timeout: float) -> list[Any]:
        __tracebackhide__ = True
        self._runs += 1
        request = _Request(call, str(self._folder / f"store{self._runs}"), group_timeout)
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reported as died below
                pipe.send_bytes(pickle.dumps(request))
        answers = self._collect(time.monotonic() + timeout)
        missing = [rank for rank in range(self.world) if rank not in answers]
        answers |= {rank: (report, None) for rank, report in self._hung(missing).items()}
        reports, results = zip(*(answers[rank] for rank in range(self.world)), strict=True)
        if any(report.kind != "returned" for report in reports):
            raise RanksFailed(name, [self._with_log(report) for report in reports])
        return list(results)

    def _collect(self, deadline: float) -> dict[int, tuple[Report, Any]]:
        """Answers by rank, until all are there or the deadline, which a failure moves closer, has passed."""
        answers: dict[int, tuple[Report, Any]] = {}
        while len(answers) < self.world and (left := deadline - time.monotonic()) > 0:
            waiting = [rank for rank in range(self.world) if rank not in answers]
            watched = [self._pipes[r] for r in waiting] + [self._processes[r].sentinel for r in waiting]
            ready = multiprocessing.connection.wait(watched, left)
            for rank in waiting:
                if self._pipes[rank] not in ready and self._processes[rank].sentinel not in ready:
                    continue
                answers[rank] = self._answer_of(rank)
                if answers[rank][0].kind != "returned":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _answer_of(self, rank: int) -> tuple[Report, Any]:
        try:
            if self._pipes[rank].poll():
                return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            pass
        self._processes[rank].join()
        code = self._processes[rank].exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        return Report(rank, "died", message=how, details=f"the process ended {how}"), None

    def _hung(self, missing: list[int]) -> dict[int, Report]:
        for rank in missing:
            os.kill(self.pids[rank], signal.SIGUSR1)
        files = {rank: self._folder / f"rank{rank}.stacks" for rank in missing}
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not all(file.stat().st_size for file in files.values()):
            time.sleep(0.02)
        time.sleep(0.1 if missing else 0)  # a dump that has begun is complete well within this
        return {rank: Report(rank, "hung", details=file.read_text(errors="replace")) for rank, file in files.items()}

    def _with_log(self, report: Report) -> Report:
        log = (self._folder / f"rank{report.rank}.log").read_text(errors="replace")[-LOG_TAIL:]
        return dataclasses.replace(report, details=f"{report.details}\n[its output]\n{log}") if log else report

    def close(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()  # idle or hung, never asked to shut down: see the note at `os._exit`
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Ranks:
    """The ranks of one world size for a whole test session; replaces its pool whenever it may not be clean."""

    def __init__(self, world: int):
        self.world = world
        self._pool: Pool | None = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = TIMEOUT,
        group_timeout: float | None = None,
        dirty: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `fn(rank, world, *args, **kwargs)` on every rank and returns the results in rank order.

        `fn` is a top-level function; arguments and results are pickled (tensors travel by value). Raises `RanksFailed`
        with every rank's traceback when a rank raises or dies, or when one has not answered after `timeout` seconds.
        `group_timeout`: timeout in seconds of the run's process group, otherwise longer than the run itself, so that
        a hang shows where each rank stands. `dirty=True`: the ranks are not used again (they diverged on purpose,
        left a collective unfinished, changed the process for good).
        """
        __tracebackhide__ = True
        call = pickle.dumps((fn, args, kwargs))
        self._pool = self._pool or Pool(self.world)
        clean = False
        try:
            results = self._pool.run(call, fn.__qualname__, timeout, group_timeout or 2 * timeout)
            clean = not dirty
            return results
        finally:
            if not clean:
                self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the living ranks; empty before the first run and after one that was not clean."""
        return self._pool.pids if self._pool else []

    def close(self) -> None:
        if self._pool:
            self._pool.close()
        self._pool = None


class RankPools:
    """`pools(world)` -> the session's `Ranks` of that size."""

    def __init__(self) -> None:
        self._by_world: dict[int, Ranks] = {}

    def __call__(self, world: int) -> Ranks:
        return self._by_world.setdefault(world, Ranks(world))

    def close(self) -> None:
        for ranks in self._by_world.values():
            ranks.close()


# ------------------------------------------------------------------------------------------------- launchers


@dataclasses.dataclass(frozen=True)
class Finished:
    """A launched program: `returncode` is None when it was killed for running past its timeout."""

    command: list[str]
    returncode: int | None
    stdout: str
    stderr: str

    def check(self) -> Finished:
        assert self.returncode == 0, f"{self}"
        return self

    def __str__(self) -> str:
        how = "ran past its timeout" if self.returncode is None else f"exit status {self.returncode}"
        return f"{' '.join(self.command)}: {how}\n[stdout]\n{self.stdout[-8000:]}\n[stderr]\n{self.stderr[-8000:]}"


def rank_environment() -> dict[str, str]:
    """What every rank of a test has in its environment."""
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONFAULTHANDLER": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(script: str | os.PathLike[str], *args: object, world: int = 2, **options: Any) -> Finished:
    """Runs `script` on `world` ranks with torch's launcher; options are those of `run_program`."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
    return run_program([sys.executable, *launcher, str(script), *map(str, args)], **options)


def accelerate_launch(
    script: str | os.PathLike[str],
    *args: object,
    config: str | os.PathLike[str],
    launcher_args: Sequence[str] = (),
    **options: Any,
) -> Finished:
    """Runs `script` as `accelerate launch --config_file config` does; options are those of `run_program`."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--main_process_port", str(free_port()), *launcher_args]
    return run_program([sys.executable, *launcher, str(script), *map(str, args)], **options)


def run_program(
    command: Sequence[str],
    *,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = REPOSITORY,
) -> Finished:
    """Runs a command to its end, in a clean environment plus `env`; past `timeout` seconds it and all that it started
    are killed, after Python processes among them have written their stacks to stderr."""
    launcher_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launcher_variables and not k.startswith("ACCELERATE_")}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), kept.get("PYTHONPATH")]))
    full_env = {**kept, "PYTHONPATH": path, **rank_environment(), **(env or {})}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:  # files: an orphan cannot block us
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=full_env,
            start_new_session=True,  # away from the terminal's Ctrl-C: ended by `_kill_tree`, with all it started
        )
        returncode: int | None = None
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_tree(process)
        stdout.seek(0)
        stderr.seek(0)
        text = [stream.read().decode(errors="replace") for stream in (stdout, stderr)]
    return Finished(list(command), returncode, *text)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Ends `process` and its descendants (launchers put ranks into sessions of their own, so by descent)."""
    if process.poll() is not None:
        return
    tree = psutil.Process(process.pid).children(recursive=True)
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGABRT)  # faulthandler writes the stacks of all threads
    psutil.wait_procs(tree, timeout=3)
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    process.wait()


# ------------------------------------------------------------------------------------------------- comparisons


def assert_equal(got: Any, want: Any, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Same names, and for each the same shape, dtype and values (or both None); NaN equals NaN.

    Takes mappings, sequences, tensors and numbers, nested. Fails naming what differs and by how much: at most
    `atol + rtol * max|want|` is allowed, and with the default the values must be the same bits.
    """
    __tracebackhide__ = True
    differences = list(_differences(got, want, atol, rtol, ""))
    if differences:
        more = f"\n... and {len(differences) - 10} more" if len(differences) > 10 else ""
        raise AssertionError("\n".join(differences[:10]) + more)


def _differences(got: Any, want: Any, atol: float, rtol: float, name: str) -> Iterator[str]:
    label = name or "value"
    if isinstance(want, Mapping) and isinstance(got, Mapping):
        for key in [k for k in want if k not in got]:
            yield f"{name}{key}: missing"
        for key in [k for k in got if k not in want]:
            yield f"{name}{key}: unexpected"
        for key in [k for k in want if k in got]:
            yield from _differences(got[key], want[key], atol, rtol, f"{name}{key}.")
    elif isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        if len(got) != len(want):
            yield f"{label}: {len(got)} items, expected {len(want)}"
        for index, (g, w) in enumerate(zip(got, want, strict=False)):
            yield from _differences(g, w, atol, rtol, f"{name}{index}.")
    elif isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        yield from _tensor_difference(got.detach(), want.detach(), atol, rtol, label.rstrip("."))
    elif isinstance(want, float) and isinstance(got, float):
        pair = (torch.tensor(value, dtype=torch.float64) for value in (got, want))
        yield from _tensor_difference(*pair, atol, rtol, label.rstrip("."))
    elif type(got) is not type(want) or got != want:
        yield f"{label.rstrip('.')}: {got!r}, expected {want!r}"


def _tensor_difference(got: torch.Tensor, want: torch.Tensor, atol: float, rtol: float, name: str) -> Iterator[str]:
    if got.shape != want.shape or got.dtype != want.dtype:
        yield f"{name}: {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"
        return
    if not want.is_floating_point():
        if not torch.equal(got, want):
            yield f"{name}: {int((got != want).sum())} of {want.numel()} values differ"
        return
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    error = torch.where(same, 0.0, (got - want).abs()).nan_to_num(nan=torch.inf)
    finite = want[want.isfinite()]
    allowed = atol + rtol * (finite.abs().max().item() if finite.numel() else 0.0)
    if error.numel() and (worst := error.max().item()) > allowed:
        at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        where = f"at {at}: {got[at].item():.9g}, expected {want[at].item():.9g}"
        yield f"{name}: differs by {worst:.3e} (allowed {allowed:.1e}) {where}, {int((error > allowed).sum())} values"


# ------------------------------------------------------------------------------------------------- counting


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a collective on this rank, e.g. `Call("_allgather_base_", sent_bytes=8, received_bytes=16)`."""

    name: str
    sent_bytes: int  # of the tensors this rank gives
    received_bytes: int  # of the tensors this rank is given; in-place collectives count in both


class Collectives(TorchDispatchMode):
    """Records `torch.distributed` calls made by this thread, those of backward included (on CPU it runs here).

    with Collectives() as seen:
        loss.backward()
    assert seen.count("allreduce_") == 1
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls.append(_recorded(func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    def count(self, *names: str) -> int:
        """Calls with one of these names (as in `names`); without names, all of them."""
        return sum(not names or call.name in names for call in self.calls)

    def sent_bytes(self, *names: str) -> int:
        return sum(call.sent_bytes for call in self.calls if not names or call.name in names)

    def received_bytes(self, *names: str) -> int:
        return sum(call.received_bytes for call in self.calls if not names or call.name in names)


def _recorded(func: Any, args: Sequence[Any]) -> Call:
    name = func._schema.name.split("::")[1]
    sent = received = 0
    for argument, value in zip(func._schema.arguments, args, strict=False):
        size = sum(t.numel() * t.element_size() for t in _tensors(value))
        if not argument.name.startswith("output") and not name.startswith("recv"):
            sent += size
        if not argument.name.startswith("input") and name != "send":
            received += size
    return Call(name, sent, received)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
