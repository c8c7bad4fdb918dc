"""Where the jail does not hold, nothing runs."""

import pytest

from jaxrl_llm.sandbox import jail as jail_module
from jaxrl_llm.sandbox.jail import Jail, find_jail
from jaxrl_llm.sandbox.self_test import self_test
from jaxrl_llm.types import UserError


def test_this_machines_jail_holds(jail):
    self_test(jail)


def _fake(tmp_path, script):
    path = tmp_path / "bwrap"
    path.write_text("#!/bin/bash\n" + script)
    path.chmod(0o755)
    return str(path)


# Each drops one of the jail's arguments; the attack that this lets through must be named.
LEAKS = {
    "--clearenv": "reading the environment",
    "--seccomp": "system calls that are filtered|reaching a network",
    "--unshare-all": "reaching a network|seeing or killing|does not work here",
    "--remount-ro": "writing outside",
}


@pytest.mark.parametrize("dropped", LEAKS)
def test_a_jail_with_a_hole_is_named(dropped, jail, monkeypatch):
    whole = Jail.command

    def with_hole(self, program, limits, *, seccomp_fd):
        command, kept = whole(self, program, limits, seccomp_fd=seccomp_fd), []
        end = command.index("--")
        position = 0
        while position < end:
            if command[position] == dropped:
                position += {"--seccomp": 2, "--remount-ro": 2}.get(dropped, 1)
                if dropped == "--unshare-all":
                    kept += ["--unshare-user", "--unshare-pid"]
                if dropped == "--clearenv":
                    kept += ["--setenv", "API_KEY", "1"]
                continue
            kept.append(command[position])
            position += 1
        return kept + command[end:]

    monkeypatch.setattr(Jail, "command", with_hole)
    with pytest.raises(UserError, match=LEAKS[dropped]):
        self_test(jail)


def test_no_limits_no_jail(jail, monkeypatch):
    monkeypatch.setattr(jail_module, "_limited", lambda limits: [])
    with pytest.raises(UserError, match=r"(more processes|more memory) than allowed was not refused"):
        self_test(jail)


@pytest.mark.parametrize(
    "script",
    ["echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "exit 0", "kill -9 $$"],
)
def test_a_bubblewrap_that_does_not_work_is_an_error_with_its_reason(script, jail, tmp_path):
    broken = Jail(_fake(tmp_path, script), jail.seccomp, None)
    with pytest.raises(UserError, match=r"the sandbox does not work here: .*(No permissions|did not open)"):
        self_test(broken)


def test_without_bubblewrap_the_error_says_how_to_get_it(monkeypatch):
    find_jail.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"no bwrap is on the PATH.*apt-get install bubblewrap"):
        find_jail()
    find_jail.cache_clear()
