"""The other side of `pool.WorkerPool`: one process that forks workers, and what a worker does.

The forking process imports what the workers will call, once, so that a new worker is ready in milliseconds. It has one
thread and is started without anything of the parent's but its module path: it must import neither JAX nor this
package's own types. When the parent goes it ends, and its workers with it.
"""

import array
import contextlib
import ctypes
import importlib
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")
_LONGEST_COMMAND = 1 << 16


def send_frame(connection: socket.socket, value: Any) -> None:
    """One JSON value. ASCII, so that half of a surrogate pair travels too."""
    data = json.dumps(value).encode("ascii")
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(receive: Callable[[int], bytes], longest: int) -> Any:
    """The next JSON value, by `receive(most bytes)`. Raises EOFError at the end and ValueError for what is no frame."""
    (length,) = _LENGTH.unpack(_exactly(receive, _LENGTH.size))
    if length > longest:
        raise ValueError(f"a frame of {length} bytes")
    return json.loads(_exactly(receive, length))


def _exactly(receive: Callable[[int], bytes], length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = receive(min(length - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def main(control_fd: int) -> None:
    """Fork and kill workers as the parent asks, over a SOCK_SEQPACKET socket, until it goes."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = json.loads(control.recv(_LONGEST_COMMAND))
    functions, problem = _import(start["functions"])
    control.send(json.dumps({"problem": problem}).encode())
    if problem is not None:
        return
    workers: set[int] = set()
    with contextlib.suppress(OSError):
        while True:
            data, fds = _receive(control)
            if not data:
                break
            command = json.loads(data)
            if command["kill"] in workers:
                workers.remove(command["kill"])
                _end(command["kill"])
            pid = None
            if command["do"] == "fork":
                pid = _fork(control, fds[0], functions, start["memory_mb"])
                workers.add(pid)
            control.send(json.dumps({"pid": pid}).encode())
    for pid in workers:
        _end(pid)


def _import(paths: dict[str, str]) -> tuple[dict[str, Callable[..., Any]], str | None]:
    """The functions, or what is wrong with one; a module may prepare itself in its `warm_up`."""
    functions = {}
    for name, path in paths.items():
        module, _, function = path.partition(":")
        try:
            imported = importlib.import_module(module)
            functions[name] = getattr(imported, function)
            if hasattr(imported, "warm_up"):
                imported.warm_up()
        except BaseException as error:
            return {}, _ascii(f"{path}: {type(error).__name__}: {error}")
        if not callable(functions[name]):
            return {}, f"{path} is not a function"
    return functions, None


def _receive(control: socket.socket) -> tuple[bytes, array.array]:
    fds = array.array("i")
    data, ancillary, _, _ = control.recvmsg(_LONGEST_COMMAND, socket.CMSG_SPACE(fds.itemsize))
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload)
    return data, fds


def _fork(control: socket.socket, fd: int, functions: dict[str, Callable[..., Any]], memory_mb: int) -> int:
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    status = 1
    try:
        control.close()
        _limit(memory_mb)
        _serve(socket.socket(fileno=fd), functions)
        status = 0
    finally:
        os._exit(status)  # never back into the parent's frames


def _limit(memory_mb: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(jobs: socket.socket, functions: dict[str, Callable[..., Any]]) -> None:
    with contextlib.suppress(EOFError):
        while True:
            job = receive_frame(jobs.recv, longest=1 << 31)
            reply = _call(functions[job["function"]], job["arguments"])
            send_frame(jobs, reply)
            if "memory" in reply:
                return  # what is left of it is no good place for the next


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        value = function(**arguments)
        number = float(value)
    except MemoryError:
        return {"failed": "it ran out of memory", "memory": True}
    except Exception as error:
        return {"failed": _ascii(f"it raised {type(error).__name__}: {error}")}
    if not math.isfinite(number):
        return {"failed": f"it returned {number}"}
    return {"value": number}


def _ascii(text: str) -> str:
    return text[:200].encode("ascii", "backslashreplace").decode()


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
