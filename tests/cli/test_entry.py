"""The script starts itself anew at most once, as the same process with the same arguments."""

import os
import subprocess
import sys

import pytest

# What `jaxrl` would run, replaced by a report of what it was started with.
_SCRIPT = """
import os, sys
from jaxrl_llm.cli import entry, main
main.main = lambda: print(os.getpid(), os.environ["GLIBC_TUNABLES"], sys.argv[1:])
print("started", flush=True)
entry.main()
"""


@pytest.mark.parametrize(
    ("given", "starts"), [(None, 2), ("glibc.malloc.hugetlb=1", 1), ("glibc.malloc.arena_max=2", 1)]
)
def test_starts_anew_once_with_huge_pages_unless_the_user_has_chosen(given, starts):
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if given is not None:
        environment["GLIBC_TUNABLES"] = given
    arguments = ["a b", "c='d'", ""]
    command = [sys.executable, "-c", _SCRIPT, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.splitlines() == ["started"] * starts + [
        f"{process.pid} {given or 'glibc.malloc.hugetlb=1'} {arguments}"
    ]
