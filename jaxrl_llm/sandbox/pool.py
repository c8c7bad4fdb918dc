"""Many programs at once: each in a jail of its own that stands ready before the program is known."""

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType

from jaxrl_llm.sandbox.jail import Jail
from jaxrl_llm.sandbox.languages import START
from jaxrl_llm.sandbox.limits import Limits, Outcome
from jaxrl_llm.sandbox.run import Cell, JailError


class SandboxPool:
    """`workers` threads, each with one jail waiting; safe to use from any thread.

    A jail runs one program and is torn down, so that programs leave nothing behind for one another.
    """

    def __init__(self, jail: Jail, limits: Limits, *, workers: int):
        self._jail, self._limits = jail, limits
        self._jobs: queue.SimpleQueue[tuple[bytes, Future[Outcome]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"sandbox-{index}", daemon=True) for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: bytes) -> "Future[Outcome]":
        """The outcome to come of a `languages.job`; a JailError if no jail could be opened, even at the second try."""
        future: Future[Outcome] = Future()
        self._jobs.put((job, future))
        return future

    def run(self, jobs: Sequence[bytes]) -> list[Outcome]:
        """The outcomes of all jobs, in their order. Raises JailError like `submit`'s future."""
        return [future.result() for future in [self.submit(job) for job in jobs]]

    def close(self) -> None:
        """End the threads after the jobs that were submitted before."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "SandboxPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def _work(self) -> None:
        while True:
            waiting = self._open()
            taken = self._jobs.get()
            try:
                if taken is None:
                    return
                job, future = taken
                try:
                    future.set_result(self._run(waiting, job))
                except BaseException as error:
                    future.set_exception(error)
            finally:
                if waiting is not None:
                    waiting.close()

    def _open(self) -> Cell | None:
        """A jail that stands ready; None if just now there is no room for one."""
        try:
            return Cell(self._jail, START, self._limits)
        except JailError:
            return None

    def _run(self, waiting: Cell | None, job: bytes) -> Outcome:
        # A jail that did not open may have been hit by whatever emptied the machine of processes or memory.
        with contextlib.suppress(JailError):
            if waiting is not None:
                return waiting.run(job)
        with Cell(self._jail, START, self._limits) as another:
            return another.run(job)
