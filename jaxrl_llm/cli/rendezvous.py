"""Before JAX connects: every process tells the first one what it is, and hears whether they belong together.

JAX's own start-up ends the process from C++ when somebody is missing, and does not notice processes that count each
other differently. This meeting happens on the coordinator's port, before its service takes it over, and ends in one
message.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping

from jaxrl_llm.types import UserError

_LINE_BYTES = 2**20
_HELLO_S, _RETRY_S, _GRACE_S = 5.0, 0.2, 5.0

Facts = Mapping[str, str]


def meet(address: tuple[str, int], index: int, count: int, facts: Facts, *, timeout_s: float) -> None:
    """Returns in all `count` processes once all have come to `address`, the first one's host and port.

    Raises UserError in all of them if within `timeout_s` seconds not all have come, if they were started as different
    numbers of processes or under one index, and naming the keys of `facts` in which one differs from the first.
    """
    deadline = time.monotonic() + timeout_s
    if index == 0:
        _receive(address, count, facts, deadline, timeout_s)
    else:
        _introduce(address, index, count, facts, deadline, timeout_s)


def differing(index: int, theirs: Facts, first: Facts) -> str:
    """What process `index` says otherwise than the first one, in words; empty if nothing."""
    keys = [key for key in {**first, **theirs} if first.get(key) != theirs.get(key)]
    if not keys:
        return ""
    shown = ", ".join(
        f"{key} ({first.get(key, 'nothing')} in process 0, {theirs.get(key, 'nothing')})" for key in keys[:6]
    )
    more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
    return f"process {index} differs from process 0 in {shown}{more}; start all processes from the same files"


def _receive(address: tuple[str, int], count: int, facts: Facts, deadline: float, timeout_s: float) -> None:
    came: dict[int, socket.socket] = {}
    guests: list[socket.socket] = []
    problem = ""
    try:
        with _listen(address, count) as server:
            while len(came) < count - 1 and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    guest, _ = server.accept()
                except TimeoutError:
                    break
                hello = _read(guest, _HELLO_S)
                if hello is None:  # no process of ours
                    guest.close()
                    continue
                guests.append(guest)
                index, trouble = hello["index"], ""
                if hello["count"] != count:
                    trouble = (
                        f"process {index} was started as one of {hello['count']} processes, process 0 as one of {count}"
                    )
                elif index in came or not 0 < index < count:
                    trouble = f"two processes were started as process {index} of {count}"
                else:
                    came[index] = guest
                    trouble = differing(index, hello["facts"], facts)
                if trouble and not problem:  # those still on their way are to hear of it too
                    problem, deadline = trouble, min(deadline, time.monotonic() + _GRACE_S)
        if not problem and len(came) < count - 1:
            missing = [str(index) for index in range(1, count) if index not in came]
            problem = (
                f"waited {timeout_s:g} s at {address[0]}:{address[1]} for {count} processes, but of process "
                f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''} nothing was heard; start all of them "
                "with the same device.distributed.coordinator, or raise device.distributed.timeout_s"
            )
        for guest in guests:
            _write(guest, {"problem": problem})
    finally:
        for guest in guests:
            guest.close()
    if problem:
        raise UserError(problem)


def _introduce(
    address: tuple[str, int], index: int, count: int, facts: Facts, deadline: float, timeout_s: float
) -> None:
    hello = {"index": index, "count": count, "facts": dict(facts)}
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(left, _HELLO_S)) as there:
                _write(there, hello)
                answer = _read(there, left + 2 * _GRACE_S)
        except OSError as error:
            answer, reason = None, error.strerror or str(error)
        if answer is not None:
            if answer["problem"]:
                raise UserError(answer["problem"])
            return
        time.sleep(_RETRY_S)
    raise UserError(
        f"process {index} of {count} did not reach process 0 at {address[0]}:{address[1]} within {timeout_s:g} s "
        f"({reason}); check that it runs, device.distributed.coordinator and the firewall"
    )


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host in ("::1", "[::1]")


def _listen(address: tuple[str, int], count: int) -> socket.socket:
    host, port = address
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host.strip("[]"), port), family=family, backlog=count)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=count)
        return socket.create_server(("", port), backlog=count)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({error.strerror}); choose another in "
            "device.distributed.coordinator, or end what holds it"
        ) from None


def _write(there: socket.socket, message: Mapping) -> None:
    with contextlib.suppress(OSError):  # gone: it will hear nothing, and be missed by whoever needs it
        there.sendall(json.dumps(message).encode() + b"\n")


def _read(there: socket.socket, timeout_s: float) -> dict | None:
    """One line of JSON from one of our processes; None from anybody else."""
    there.settimeout(timeout_s)
    try:
        with there.makefile("rb") as lines:
            message = json.loads(lines.readline(_LINE_BYTES))
    except (OSError, ValueError):
        return None
    ours = isinstance(message, dict) and (
        isinstance(message.get("problem"), str)
        or (
            isinstance(message.get("index"), int)
            and isinstance(message.get("count"), int)
            and isinstance(message.get("facts"), dict)
        )
    )
    return message if ours else None
