"""The `jaxrl` script: large blocks of memory in huge pages, then the commands.

XLA's CPU backend asks malloc for a program's temporary arrays anew at every call, and the kernel hands them out page by
page as they are first written: with pages of 4 KiB that is a quarter of a small model's training step
(benchmarks/train_step). glibc can ask for huge pages instead, but reads that only when a process starts.
"""

import os
import sys

_VARIABLE, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def main() -> None:
    """Run `jaxrl` in this process, started anew once with huge pages; a GLIBC_TUNABLES that is set stays as it is."""
    if sys.platform == "linux" and _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = _HUGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    from jaxrl_llm.cli.main import main as commands

    commands()
