"""Keeps the processes of one run together: a trainer world and sampler worlds, whatever starts them.

A sampler that dies is started again; a trainer that dies, or ends, ends the samplers. SIGTERM, SIGINT and SIGHUP are
passed on to the trainer, which stops after its step and saves. Every line goes to the terminal with its process's name
in front, and into a log of that process.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# A sampler that has lived so long before it died is none that cannot start.
_SETTLED_S = 60.0
_POLL_S = 0.1
# Statuses of `jaxrl`: what only a person can put right (another start would end alike), and a stop that was asked for.
_USER_ERROR, _STOPPED = 2, 130


def to_group(process: subprocess.Popen, number: int) -> None:
    """A signal to a process; SIGKILL also to all that it has started."""
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)


@dataclass(frozen=True)
class Command:
    """One process: `name` stands before its lines and names its log. `send(process, number)` is how a signal reaches
    what it stands for."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    send: Callable[[subprocess.Popen, int], None] = to_group


@dataclass(frozen=True)
class Policy:
    """`restarts` in a row for a sampler that dies within a minute; before the n-th it waits 2^(n-1) times `pause_s`.
    `grace_s` is how long a process may take to end once it should, before it is killed."""

    restarts: int = 10
    pause_s: float = 1.0
    longest_pause_s: float = 60.0
    grace_s: float = 60.0


class _Member:
    """A command and the process that runs it at present."""

    def __init__(self, command: Command, logs: Path, say):
        self.command, self._logs, self._say = command, logs, say
        self.process: subprocess.Popen | None = None
        self.deaths, self.start_at, self.began = 0, 0.0, 0.0
        self.over = self.given_up = False  # no other start: it ended well, or would only die again
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        self.began = time.monotonic()
        # A session of its own: the terminal's Ctrl-C reaches this launcher alone, which passes it on once.
        self.process = subprocess.Popen(
            self.command.words,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(self.command.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    @property
    def status(self) -> int | None:
        """As a shell tells it, 128 + the signal's number for one that was killed; None while it runs."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        return code if code >= 0 else 128 - code

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: int) -> None:
        if self.process is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.command.send(self.process, number)

    def read_out(self) -> None:
        """Wait for its last lines; not for ever, since something it started may still hold the pipe."""
        if self._reader is not None:
            self._reader.join(timeout=2.0)

    def _read(self, pipe) -> None:
        with pipe, open(self._logs / f"{self.command.name}.log", "ab") as log:
            for line in pipe:
                log.write(line)
                log.flush()
                self._say(f"{self.command.name} | {line.decode(errors='replace').rstrip()}")


class _Voice:
    """One line at a time from many threads."""

    def __init__(self):
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            print(line, flush=True)


def run(trainers: Sequence[Command], samplers: Sequence[Command], logs: Path, policy: Policy | None = None) -> int:
    """Start everything, see to it, and return the exit status: the trainer's.

    That is 0 for a run that finished, 130 for one that was asked to stop, and otherwise the status of the trainer's
    process that died first, or 2 once no sampler can be started any more.
    """
    logs.mkdir(parents=True, exist_ok=True)
    say = _Voice()
    worlds = _Worlds(
        [_Member(command, logs, say) for command in trainers],
        [_Member(command, logs, say) for command in samplers],
        policy or Policy(),
        say,
    )
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, worlds.signalled) for number in numbers}
    try:
        return worlds.run()
    finally:
        worlds.end()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Worlds:
    def __init__(self, trainers: list[_Member], samplers: list[_Member], policy: Policy, say):
        self._trainers, self._samplers, self._policy, self._say = trainers, samplers, policy, say
        self._signals: list[int] = []
        self._asked = 0

    def signalled(self, number: int, _frame) -> None:
        self._signals.append(number)

    def run(self) -> int:
        for member in self._trainers + self._samplers:
            self._start(member)
        first_death: int | None = None
        deadline = float("inf")
        while any(member.alive for member in self._trainers):
            self._pass_signals_on()
            statuses = [member.status for member in self._trainers]
            if first_death is None and (bad := [s for s in statuses if s]):
                # The others hear of it or notice it; a trainer that lacks a process can do nothing else.
                first_death, deadline = bad[0], time.monotonic() + self._policy.grace_s
                died = [m.command.name for m in self._trainers if m.status]
                if not (self._asked and bad[0] == _STOPPED):
                    self._say(f"launcher | {', '.join(died)} ended with status {bad[0]}; the run ends")
            if time.monotonic() > deadline:
                for member in self._trainers:
                    if member.alive:
                        self._say(f"launcher | {member.command.name} is killed: it goes on without the others")
                        member.send(signal.SIGKILL)
                deadline = float("inf")
            self._see_to_samplers()
            if any(m.given_up for m in self._samplers) and all(m.over for m in self._samplers):
                self._say("launcher | no sampler is left; the run ends. Its own words say why, in the logs")
                self._finish(self._trainers)
                return _USER_ERROR
            time.sleep(_POLL_S)
        statuses = [member.status or 0 for member in self._trainers]
        return first_death or next((status for status in statuses if status), 0)

    def end(self) -> None:
        """Nothing of the run is left."""
        self._finish(self._trainers + self._samplers)
        for member in self._trainers + self._samplers:
            member.read_out()

    def _start(self, member: _Member) -> None:
        try:
            member.start()
        except OSError as error:
            self._say(f"launcher | {member.command.name} cannot be started: {error}")
            member.over = member.given_up = True
            if member in self._trainers:
                raise SystemExit(_USER_ERROR) from None

    def _pass_signals_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._asked += 1
            # A closed terminal is a stop to the trainer. It stops at once when asked twice; the third time nobody asks.
            number = signal.SIGTERM if number == signal.SIGHUP else number
            for member in self._trainers:
                member.send(number if self._asked < 3 else signal.SIGKILL)

    def _see_to_samplers(self) -> None:
        now, policy = time.monotonic(), self._policy
        for member in self._samplers:
            if member.over or member.alive:
                continue
            status = member.status
            if status is None:  # waits for its next start
                if now >= member.start_at:
                    self._start(member)
                continue
            if status == 0:  # its run has finished
                member.over = True
                continue
            member.deaths = 1 if now - member.began > _SETTLED_S else member.deaths + 1
            name, member.process = member.command.name, None
            if status == _USER_ERROR or member.deaths > policy.restarts:
                why = "would be again" if status == _USER_ERROR else f"{member.deaths} times in a row"
                self._say(f"launcher | {name} ended with status {status} ({why}); it is not started again")
                member.over = member.given_up = True
                continue
            pause = min(policy.longest_pause_s, policy.pause_s * 2 ** (member.deaths - 1))
            member.start_at = now + pause
            self._say(f"launcher | {name} ended with status {status}; it is started again in {pause:g} s")

    def _finish(self, members: Sequence[_Member]) -> None:
        """Ask all to end, and kill those that do not within the grace."""
        for member in members:
            member.send(signal.SIGTERM)
        deadline = time.monotonic() + self._policy.grace_s
        while any(member.alive for member in members) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for member in members:
            if member.process is not None and member.alive:
                self._say(f"launcher | {member.command.name} did not end in {self._policy.grace_s:g} s and is killed")
                member.send(signal.SIGKILL)
                member.process.wait()


def jaxrl(*words: str) -> list[str]:
    """A `jaxrl` command in this interpreter's environment."""
    return [sys.executable, "-c", "from jaxrl_llm.cli.main import main; main()", *words]
