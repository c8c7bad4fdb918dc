"""Whether this machine's jail holds: what must not work inside is tried before anything else may run."""

import os
import tempfile
from collections.abc import Mapping

from jaxrl_llm.sandbox.jail import Jail
from jaxrl_llm.sandbox.languages import LANGUAGES, START, job
from jaxrl_llm.sandbox.limits import Limits, Outcome
from jaxrl_llm.sandbox.run import Cell, JailError
from jaxrl_llm.types import UserError

_HELD = "held"
_LIMITS = Limits(wall_s=5.0, memory_bytes=256 * 2**20, processes=16, output_bytes=2**16, disk_bytes=2**22)

# Each prints "held" only if its attempt was refused. SECRET is a file, PARENT a process outside.
_ATTEMPTS: Mapping[str, str] = {
    "reading a file of the machine": """
import os
paths = (SECRET, "/etc/passwd", "/etc/shadow", "/root", "/home", "/var", "/run", "/sys")
seen = [path for path in paths if os.path.exists(path)]
assert not seen, seen
""",
    "reading the environment": """
import os
known = {"PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "PWD", "LC_CTYPE"}
names = set(os.environ) - known
assert not names, names
""",
    "seeing or killing processes outside": """
import os
assert max(map(int, filter(str.isdigit, os.listdir("/proc")))) < 100
try:
    os.kill(PARENT, 9)
except (ProcessLookupError, PermissionError):
    pass
else:
    raise SystemExit("killed a process")
""",
    "writing outside the working folder": """
import os
for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/dev/shm/x", "/proc/sys/kernel/core_pattern", "/tmp/x"):
    try:
        open(path, "w")
    except OSError:
        continue
    raise SystemExit("wrote " + path)
""",
    "reaching a network": """
import socket
for family, address in ((socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_INET, ("127.0.0.1", 22))):
    try:
        with socket.socket(family) as s:
            s.settimeout(1)
            s.connect(address)
    except OSError:
        continue
    raise SystemExit("connected")
for family in (16, 38, 40):
    try:
        socket.socket(family, socket.SOCK_RAW)
    except OSError:
        continue
    raise SystemExit(f"opened a socket of family {family}")
""",
    "system calls that are filtered": """
import ctypes, errno
c = ctypes.CDLL(None, use_errno=True)
assert c.ptrace(0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM
assert c.unshare(0x10000000) == -1 and ctypes.get_errno() == errno.EPERM
assert c.mount(b"none", b"/jail", b"tmpfs", 0, None) == -1 and ctypes.get_errno() == errno.EPERM
""",
    "starting more processes than allowed": """
import os, time
started = 0
try:
    while started < 500:
        if os.fork() == 0:
            time.sleep(60)
        started += 1
except OSError:
    pass
assert started < 100, started
""",
    "taking more memory than allowed": """
try:
    bytearray(2 ** 29)
except MemoryError:
    pass
else:
    raise SystemExit("got it")
""",
    "filling the disk": """
try:
    with open("big", "wb") as file:
        for _ in range(64):
            file.write(bytes(2 ** 20))
except OSError:
    pass
else:
    raise SystemExit("wrote it")
""",
}
# Each goes over a limit that ends the whole jail: (program, limits, how it must end).
_ENDLESS = {
    "running for ever": ("while True: pass", Limits(wall_s=0.5), "time"),
    "output without end": ("while True: print('x' * 1000)", Limits(wall_s=5.0, output_bytes=2**16), "output"),
}


def self_test(jail: Jail) -> None:
    """Try the attacks above. Raises UserError naming the first that is not contained, or why no jail opens at all."""
    with tempfile.NamedTemporaryFile(prefix="jaxrl-secret-") as secret:
        os.chmod(secret.name, 0o644)
        known = f"SECRET, PARENT = {secret.name!r}, {os.getpid()}\n"
        for name, attempt in _ATTEMPTS.items():
            outcome = _run(jail, known + attempt + f"\nprint({_HELD!r})", _LIMITS)
            if outcome.stdout.decode(errors="replace").split() != [_HELD]:
                said = (outcome.stderr or outcome.stdout).decode(errors="replace").strip().splitlines()
                raise _not_contained(name, said[-1] if said else outcome.ending)
    for name, (program, limits, ending) in _ENDLESS.items():
        if (outcome := _run(jail, program, limits)).ending != ending:
            raise _not_contained(name, outcome.ending)


def _run(jail: Jail, source: str, limits: Limits) -> Outcome:
    try:
        with Cell(jail, START, limits) as cell:
            return cell.run(job(LANGUAGES["python"], source))
    except JailError as error:
        raise UserError(
            f"the sandbox does not work here: {error}. bubblewrap needs user namespaces (in a container: allow "
            "them, or run outside it); no program is run without"
        ) from None


def _not_contained(name: str, why: str) -> UserError:
    return UserError(f"the sandbox does not hold here: {name} was not refused ({why}); no program is run")
