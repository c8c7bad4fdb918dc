"""The jail: bubblewrap with nothing inside but read-only system files, a small writable /jail, and no way out.

Inside there is no network, no other process, no environment, no file of the user's; system calls are filtered
(syscalls.py), and limits that the kernel keeps per process are set before the program starts (limits.py). What the
kernel does not keep for all of its processes together, run.py watches.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jaxrl_llm.sandbox.limits import Limits
from jaxrl_llm.sandbox.syscalls import filter_program
from jaxrl_llm.types import UserError

WORK = "/jail"  # the only writable folder inside, empty at the start
NOBODY = 65534
_SETPRIV, _PRLIMIT = "/usr/bin/setpriv", "/usr/bin/prlimit"

# What programs need of the system, if it is there: never /etc as a whole, /home, /root, /var, /run or /sys.
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "TMPDIR": WORK,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Jail:
    """How to start programs in jail. `user` is whom they run as outside; only root can, and must, choose somebody else:
    the kernel does not count root's processes."""

    bwrap: str
    seccomp: bytes = field(repr=False)
    user: int | None

    def command(self, program: Sequence[str], limits: Limits, *, seccomp_fd: int) -> list[str]:
        """The argument vector that runs `program` (an absolute path inside and its arguments)."""
        mounts = [argument for path in _SYSTEM for argument in ("--ro-bind-try", path, path)]
        environment = [argument for name, value in _ENVIRONMENT.items() for argument in ("--setenv", name, value)]
        # Not by subprocess's own user=: that would fork this process, which may be far too large to be copied, where
        # otherwise it is only borrowed for the moment until the new program starts (vfork).
        as_user = (
            [] if self.user is None else [_SETPRIV, f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        )
        return [
            *(
                *as_user,
                self.bwrap,
                "--unshare-all",
                "--unshare-user",
                "--disable-userns",
                "--die-with-parent",
                "--new-session",
            ),
            *("--clearenv", *environment, "--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY)),
            *("--hostname", "sandbox", *mounts, "--proc", "/proc", "--dev", "/dev"),
            *("--size", str(limits.disk_bytes), "--tmpfs", WORK, "--remount-ro", "/", "--remount-ro", "/dev"),
            *("--chdir", WORK, "--seccomp", str(seccomp_fd), "--", *_limited(limits), *program),
        ]


def _limited(limits: Limits) -> list[str]:
    """prlimit, which sets what the kernel keeps per process, then becomes the program."""
    # One process more than the program may have: the jail's own first process counts.
    kept: Mapping[str, int] = {
        "as": limits.memory_bytes,
        "nproc": limits.processes + 1,
        "fsize": limits.disk_bytes,
        "nofile": limits.open_files,
        "cpu": max(1, round(limits.wall_s) + 1),
        "core": 0,
        "memlock": 0,
        "msgqueue": 0,
    }
    return [_PRLIMIT, *(f"--{name}={most}" for name, most in kept.items()), "--"]


@cache
def find_jail() -> Jail:
    """This machine's jail, not yet tested. Raises UserError where it cannot be built."""
    if sys.platform != "linux":
        raise UserError(f"programs can be run safely on Linux alone, not on {sys.platform}: bubblewrap is Linux's")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError(
            "the sandbox needs bubblewrap, and no bwrap is on the PATH: install it (Debian: apt-get install bubblewrap)"
        )
    for tool in (_SETPRIV, _PRLIMIT):
        if not Path(tool).exists():
            raise UserError(f"the sandbox needs {tool} (Debian: apt-get install util-linux)")
    return Jail(bwrap, filter_program(), NOBODY if os.geteuid() == 0 else None)
