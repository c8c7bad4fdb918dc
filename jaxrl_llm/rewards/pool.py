"""Processes that score, killed when they take too long, and their restarts.

A thread per process takes jobs from one queue, so that jobs of several callers share the processes and a caller waits
for its own alone. A job that takes too long or whose process dies is tried again, at the end of the queue, a bounded
number of times; then it has failed.
"""

import contextlib
import json
import math
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.rewards.worker import receive_frame, send_frame
from jaxrl_llm.types import UserError

_IMPORTS_S = 300.0  # what the forking process may take for its imports
_JOBS_PER_WORKER = 2000  # then a fresh one: caches of symbolic algebra grow
_LONGEST_REPLY = 1 << 16
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jaxrl_llm.rewards.worker import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Job:
    """A call of the pool's function `function` by keywords that JSON can hold."""

    function: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The finite number that the function returned, or why there is none; how long the last try had a worker."""

    value: float
    failed: str | None = None
    seconds: float = 0.0


@dataclass
class _Queued:
    job: Job
    result: Future[Outcome] = field(default_factory=Future)
    tries: int = 0


class WorkerPool:
    """`functions` are import paths by name. Nothing starts before `start` or the first `run`; ended by `close`.

    A job may take `timeout_s` on a worker and is tried `1 + retries` times if it takes longer or its worker dies; an
    exception and a number that is not finite are the function's own last word. Workers get `memory_mb` MiB of address
    space each.
    """

    def __init__(self, functions: Mapping[str, str], *, workers: int, timeout_s: float, retries: int, memory_mb: int):
        self._functions, self._count, self._memory_mb = dict(functions), workers, memory_mb
        self._timeout_s, self._retries = timeout_s, retries
        self._jobs: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._forker: _Forker | None = None
        self._closed = False

    def start(self) -> None:
        """Import the functions, where this has not been done. Raises UserError if one cannot be."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if self._threads or not self._functions:
                return
            self._forker = _Forker(self._functions, self._memory_mb)
            self._threads = [
                threading.Thread(target=self._work, name=f"reward worker {n}", daemon=True) for n in range(self._count)
            ]
            for thread in self._threads:
                thread.start()

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of `jobs`, in their order; blocks. May be called from several threads at once."""
        if not jobs:
            return []
        self.start()
        queued = [_Queued(job) for job in jobs]
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            for one in queued:
                self._jobs.put(one)
        return [one.result.result() for one in queued]

    def close(self) -> None:
        """End all processes, once what they are at is done; whoever waits for more, or runs more, gets RuntimeError."""
        with self._lock:
            self._closed = True
            threads, forker = self._threads, self._forker
        self._give_up_queued()
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()
        self._give_up_queued()  # what was to be tried again
        if forker is not None:
            forker.close()

    def _give_up_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (left := self._jobs.get_nowait()) is not None:
                    left.result.set_exception(RuntimeError("the pool is closed"))

    def _work(self) -> None:
        worker: _Worker | None = None
        while (queued := self._jobs.get()) is not None:
            try:
                if worker is None or worker.spent:
                    worker = self._fork(instead_of=worker)
                outcome = worker.call(queued.job, self._timeout_s)
            except _WorkerLostError as error:
                self._again(queued, Outcome(math.nan, str(error), error.seconds))
            except BaseException as error:
                queued.result.set_exception(error)
            else:
                queued.result.set_result(outcome)
        if worker is not None and self._forker is not None:
            self._forker.end(worker)

    def _again(self, queued: _Queued, outcome: Outcome) -> None:
        queued.tries += 1
        if queued.tries <= self._retries:
            self._jobs.put(queued)
        else:
            queued.result.set_result(outcome)

    def _fork(self, *, instead_of: "_Worker | None") -> "_Worker":
        assert self._forker is not None
        return self._forker.fork(instead_of)


class _WorkerLostError(Exception):
    """A worker took too long or died; the message says which."""

    def __init__(self, message: str, seconds: float):
        super().__init__(message)
        self.seconds = seconds


class _Worker:
    """A worker and our end of its socket. `spent` is one that must be replaced before the next job."""

    def __init__(self, connection: socket.socket, pid: int, generation: int):
        self.connection, self.pid, self.generation = connection, pid, generation
        self.spent = False
        self._jobs = 0

    def call(self, job: Job, timeout_s: float) -> Outcome:
        self._jobs += 1
        self.spent = True  # unless it answers
        started = time.monotonic()
        until = started + timeout_s

        def receive(most: int) -> bytes:
            self.connection.settimeout(max(1e-3, until - time.monotonic()))
            return self.connection.recv(most)

        try:
            self.connection.settimeout(timeout_s)
            send_frame(self.connection, {"function": job.function, "arguments": dict(job.arguments)})
            reply = receive_frame(receive, _LONGEST_REPLY)
        except TimeoutError:
            raise _WorkerLostError(f"it took more than {timeout_s:g} s", time.monotonic() - started) from None
        except (OSError, EOFError, ValueError):  # the last is what a dying process left of a reply
            raise _WorkerLostError("its process died", time.monotonic() - started) from None
        self.spent = "memory" in reply or self._jobs == _JOBS_PER_WORKER
        if (failed := reply.get("failed")) is not None:
            return Outcome(math.nan, failed, time.monotonic() - started)
        return Outcome(float(reply["value"]), seconds=time.monotonic() - started)


class _Forker:
    """The process that forks workers; itself started anew if it dies."""

    def __init__(self, functions: Mapping[str, str], memory_mb: int):
        self._start = {"functions": dict(functions), "memory_mb": memory_mb}
        self._lock = threading.Lock()
        self._generation = 0
        self._process: subprocess.Popen[bytes]
        self._control: socket.socket
        self._begin()

    def fork(self, instead_of: _Worker | None = None) -> _Worker:
        """A new worker; another one is killed in its favour. Raises RuntimeError if there is none to be had."""
        with self._lock:
            for _ in range(3):
                ours, theirs = socket.socketpair()
                try:
                    socket.send_fds(self._control, [self._command("fork", instead_of)], [theirs.fileno()])
                    reply = self._reply()
                    if instead_of is not None:
                        instead_of.connection.close()
                    return _Worker(ours, reply["pid"], self._generation)
                except (OSError, EOFError):
                    ours.close()
                    self._stop()
                    self._generation += 1
                    self._begin()
                finally:
                    theirs.close()
        raise RuntimeError("the process that starts reward workers dies again and again; is the machine out of memory?")

    def end(self, worker: _Worker) -> None:
        """Kill a worker."""
        with self._lock, contextlib.suppress(OSError, EOFError):
            worker.connection.close()
            self._control.send(self._command("kill", worker))
            self._reply()

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _command(self, do: str, to_kill: _Worker | None) -> bytes:
        """Workers of a forker that died have died with it, and their numbers may be others' by now."""
        mine = to_kill is not None and to_kill.generation == self._generation
        return json.dumps({"do": do, "kill": to_kill.pid if mine and to_kill else None}).encode()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        self._control = ours
        ours.settimeout(_IMPORTS_S)
        try:
            ours.send(json.dumps(self._start).encode())
            problem = self._reply()["problem"]
        except (OSError, EOFError):
            problem = f"the process that imports {', '.join(self._start['functions'].values())} died or hangs"
        if problem is not None:
            self._stop()
            raise UserError(f"a reward cannot be used: {problem}")

    def _reply(self) -> dict[str, Any]:
        data = self._control.recv(_LONGEST_REPLY)
        if not data:
            raise EOFError
        return json.loads(data)

    def _stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
