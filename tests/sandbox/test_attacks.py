"""Programs that mean harm: each ends as named, nothing outside changes, and the program beside it never notices."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import LIMITS

from jaxrl_llm.sandbox.jail import find_jail
from jaxrl_llm.sandbox.languages import LANGUAGES, START, job
from jaxrl_llm.sandbox.limits import Limits
from jaxrl_llm.sandbox.pool import SandboxPool
from jaxrl_llm.sandbox.run import Cell

NEIGHBOUR = "print(sum(range(1000)))"

# name -> (program, how it ends, what it prints; None: whatever)
CONTAINED = {
    "fork bomb": (
        "import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(60)\n    n += 1\n"
        "except OSError: print(n < 20)",
        "exited",
        "True\n",
    ),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(2 ** 20))", "exited", ""),
    "memory bomb of many processes": (
        "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(b'x') * (90 * 2 ** 20)\ntime.sleep(60)",
        "memory",
        "",
    ),
    "output flood": ("while True: print('x' * 10000)", "output", None),
    "flood of error output": ("import sys\nwhile True: print('x' * 10000, file=sys.stderr)", "output", ""),
    "huge file": ("open('x', 'wb').write(bytes(2 ** 26))", "exited", ""),
    "many files": (
        "try:\n  for i in range(10 ** 6): open(str(i), 'wb', 0).write(bytes(4096))\nexcept OSError: print(i < 2000)",
        "exited",
        "True\n",
    ),
    "writing where others read": (
        "for p in ('/usr/x', '/etc/x', '/x', '/tmp/x', '/dev/x', '/proc/sys/kernel/hostname'):\n"
        "  try: open(p, 'w').write('x'); print(p)\n  except OSError: pass",
        "exited",
        "",
    ),
    "environment": ("import os\nprint([n for n in os.environ if 'SECRET' in n])", "exited", "[]\n"),
    "environment of others": (
        "import glob\nprint([p for p in glob.glob('/proc/*/environ') if b'SECRET' in open(p, 'rb').read()])",
        "exited",
        "[]\n",
    ),
    "files of users": (
        "import os\nprint([p for p in ('/root', '/home', '/etc/passwd') if os.path.exists(p)])",
        "exited",
        "[]\n",
    ),
    "symlink out": (
        "import os\nos.symlink('/etc/passwd', 'a'); os.symlink('/proc/1/root', 'b')\n"
        "for p in ('a', 'b/etc/passwd', 'b/root'):\n  try: print(open(p).read())\n  except OSError: pass",
        "exited",
        "",
    ),
    "hard link and device": (
        "import os, stat\n"
        "for f in (lambda: os.link('/usr/bin/env', 'x'), lambda: os.mknod('y', stat.S_IFBLK, os.makedev(8, 0))):\n"
        "  try: f(); print('made')\n  except OSError: pass",
        "exited",
        "",
    ),
    "network": (
        "import socket\nfor a in (('127.0.0.1', PORT), ('192.0.2.1', 80)):\n"
        "  try:\n    s = socket.create_connection(a, 1); print(a)\n"
        "  except OSError: pass",
        "exited",
        "",
    ),
    "vsock": ("import socket\ntry: socket.socket(socket.AF_VSOCK)\nexcept OSError: print('no')", "exited", "no\n"),
    "ptrace": (
        "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
        "print(c.ptrace(16, os.getppid(), 0, 0), ctypes.get_errno())",
        "exited",
        "-1 1\n",
    ),
    "a user namespace of its own": (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint(c.unshare(0x10000000), ctypes.get_errno())",
        "exited",
        "-1 1\n",
    ),
    "killing the parent": (
        "import os, signal\nfor p in (os.getppid(), 1, OUTSIDE):\n  for s in (signal.SIGKILL, signal.SIGSTOP):\n"
        "    try: os.kill(p, s)\n    except OSError: pass\nprint('alive')",
        "exited",
        "alive\n",
    ),
    "daemon that lives on": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    os.close(0); os.close(1); os.close(2)\n"
        "    time.sleep(600)\n  os._exit(0)\nos.wait(); print('gone')",
        "exited",
        "gone\n",
    ),
    "zombies": (
        "import os\nfor _ in range(10):\n  if os.fork() == 0: os._exit(0)\nprint('done')",
        "exited",
        "done\n",
    ),
    "crash": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "signalled", ""),
    "deep recursion": ("def f(): f()\nf()", "exited", ""),
    "huge integer": ("print(len(str(10 ** 5000)))", "exited", ""),
    "closing everything": ("import os\nos.closerange(0, 100)\nos._exit(3)", "exited", ""),
    "lone surrogates": ("print('\ud800')", "exited", ""),
}


@pytest.fixture(scope="module")
def port():
    """A door outside that is open, were there a way to it."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("name", CONTAINED)
