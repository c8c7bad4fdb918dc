"""The tool python in a real sandbox: what a program prints, and how it fails, as the policy reads it."""

from dataclasses import replace

import pytest
from conftest import LIMITS

from jaxrl_llm.envs.tools.protocol import ToolBrokenError
from jaxrl_llm.envs.tools.python import PythonTool
from jaxrl_llm.sandbox.run import JailError
from jaxrl_llm.types import UserError


def test_programs_are_answered_whatever_they_do():
    tool = PythonTool(LIMITS, workers=2)
    with pytest.raises(RuntimeError, match="call start"):
        tool("print(1)")
    tool.start()
    try:
        assert tool("\n  for n in range(3):\n    print(n * n)\n") == "0\n1\n4\n"
        assert tool("x = 1") == ""
        assert tool("print('half'); 1/0") == "error: ZeroDivisionError: division by zero"
        assert tool("print(") == "error: SyntaxError: '(' was never closed"
        assert tool("import sys; sys.exit(3)") == "error: exit code 3"
        assert tool("while True: print('x' * 1000)") == "error: it printed more than 64 KiB"
        assert tool("import os; os.kill(os.getpid(), 11)") == "error: it was ended by signal 11"
        assert tool("open('/jail/left', 'w').write('x')") == ""
        assert tool("import os; print(os.listdir('/jail'))") == "['main.py']\n"  # the next one is alone
        assert tool("print('\\ud800')").startswith("error: UnicodeEncodeError")
        assert tool("import sys; sys.stdout.buffer.write(b'\\xff\\x00')") == "\ufffd\0"
        assert tool("\ud800").startswith("error: ")
    finally:
        tool.close()


def test_a_program_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.sandbox.service.self_test", lambda jail: None)  # it has been tried above
    tool = PythonTool(replace(LIMITS, wall_s=0.5), workers=1)
    tool.start()
    try:
        assert tool("while True: pass") == "error: it took more than 0.5 s"
    finally:
        tool.close()


def test_a_jail_that_fails_is_our_fault_and_no_answer():
    class NoJail:
        def submit(self, job):
            raise JailError("no jail could be started: no processes left")

    tool = PythonTool(LIMITS, workers=1)
    tool._opened = NoJail()
    with pytest.raises(ToolBrokenError, match="python: no jail could be started"):
        tool("print(1)")


def test_the_tool_refuses_where_the_sandbox_does_not_hold(monkeypatch):
    def leaks(jail):
        raise UserError("the sandbox does not hold here: reading a file was not refused")

    monkeypatch.setattr("jaxrl_llm.sandbox.service.self_test", leaks)
    tool = PythonTool(LIMITS, workers=1)
    with pytest.raises(UserError, match="does not hold here"):
        tool.start()
    with pytest.raises(RuntimeError, match="call start"):
        tool("print(1)")
