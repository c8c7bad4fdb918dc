import json
import sys

import pytest
from tiny_run import TINY

from jaxrl_llm.cli.main import main


@pytest.fixture
def tiny(tmp_path):
    """A configuration of seconds: one-digit addition, one layer."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def jaxrl(monkeypatch, capsys):
    """Run a `jaxrl` command in this process: (exit status, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxrl", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def records():
    """The records of a run's .jsonl file."""
    return lambda run_dir, name: [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]
