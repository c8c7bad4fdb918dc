import json

import pytest

from jaxrl_llm.sandbox import run as run_module
from jaxrl_llm.sandbox import service as module
from jaxrl_llm.sandbox.examiner import Examiner, check_tests
from jaxrl_llm.sandbox.jail import Jail
from jaxrl_llm.sandbox.languages import LANGUAGES, Language, job
from jaxrl_llm.sandbox.limits import Limits
from jaxrl_llm.sandbox.pool import SandboxPool
from jaxrl_llm.sandbox.run import JailError
from jaxrl_llm.types import UserError

TESTS = json.dumps({"entry_point": "f", "check": "assert f(2) == 4"})


def test_verdicts_come_in_the_order_of_the_programs_and_equal_ones_run_once(monkeypatch):
    ran = []
    submit = SandboxPool.submit
    monkeypatch.setattr(SandboxPool, "submit", lambda pool, job: (ran.append(job), submit(pool, job))[1])
    examiner = Examiner(Limits(wall_s=20.0), workers=2)
    with pytest.raises(RuntimeError, match="not open"):
        examiner(TESTS, ["x"])
    examiner.start()
    try:
        right, wrong, endless = "def f(x): return 2 * x", "def f(x): return x", "import os\ndef f(x): os.abort()"
        assert [v.all_passed for v in examiner(TESTS, [wrong, right, endless, right])] == [False, True, False, True]
        assert len(ran) == 3
        with pytest.raises(ValueError, match="no JSON"):
            examiner("nonsense", [right])
    finally:
        examiner.close()


def test_a_jail_that_fails_is_no_verdict(monkeypatch, tmp_path, jail):
    """First it holds, later (no memory, no processes) it does not open."""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: Cannot allocate memory' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(module, "self_test", lambda jail: None)
    monkeypatch.setattr(module, "find_jail", lambda: Jail(str(broken), jail.seccomp, None))
    examiner = Examiner(Limits(wall_s=20.0), workers=1)
    examiner.start()
    try:
        (found,) = examiner(TESTS, ["def f(x): return 2 * x"])
        assert found.startswith("code: a jail did not open")
        assert "Cannot allocate memory" in found
    finally:
        examiner.close()


def test_where_the_sandbox_does_not_hold_it_never_opens(monkeypatch):
    def leaks(jail):
        raise UserError("the sandbox does not hold here")

    monkeypatch.setattr(module, "self_test", leaks)
    examiner = Examiner(Limits(), workers=1)
    with pytest.raises(UserError, match="does not hold"):
        examiner.start()
    with pytest.raises(RuntimeError, match="not open"):
        examiner(TESTS, ["x"])


def test_tests_are_checked_before_a_run(monkeypatch):
    check_tests(TESTS)
    with pytest.raises(UserError, match='either "cases" or "check"'):
        check_tests("{}")
    monkeypatch.setitem(LANGUAGES, "c", Language("main.c", compile=("/usr/bin/no-such-compiler",)))
    with pytest.raises(UserError, match="programs in c need /usr/bin/no-such-compiler, which this machine"):
        check_tests(json.dumps({"language": "c", "cases": [{"input": "", "output": ""}]}))


def test_no_room_for_a_process_fails_a_verdict_and_stops_nothing(monkeypatch, jail):
    """A machine that is out of memory for a moment, which no thread of the pool must die of."""
    started = run_module.subprocess.Popen
    refusals = [None] * 4

    def sometimes(*args, **kwargs):
        if refusals:
            refusals.pop()
            raise OSError(12, "Cannot allocate memory")
        return started(*args, **kwargs)

    monkeypatch.setattr(run_module.subprocess, "Popen", sometimes)
    with SandboxPool(jail, Limits(wall_s=20.0), workers=1) as pool:
        with pytest.raises(JailError, match="Cannot allocate memory"):
            pool.submit(job(LANGUAGES["python"], "print(1)")).result(timeout=60)
        with pytest.raises(JailError, match="Cannot allocate memory"):
            pool.submit(job(LANGUAGES["python"], "print(2)")).result(timeout=60)
        assert pool.submit(job(LANGUAGES["python"], "print(3)")).result(timeout=60).stdout == b"3\n"
