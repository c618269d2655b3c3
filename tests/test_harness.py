"""The harness itself: every way a rank can fail is reported, within the timeout, for all ranks."""

import os
import random
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness import Collectives, RankPools, RanksFailed, accelerate_launch, assert_equal, run_program, torchrun


def whoami(rank, world, offset, factor=1):
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return (rank * factor + offset, world, total.item(), os.getpid())


def everyone_raises(rank, world):
    print(f"a print of rank {rank}")
    raise ValueError(f"reason {rank}")


def last_raises(rank, world):
    if rank == world - 1:
        raise KeyError("the last one")
    dist.barrier()


def last_sleeps(rank, world):
    if rank == world - 1:
        time.sleep(300)
    dist.barrier()


def last_dies(rank, world):
    if rank == world - 1:
        os._exit(7)


def random_numbers(rank, world):
    return torch.rand(2), random.random(), torch.get_num_threads()


def leaves_a_mess(rank, world):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    dist.new_group([0])


def looks_around(rank, world):
    return torch.get_default_dtype(), torch.is_grad_enabled(), os.environ.get("LEFT_BEHIND")


def waits_for_nobody(rank, world):
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|Timeout"):
            dist.recv(torch.zeros(1), src=1)
    return "survived"


def returns_a_lambda(rank, world):
    return lambda: None


def test_results_come_in_rank_order_and_ranks_are_reused(ranks):
    first = ranks(2).run(whoami, 10, factor=2)
    second = ranks(2).run(whoami, 0)
    assert [answer[:3] for answer in first] == [(10, 2, 3), (12, 2, 3)]
    assert [answer[3] for answer in first] == [answer[3] for answer in second] == ranks(2).pids
    assert [answer[:3] for answer in ranks(3).run(whoami, 0)] == [(0, 3, 6), (1, 3, 6), (2, 3, 6)]


def test_every_traceback_is_shown_and_the_pool_is_replaced(ranks):
    before = ranks(2).run(whoami, 0)
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(everyone_raises)
    text = str(caught.value)
    for rank in range(2):
        assert f"ValueError: reason {rank}" in text
        assert f"a print of rank {rank}" in text
    assert text.count('raise ValueError(f"reason {rank}")') == 2
    assert [(r.kind, r.error, r.message) for r in caught.value.reports] == [
        ("raised", "ValueError", "reason 0"),
        ("raised", "ValueError", "reason 1"),
    ]
    after = ranks(2).run(whoami, 0)
    assert {answer[3] for answer in before}.isdisjoint(answer[3] for answer in after)


def test_a_rank_that_waits_for_one_that_raised_is_shown_too(ranks):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(last_raises)
    assert time.monotonic() - start < 30
    assert "in last_raises" in caught.value.reports[0].details  # where it hung or what it raised
    assert caught.value.reports[0].kind in ("hung", "raised")
    assert caught.value.reports[1].error == "KeyError"


def test_a_hang_is_reported_with_the_stacks_of_all_ranks(ranks):
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 hung, rank 1 hung") as caught:
        ranks(2).run(last_sleeps, timeout=3)
    assert time.monotonic() - start < 20
    for report in caught.value.reports:
        assert "in last_sleeps" in report.details
    assert "in barrier" in caught.value.reports[0].details
    assert ranks(2).pids == []


def test_a_rank_that_dies_is_reported(ranks):
    with pytest.raises(RanksFailed, match="exit status 7") as caught:
        ranks(2).run(last_dies)
    assert [report.kind for report in caught.value.reports] == ["returned", "died"]


def test_what_cannot_travel_is_an_error_of_the_rank(ranks):
    with pytest.raises(RanksFailed, match="returns_a_lambda"):
        ranks(2).run(returns_a_lambda)


def test_every_run_starts_alike(ranks):
    first, second = ranks(2).run(random_numbers)
    assert first[2] == 1
    assert_equal(first, second)
    ranks(2).run(leaves_a_mess)
    assert ranks(2).run(looks_around) == [(torch.float32, True, None)] * 2
    assert_equal(ranks(2).run(random_numbers), [first, second])


def test_a_short_group_timeout_is_for_one_run(ranks):
    assert ranks(2).run(waits_for_nobody, group_timeout=1) == ["survived"] * 2
    assert [answer[2] for answer in ranks(2).run(whoami, 0)] == [3, 3]


