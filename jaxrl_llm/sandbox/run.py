"""One program, run in jail from start to end."""

import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from jaxrl_llm.sandbox.jail import Jail
from jaxrl_llm.sandbox.limits import Ending, Limits, Outcome

_CHUNK = 2**16
# How often the memory of all processes together is looked at: between two looks they can take a few hundred MiB more.
_LOOK_S = 0.05


READY = b"\0"


class JailError(RuntimeError):
    """The jail itself failed: nothing is known about the program that should have run in it."""


class Cell:
    """A program started in jail that waits for its standard input: run once, then gone.

    The first byte that it writes must be READY: whatever goes wrong before is the jail's fault, not the program's. Must
    be used and closed by the thread that made it: bubblewrap dies with the thread that started it.

    Raises JailError if no process can be started.
    """

    def __init__(self, jail: Jail, program: Sequence[str], limits: Limits):
        self._limits = limits
        seccomp = os.memfd_create("seccomp")
        try:
            os.write(seccomp, jail.seccomp)
            os.lseek(seccomp, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                jail.command(program, limits, seccomp_fd=seccomp),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(seccomp,),
                cwd="/",
                env={},
            )
        except OSError as error:
            raise JailError(f"no jail could be started: {error}") from None
        finally:
            os.close(seccomp)

    @property
    def pid(self) -> int:
        """The outermost process of the jail."""
        return self._process.pid

    def __enter__(self) -> "Cell":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def close(self) -> None:
        """End every process of the jail, whatever they are doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def run(self, stdin: bytes) -> Outcome:
        """Hand over `stdin`, all of which need not be read, and wait for the end, at most `wall_s`.

        Raises JailError if the program never started.
        """
        process, limits = self._process, self._limits
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        started = time.monotonic()
        read = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        left = memoryview(stdin)
        went_over: Ending | None = None
        with selectors.DefaultSelector() as selector:
            for pipe in (process.stdin, process.stdout, process.stderr):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_WRITE if pipe is process.stdin else selectors.EVENT_READ)
            looked = 0.0
            while went_over is None and any(key.fd in read for key in selector.get_map().values()):
                now = time.monotonic()
                if now - started > limits.wall_s:
                    went_over = "time"
                elif now - looked > _LOOK_S:
                    looked = now
                    if _resident_bytes(process.pid) > limits.memory_bytes:
                        went_over = "memory"
                for key, _ in selector.select(min(_LOOK_S, max(0.0, started + limits.wall_s - now))):
                    if key.fd not in read:
                        left = self._send(selector, process.stdin, left)
                    elif not self._receive(selector, key, read[key.fd]):
                        went_over = went_over or "output"
        if went_over is None:
            # Both outputs are closed; the program itself may live on without them.
            try:
                process.wait(max(0.0, started + limits.wall_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                went_over = "time"
        seconds = time.monotonic() - started
        ready, stdout, stderr = self._said(*read.values())
        if not ready:
            self.close()
            raise JailError(f"a jail did not open within {seconds:.1f} s: {stderr.decode(errors='replace').strip()!r}")
        if went_over is not None:
            self.close()
            return Outcome(went_over, 0, stdout, stderr, seconds)
        # bubblewrap answers for a program that a signal ended as shells do.
        code = process.returncode
        if code > 128:
            return Outcome("signalled", code - 128, stdout, stderr, seconds)
        return Outcome("exited", code, stdout, stderr, seconds)

    def _said(self, stdout: bytearray, stderr: bytearray) -> tuple[bool, bytes, bytes]:
        most = self._limits.output_bytes
        ready = stdout[: len(READY)] == READY
        return ready, bytes(stdout[len(READY) : len(READY) + most]), bytes(stderr[:most])

    def _receive(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, into: bytearray) -> bool:
        """Whether the output is still within its limit."""
        data = os.read(key.fd, _CHUNK)
        if not data:
            selector.unregister(key.fileobj)
        into += data
        return len(into) <= self._limits.output_bytes

    @staticmethod
    def _send(selector: selectors.BaseSelector, pipe: IO[bytes], data: memoryview) -> memoryview:
        """What is left of `data` after as much as the pipe takes; the pipe is closed behind its last byte."""
        try:
            data = data[os.write(pipe.fileno(), data[:_CHUNK]) :] if data else data
        except BrokenPipeError:
            data = memoryview(b"")  # the program is gone, or has closed its end
        if not data:
            selector.unregister(pipe)
            pipe.close()
        return data


def _resident_bytes(root: int) -> int:
    """Memory that `root` and its descendants hold, shared pages once for each; 0 of those that are gone."""
    total, pids = 0, [root]
    page = os.sysconf("SC_PAGE_SIZE")
    while pids:
        pid = pids.pop()
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
            for thread in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        except OSError:
            continue
    return total
