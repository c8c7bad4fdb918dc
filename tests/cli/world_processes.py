"""Trainers and samplers as processes of one machine, always reaped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

COMMAND = [sys.executable, "-c", "from jaxrl_llm.cli.main import main; main()"]
PATIENCE_S = 600  # a bound for a busy machine, not what it takes


class Processes:
    """`jaxrl` commands started in `folder`; what each says is in a file there."""

    def __init__(self, folder, config):
        self.folder, self.config, self.started = folder, config, []
        self.address, self.run = folder / "trainer.address", folder / "run"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            if process.poll() is None:
                process.kill()
        for process in self.started:
            process.wait()

    def start(self, *arguments, **environment):
        path = self.folder / f"said-{len(self.started)}"
        with path.open("w") as out:
            process = subprocess.Popen(
                [*COMMAND, *map(str, arguments)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        process.said = path.read_text
        self.started.append(process)
        return process

    def train(self, *arguments):
        remote = (f"sampler.remote.announce={self.address}", "sampler.remote.listen=127.0.0.1:0")
        return self.start("train", self.config, *remote, "--run-dir", self.run, *arguments)

    def sampler(self, *arguments, **environment):
        trainer = ("--trainer", f"file:{self.address}", "--patience", PATIENCE_S)
        return self.start("sampler", self.config, *trainer, *arguments, **environment)

    def events(self):
        path = self.run / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kinds(self):
        return Counter(event["event"] for event in self.events())

    def messages(self, kind):
        return [event["message"] for event in self.events() if event["event"] == kind]

    def metrics(self):
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition, *alive, seconds=PATIENCE_S):
        """Wait for it; fails with what the processes said if it takes too long or one that should live ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            dead = [process for process in alive if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise AssertionError("\n---\n".join(f"rc {p.poll()}: {p.said()}" for p in self.started))
            time.sleep(0.05)

    def ended(self, process, seconds=PATIENCE_S):
        """The exit status, once it has ended by itself."""
        self.until(lambda: process.poll() is not None, seconds=seconds)
        return process.returncode


def where(process):
    """host:port of a sampler, from what it said."""
    return process.said().split("sampler on ")[1].split()[0]


def stop(process):
    process.send_signal(signal.SIGSTOP)


def go_on(process):
    process.send_signal(signal.SIGCONT)


def check_books(records, max_lag):
    """Every step once and in order, no token older than the bound, nothing lost or trained twice."""
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    for record in records:
        assert record["lag_max"] <= max_lag
        settled = record["prompts_trained"] + sum(record["prompts_dropped"].values())
        assert record["prompts_issued"] == settled + record["prompts_in_flight"]
        assert settled == record["groups"] * record["step"]
