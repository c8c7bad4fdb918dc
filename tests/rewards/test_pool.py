"""Worker processes that hang, die and lie: each contained, every job accounted for."""

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from jaxrl_llm.rewards.pool import Job, WorkerPool
from jaxrl_llm.types import UserError

FUNCTIONS = {name: f"reward_functions:{name}" for name in ("double", "misbehave", "pid", "spins", "waits")}


def pool(workers=2, timeout_s=20.0, retries=0, memory_mb=512, functions=FUNCTIONS):
    return closing(WorkerPool(functions, workers=workers, timeout_s=timeout_s, retries=retries, memory_mb=memory_mb))


def misbehaves(how, **arguments):
    return Job("misbehave", {"how": how} | arguments)


def test_results_keep_their_order_and_pass_through_unchanged():
    with pool() as workers:
        outcomes = workers.run([Job("double", {"number": n / 7}) for n in range(200)])
        assert [o.value for o in outcomes] == [2 * (n / 7) for n in range(200)]
        assert workers.run([]) == []


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("exit", "its process died"),
        ("killed", "its process died"),
        ("segfault", "its process died"),
        ("close", "its process died"),
        ("raise", r"it raised ValueError: half a pair \ud800 and " + "\0"),
        ("nan", "it returned nan"),
        ("inf", "it returned -inf"),
        ("text", "it raised ValueError: could not convert string to float: 'no number'"),
        ("huge", "it raised OverflowError: int too large to convert to float"),
        ("memory", "it ran out of memory"),
        ("recursion", "it raised RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_what_goes_wrong_is_failed_with_its_reason_and_the_neighbours_are_unaffected(how, reason, workers):
    jobs = [misbehaves("ok", number=1.0), misbehaves(how), misbehaves("ok", number=2.0)] * 2
    outcomes = workers.run(jobs)
    assert [o.value for o in outcomes if o.failed is None] == [1.0, 2.0] * 2
    assert {o.failed[: len(reason)] for o in (outcomes[1], outcomes[4])} == {reason}
    assert math.isnan(outcomes[1].value)


@pytest.fixture(scope="module")
def workers():
    with pool() as made:
        yield made


def test_garbage_in_a_workers_sockets_is_a_death_and_no_value(workers):
    assert workers.run([misbehaves("flood")] * 2 + [Job("double", {"number": 4})])[2].value == 8.0


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_a_hanging_worker_is_killed_in_time_and_the_next_job_gets_a_new_one(how):
    with pool(workers=1, timeout_s=0.5) as workers:
        workers.start()
        before = workers.run([Job("pid", {})])[0].value
        hung, fine = workers.run([misbehaves(how), Job("pid", {})])
        assert (hung.failed, fine.failed) == ("it took more than 0.5 s", None)
        assert fine.value != before
        assert not Path(f"/proc/{before:.0f}").exists()


def test_time_outs_and_deaths_are_tried_again_as_often_as_allowed():
    with pool(timeout_s=0.3, retries=2) as workers:
        workers.start()
        started = time.monotonic()
        outcomes = workers.run([misbehaves("sleep"), misbehaves("exit"), misbehaves("nan")])
        assert [o.failed for o in outcomes] == ["it took more than 0.3 s", "its process died", "it returned nan"]
        assert time.monotonic() - started > 3 * 0.3


def test_a_job_that_dies_once_has_its_value(tmp_path):
    (tmp_path / "dies_once.py").write_text(
        "import os\ndef score(flag):\n    if not os.path.exists(flag):\n        open(flag, 'w').close()\n"
        "        os._exit(1)\n    return 7\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with pool(retries=1, functions={"once": "dies_once:score"}) as workers:
            assert workers.run([Job("once", {"flag": str(tmp_path / "flag")})])[0].value == 7.0
    finally:
        sys.path.remove(str(tmp_path))


def test_jobs_of_several_callers_share_the_processes_and_each_gets_its_own():
    with pool(workers=3) as workers:
        got = {}

        def call(caller):
            got[caller] = [o.value for o in workers.run([Job("double", {"number": caller + n}) for n in range(50)])]

        threads = [threading.Thread(target=call, args=(1000 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {1000 * c: [2.0 * (1000 * c + n) for n in range(50)] for c in range(4)}


def test_waiting_scales_with_the_processes():
    def seconds(count):
        with pool(workers=count) as workers:
            workers.run([Job("double", {"number": 1})] * count)
            started = time.monotonic()
            workers.run([Job("waits", {"seconds": 0.1})] * 16)
            return time.monotonic() - started

    alone = seconds(1)
    assert alone >= 1.6
    assert seconds(8) < alone / 2


def test_what_cannot_be_imported_is_said_at_the_start():
    for path, message in (
        ("nowhere_at_all:f", "nowhere_at_all:f: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("reward_functions:missing", "reward_functions:missing: AttributeError"),
        ("reward_functions:os", "reward_functions:os is not a function"),
    ):
        with pool(functions={"f": path}) as workers, pytest.raises(UserError, match=message):
            workers.start()


def test_a_pool_that_is_closed_says_so_and_leaves_no_process():
    with pool() as workers:
        pids = {workers.run([Job("pid", {})])[0].value for _ in range(4)}
    with pytest.raises(RuntimeError, match="closed"):
        workers.run([Job("pid", {})])
    assert not any(Path(f"/proc/{pid:.0f}").exists() for pid in pids)


def test_closing_waits_for_no_more_than_what_is_under_way():
    workers = WorkerPool(FUNCTIONS, workers=1, timeout_s=1.0, retries=5, memory_mb=512)
    workers.run([Job("pid", {})])
    errors = []

    def call():
        with pytest.raises(RuntimeError, match="closed"):
            workers.run([misbehaves("sleep")] * 20)
        errors.append(True)

    caller = threading.Thread(target=call)
    caller.start()
    while workers._jobs.qsize() != 19:
        time.sleep(0.01)
    workers.close()
    caller.join(timeout=30)
    assert errors == [True]


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_process_that_forks_may_die_and_takes_hanging_workers_with_it(tmp_path):
    started = tmp_path / "started"
    with pool(workers=1, timeout_s=120.0) as workers:
        outcomes = []
        hanging = threading.Thread(
            target=lambda: outcomes.extend(workers.run([Job("spins", {"started": str(started)})]))
        )
        hanging.start()
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        os.kill(parent_of(int(started.read_text())), signal.SIGKILL)
        hanging.join(timeout=60)
        assert [o.failed for o in outcomes] == ["its process died"]  # at once, not after its time-out
        assert workers.run([Job("double", {"number": 3})])[0].value == 6.0


def test_workers_end_with_a_parent_that_is_killed():
    code = (
        "from jaxrl_llm.rewards.pool import Job, WorkerPool\nimport os, signal\n"
        f"pool = WorkerPool({FUNCTIONS!r}, workers=1, timeout_s=9, retries=0, memory_mb=512)\n"
        "print(int(pool.run([Job('pid', {})])[0].value), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    worker = Path(f"/proc/{int(ran.stdout)}")
    until = time.monotonic() + 30
    while worker.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not worker.exists()


def mixture(count, seed):
    """Jobs of which 5 % hang or die, as many of each, and what each should come to."""
    rng = random.Random(seed)
    kinds = ["sleep", "spin", "exit", "killed"] * (count // 80) + ["ok"] * (count - 4 * (count // 80))
    rng.shuffle(kinds)
    reasons = {"sleep": "it took", "spin": "it took", "exit": "its process", "killed": "its process", "ok": None}
    return [misbehaves(kind, number=float(n)) for n, kind in enumerate(kinds)], [reasons[kind] for kind in kinds]


def account(outcomes, reasons):
    for number, (outcome, reason) in enumerate(zip(outcomes, reasons, strict=True)):
        if reason is None:
            assert (outcome.value, outcome.failed) == (float(number), None)
        else:
            assert outcome.failed.startswith(reason)
            assert math.isnan(outcome.value)
    return Counter(reasons)


def test_a_mixture_with_hangs_and_deaths_is_accounted_for():
    jobs, reasons = mixture(400, seed=0)
    with pool(workers=4, timeout_s=0.5) as workers:
        counts = account(workers.run(jobs), reasons)
    assert counts == {None: 380, "it took": 10, "its process": 10}


@pytest.mark.slow
def test_ten_thousand_rewards_of_which_five_percent_hang_or_die_take_their_time_outs_and_little_more():
    """A hang ends within its time-out + 10 %, and killing, replacing and queueing add at most 10 % to all calls."""
    jobs, reasons = mixture(10_000, seed=1)
    count, timeout_s = 4, 2.0
    with pool(workers=count, timeout_s=timeout_s) as workers:
        workers.start()
        started = time.monotonic()
        outcomes = workers.run(jobs)
        took = time.monotonic() - started
    counts = account(outcomes, reasons)
    assert counts == {None: 9500, "it took": 250, "its process": 250}
    hung = [o.seconds for o, reason in zip(outcomes, reasons, strict=True) if reason == "it took"]
    calls = sum(outcome.seconds for outcome in outcomes) / count
    print(
        f"\n{took:.1f} s for calls of {calls:.1f} s, time-outs {sum(hung) / count:.1f}; longest hang {max(hung):.3f} s"
    )
    assert timeout_s <= min(hung) <= max(hung) < 1.1 * timeout_s
    assert took < 1.1 * calls