def test_a_dirty_run_and_closing_leave_no_process(ranks):
    dirty = [answer[3] for answer in ranks(2).run(whoami, 0, dirty=True)]
    assert ranks(2).pids == []
    pools = RankPools()
    pools(2).run(whoami, 0)
    closed = pools(2).pids
    pools.close()
    assert not any(psutil.pid_exists(pid) for pid in dirty + closed)


def test_ranks_end_with_the_process_that_started_them(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import os\n"
        "from tests.harness import RankPools\n"
        "from tests.test_harness import whoami\n"
        "if __name__ == '__main__':\n"
        "    pools = RankPools()\n"
        "    pools(2).run(whoami, 0)\n"
        "    print(*pools(2).pids, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = run_program([sys.executable, str(script)])
    assert done.returncode == -9, done
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if sys.argv[1] == "hang":
    time.sleep(300)
print(f"total {total.item():.0f}", flush=True)
dist.destroy_process_group()
sys.exit(3 if sys.argv[1] == "fail" else 0)
"""


def test_launchers_return_status_and_output(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = torchrun(script, "pass").check()
    assert done.stdout.count("total 2") == 2
    config = tmp_path / "two.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n")
    failed = accelerate_launch(script, "fail", config=config)
    assert failed.returncode not in (0, None)
    with pytest.raises(AssertionError, match=r"script\.py fail"):
        failed.check()


def test_a_launched_hang_is_killed_with_its_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = time.monotonic()
    done = torchrun(script, "hang", timeout=10)
    assert time.monotonic() - start < 40
    assert done.returncode is None
    assert "script.py" in done.stderr and "most recent call first" in done.stderr  # each rank's stack
    left = [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])]
    assert left == []


def test_differences_are_named():
    want = {"w": torch.zeros(2, 3), "b": torch.ones(1), "none": None, "list": [1.0, 2]}
    got = {"w": torch.zeros(2, 3), "b": torch.ones(1), "none": None, "list": [1.0, 2]}
    assert_equal(got, want)
    got["w"] = got["w"].index_put((torch.tensor([1]), torch.tensor([2])), torch.tensor(0.25))
    with pytest.raises(AssertionError, match=r"w: differs by 2\.500e-01 .* at \(1, 2\): 0\.25, expected 0"):
        assert_equal(got, want)
    assert_equal(got, want, atol=0.25)
    for wrong, message in [
        ({"b": torch.ones(1)}, "w: missing"),
        ({"w": torch.zeros(3, 2)}, r"w: \(3, 2\) torch.float32, expected \(2, 3\)"),
        ({"w": torch.zeros(2, 3).double()}, "float64"),
        ({"w": torch.full((2, 3), torch.nan)}, "w: differs by inf"),
        ({"w": None}, "w: None"),
        ({"list": [1.5, 2]}, "list.0: differs"),
    ]:
        with pytest.raises(AssertionError, match=message):
            assert_equal(wrong if message == "w: missing" else want | wrong, want)


def counts_collectives(rank, world):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(grad)
            return grad

    x = torch.ones(4, requires_grad=True)
    with Collectives() as seen:
        loss = Doubled.apply(x).sum()
        dist.all_gather_into_tensor(torch.empty(2 * world), torch.ones(2))
        loss.backward()
        for op in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(3), (rank + 1) % world),
                dist.P2POp(dist.irecv, torch.ones(3), (rank - 1) % world),
            ]
        ):
            op.wait()
    return [(call.name, call.sent_bytes, call.received_bytes) for call in seen.calls]


def test_collectives_are_counted_in_backward_too(ranks):
    want = [("_allgather_base_", 8, 16), ("allreduce_", 16, 16), ("send", 12, 0), ("recv_", 0, 12)]
    assert ranks(2).run(counts_collectives) == [want, want]


def test_pytest_that_is_interrupted_leaves_no_rank(tmp_path):
    test = tmp_path / "test_interrupted.py"
    test.write_text(
        "import os, signal\n"
        "from tests.harness import RankPools\n"
        "from tests.test_harness import last_sleeps, whoami\n"
        "def test_it():\n"
        "    pools = RankPools()\n"
        "    pools(2).run(whoami, 0)\n"
        "    print('ranks', *pools(2).pids, flush=True)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 2)\n"
        "    signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "    pools(2).run(last_sleeps)\n"
    )
    pytest_command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    done = run_program([*pytest_command, str(test)])
    assert "KeyboardInterrupt" in done.stdout, done
    printed = next(line for line in done.stdout.splitlines() if "ranks " in line)
    pids = [int(pid) for pid in printed.split("ranks ")[1].split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
