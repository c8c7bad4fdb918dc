"""What keeps a run's processes together, with scripts in the place of trainer and samplers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worlds import Command, Policy, run

LAUNCH = Path(__file__).parents[2] / "launch"
QUICK = Policy(restarts=2, pause_s=0.05, grace_s=5.0)


def python(name, code, **environment):
    return Command(name, [sys.executable, "-c", code], environment)


def forever(name, folder):
    """Leaves its process's number in a file of `folder` and ends with 0 on SIGTERM."""
    code = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"pathlib.Path({str(folder / name)!r}).write_text(f'{{os.getpid()}}')\n"
        "time.sleep(60)"
    )
    return python(name, code)


def wait_for(folder, *names):
    """A line of Python that waits for the files of others."""
    return (
        f"import pathlib, time\nwhile not all((pathlib.Path({str(folder)!r}) / n).exists() for n in {names!r}):\n"
        "    time.sleep(0.02)\n"
    )


def gone(path):
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)
    return True


def test_the_end_of_the_trainer_ends_the_samplers(tmp_path, capfd):
    names = ("sampler-0", "sampler-1")
    trainer = python("trainer", wait_for(tmp_path, *names) + "print('done')")
    assert run([trainer], [forever(name, tmp_path) for name in names], tmp_path / "logs", QUICK) == 0
    assert all(gone(tmp_path / name) for name in names)
    assert capfd.readouterr().out.splitlines() == ["trainer | done"]
    assert (tmp_path / "logs" / "trainer.log").read_text() == "done\n"


def test_a_sampler_that_dies_is_started_again(tmp_path, capfd):
    # It kills itself twice; its third life lets the trainer end.
    count = tmp_path / "lives"
    code = (
        f"import os, pathlib, time\nlives = pathlib.Path({str(count)!r})\n"
        "n = len(lives.read_text()) if lives.exists() else 0\nlives.write_text('x' * (n + 1))\n"
        "if n < 2: os.kill(os.getpid(), 9)\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).write_text('')\ntime.sleep(60)"
    )
    trainer = python("trainer", wait_for(tmp_path, "up"))
    assert run([trainer], [python("sampler-0", code)], tmp_path / "logs", QUICK) == 0
    assert count.read_text() == "xxx"
    assert capfd.readouterr().out.splitlines() == [
        "launcher | sampler-0 ended with status 137; it is started again in 0.05 s",
        "launcher | sampler-0 ended with status 137; it is started again in 0.1 s",
    ]


def test_a_sampler_that_cannot_start_is_given_up_and_the_others_go_on(tmp_path, capfd):
    samplers = [
        python("sampler-0", "raise SystemExit(2)"),
        python("sampler-1", "raise SystemExit(1)"),
        forever("sampler-2", tmp_path),
    ]
    trainer = python("trainer", wait_for(tmp_path, "sampler-2") + "time.sleep(1.5)")
    assert run([trainer], samplers, tmp_path / "logs", QUICK) == 0
    out = capfd.readouterr().out
    assert out.count("sampler-0 ended") == 1
    assert "sampler-0 ended with status 2 (would be again); it is not started again" in out
    assert "sampler-1 ended with status 1 (3 times in a row); it is not started again" in out


def test_without_a_sampler_there_is_no_run(tmp_path, capfd):
    status = run([forever("trainer", tmp_path)], [python("sampler-0", "raise SystemExit(2)")], tmp_path / "logs", QUICK)
    assert status == 2
    assert "no sampler is left; the run ends" in capfd.readouterr().out
    assert not (tmp_path / "trainer").exists() or gone(tmp_path / "trainer")


def test_samplers_that_have_ended_well_are_not_started_again(tmp_path, capfd):
    trainer = python("trainer", wait_for(tmp_path, "over") + "time.sleep(0.5)")
    sampler = python("sampler-0", f"import pathlib; pathlib.Path({str(tmp_path / 'over')!r}).write_text('')")
    assert run([trainer], [sampler], tmp_path / "logs", QUICK) == 0
    assert capfd.readouterr().out == ""


def test_a_trainer_that_lacks_a_process_is_ended(tmp_path, capfd):
    trainers = [
        python("trainer-0", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"),
        python("trainer-1", "import os; os.kill(os.getpid(), 11)"),
    ]
    began = time.monotonic()
    status = run(trainers, [forever("sampler-0", tmp_path)], tmp_path / "logs", Policy(grace_s=0.5))
    assert status == 128 + 11
    assert time.monotonic() - began < 30
    out = capfd.readouterr().out
    assert "trainer-1 ended with status 139; the run ends" in out
    assert "trainer-0 is killed: it goes on without the others" in out


def test_a_program_that_is_not_there_is_named(tmp_path, capfd):
    with pytest.raises(SystemExit, match="2"):
        run([Command("trainer", ["/nowhere/jaxrl"])], [forever("sampler-0", tmp_path)], tmp_path / "logs", QUICK)
    assert "trainer cannot be started: [Errno 2]" in capfd.readouterr().out


@pytest.mark.parametrize(("number", "passed_on"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM")])
def test_signals_go_to_the_trainer(number, passed_on, tmp_path):
    trainer = (
        "import signal, sys, time\n"
        "def stop(*_):\n    print('stopping', flush=True)\n    time.sleep(0.3)\n    sys.exit(130)\n"
        f"signal.signal(signal.{passed_on}, stop)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(LAUNCH)!r})\nfrom pathlib import Path\nfrom worlds import *\n"
        f"sys.exit(run([Command('trainer', [sys.executable, '-c', {trainer!r}])],\n"
        f"[Command('sampler-0', [sys.executable, '-c', {forever('sampler-0', tmp_path).words[2]!r}])],\n"
        f"Path({str(tmp_path / 'logs')!r})))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "trainer | up\n"
        while not (tmp_path / "sampler-0").exists():
            time.sleep(0.02)
        process.send_signal(getattr(signal, number))
        assert process.stdout.read() == "trainer | stopping\n"
        assert process.wait(30) == 130
        assert gone(tmp_path / "sampler-0")
