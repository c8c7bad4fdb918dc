"""Channels to other worlds: the token, the certificate, and how long a lost connection waits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from jaxrl_llm.sampler.proto import MESSAGE_BYTES
from jaxrl_llm.sampler.proto.methods import Service, calls
from jaxrl_llm.sampler.serving.access import is_loopback
from jaxrl_llm.types import UserError

_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection: nothing is inherited from a dead one
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True)
class Credentials:
    """`authority` is the PEM file of who signed the other side's certificate; None: plain connections, which carry a
    token on this machine only."""

    token: str | None = None
    authority: Path | None = None

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What goes with every call."""
        return [("authorization", f"Bearer {self.token}")] if self.token else []

    def channel(self, target: str) -> grpc.aio.Channel:
        """Raises UserError for a token that would leave this machine unencrypted, and for an unreadable authority."""
        if self.authority is None:
            if self.token is not None and not is_loopback(target.rpartition(":")[0]):
                raise UserError(
                    f"a token for {target} would travel unencrypted; name the certificate's authority (TLS)"
                )
            return grpc.aio.insecure_channel(target, options=_OPTIONS)
        try:
            authority = self.authority.read_bytes()
        except OSError as error:
            raise UserError(f"certificate authority {self.authority} cannot be read ({error.strerror})") from None
        return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(authority), options=_OPTIONS)

    def calls(self, channel: grpc.aio.Channel, service: Service) -> Callable[..., Any]:
        """call("Method", request, timeout=seconds) for every method of `service`."""
        methods = calls(channel, service)
        return lambda method, request, **how: methods[method](request, metadata=self.metadata, **how)


def why(error: Exception) -> str:
    """An error of a call in words."""
    if isinstance(error, grpc.RpcError):
        code, details = error.code(), (error.details() or "").strip()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return "no answer in time"
        if code == grpc.StatusCode.UNAVAILABLE and ("connect" in details.lower() or "socket" in details.lower()):
            return "the connection is gone or was refused"
        return details or code.name.lower()
    return str(error) or type(error).__name__


def own_address(host: str, port: int, advertise: str | None, option: str) -> str:
    """host:port under which others reach what listens on `host`. Raises UserError naming the `option` to give if that
    is no one machine's address."""
    if advertise is not None:
        return advertise
    bare = host.strip("[]")
    if bare in ("0.0.0.0", "::"):
        raise UserError(f"listening on {host} does not say where others reach this machine; give {option} too")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def own_host(listen: str, advertise: str | None) -> str:
    """Where others reach this machine: the host of `advertise`, or the one it listens on."""
    return host_and_port(advertise, "the advertised address")[0] if advertise else listen


def host_and_port(text: str, what: str) -> tuple[str, int]:
    """Of "host:port". Raises UserError naming `what` it is."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) >= 2**16:
        raise UserError(f"{what} = {text!r} is not of the form host:port")
    return host, int(port)