def test_contained_with_the_neighbour_unharmed(name, pool, port, monkeypatch):
    monkeypatch.setenv("A_SECRET", "SECRET")
    program, ending, printed = CONTAINED[name]
    program = f"PORT, OUTSIDE = {port}, {os.getpid()}\n" + program
    attack = pool.submit(job(LANGUAGES["python"], program))
    beside = pool.submit(job(LANGUAGES["python"], NEIGHBOUR))
    outcome, other = attack.result(timeout=60), beside.result(timeout=60)
    assert (outcome.ending, other.stdout) == (ending, b"499500\n"), (outcome, other)
    assert len(outcome.stdout) <= LIMITS.output_bytes
    if printed is not None:
        assert outcome.stdout.decode() == printed, outcome


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "x = 9**9**9**9",
        "import signal\nfor s in range(1, 65):\n"
        "  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "import os, time\nif os.fork() == 0: time.sleep(600)\nos.close(1); os.close(2)\ntime.sleep(600)",
    ],
    ids=["loop", "tower of powers", "ignores signals", "closes its outputs and sleeps"],
)
def test_what_does_not_end_is_ended(program, jail):
    with Cell(jail, START, Limits(wall_s=1.0)) as cell:
        started = time.monotonic()
        while not (inside := _descendants(cell.pid)):
            time.sleep(0.01)
        outcome = cell.run(job(LANGUAGES["python"], program))
        assert outcome.ending == "time"
        assert time.monotonic() - started < 15
    _await_end([cell.pid, *inside])


def test_input_that_nobody_reads_holds_nothing_up(run):
    outcome = run("print('done')", stdin="x" * 2**30)
    assert outcome.stdout == b"done\n"


def test_all_of_a_long_input_arrives(run):
    text = "".join(f"{i}\n" for i in range(10**6))
    assert run("import sys\nprint(sum(map(int, sys.stdin)))", stdin=text).stdout == b"499999500000\n"


def test_programs_leave_nothing_for_one_another(jail):
    with SandboxPool(jail, LIMITS, workers=1) as pool:
        first = pool.submit(job(LANGUAGES["python"], "open('left', 'w').write('x')\nprint('written')"))
        second = pool.submit(job(LANGUAGES["python"], "import os\nprint(os.listdir('.'))"))
        assert first.result(60).stdout == b"written\n"
        assert second.result(60).stdout == b"['main.py']\n"


_OWNER = """
import os, sys, time
from jaxrl_llm.sandbox.jail import find_jail
from jaxrl_llm.sandbox.languages import LANGUAGES, job
from jaxrl_llm.sandbox.limits import Limits
from jaxrl_llm.sandbox.pool import SandboxPool
pool = SandboxPool(find_jail(), Limits(wall_s=600), workers=1)
pool.submit(job(LANGUAGES["python"], "import time\\ntime.sleep(600)"))
time.sleep(1)
print("running", flush=True)
time.sleep(600)
"""


def test_jails_die_with_a_process_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"running\n"
        jails = _descendants(owner.pid)
        assert jails
        owner.kill()
    _await_end(jails)


def _await_end(pids):
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _descendants(root):
    """Process ids below `root`."""
    found, pids = [], [root]
    while pids:
        pid = pids.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
            if pid != root:
                found.append(pid)
        except OSError:
            continue
    return found


def test_find_jail_is_asked_for_once():
    assert find_jail() is find_jail()
