"""Weights from devices to devices of another process, past the host, by jax.experimental.transfer.

What JAX 0.10 does, and what this makes of it: a pull moves arrays between equal layouts only, so single shards travel;
pulling an id that was never offered blocks for ever, so whoever pulls has a watchdog; what is offered and never pulled
stays in memory, so a lender whose pulls fail stops lending. Nothing is authenticated or encrypted.
"""

import ipaddress
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from jaxrl_llm.types import UserError

_MOST_FAILED = 2


@dataclass(frozen=True)
class Part:
    """A shard of the leaf `path`, of this shape and dtype; `start` is where in the leaf it begins."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    start: tuple[int, ...]


@dataclass(frozen=True)
class Loan:
    """What `Lender.lend` put up: the id to pull, and what comes, in this order."""

    id: int
    parts: tuple[Part, ...]


def _server(host: str, device: jax.Device) -> transfer.TransferServer:
    """Raises UserError unless `host` is an address of this machine that others could reach."""
    try:
        ip = ipaddress.ip_address(socket.getaddrinfo(host.strip("[]"), None)[0][4][0])
        if ip.is_unspecified:
            raise UserError(
                f"weights cannot go from device to device: {host} names no one address of this machine; advertise one, "
                "or set sampler.remote.transfer=false"
            )
        place = f"[{ip}]:0" if ip.version == 6 else f"{ip}:0"
        return transfer.start_transfer_server(device.client, place, [place])
    except (OSError, jax.errors.JaxRuntimeError) as error:
        raise UserError(
            f"weights cannot go from device to device: no transfer server on {host} ({str(error).splitlines()[0]}); "
            "set sampler.remote.transfer=false"
        ) from None


class Lender:
    """Puts arrays of this process up for pulls by others, at `address`. `host` is this machine's own name or address;
    UserError if it is not."""

    def __init__(self, host: str):
        self._server = _server(host, jax.devices()[0])
        self.address = f"{host}:{self._server.address().rpartition(':')[2]}"
        self._failed = 0

    def lend(self, leaves: Mapping[str, jax.Array]) -> Loan:
        """For one pull. Raises UserError if pulls have failed before."""
        if self._failed >= _MOST_FAILED:
            raise UserError(f"{self._failed} pulls from {self.address} have failed")
        parts, arrays = [], []
        for path, leaf in leaves.items():
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    start = tuple(part.start or 0 for part in shard.index)
                    parts.append(Part(path, shard.data.shape, leaf.dtype.name, start))
                    arrays.append(shard.data)
        id = secrets.randbits(62)
        self._server.await_pull(id, arrays)
        return Loan(id, tuple(parts))

    def failed(self) -> None:
        """Something that was lent will never be pulled."""
        self._failed += 1


class Borrower:
    """Pulls what a Lender put up onto `devices` of this process."""

    def __init__(self, host: str, devices: Sequence[jax.Device]):
        self._server = _server(host, devices[0])
        self._devices = devices
        self._connections: dict[str, Any] = {}
        self._given_up: list[threading.Thread] = []

    @property
    def hangs(self) -> bool:
        """Whether a thread still waits for what was given up: it cannot be ended, and may abort a process that ends."""
        return any(thread.is_alive() for thread in self._given_up)

    def pull(self, address: str, loan: Loan, *, timeout_s: float) -> dict[str, list[tuple[Part, jax.Array]]]:
        """The parts of every leaf. Raises UserError if they have not come within `timeout_s` seconds, or an error ended
        the transfer; a thread may then wait for them until this process ends."""
        specs = [
            jax.ShapeDtypeStruct(
                part.shape, np.dtype(part.dtype), sharding=SingleDeviceSharding(self._devices[i % len(self._devices)])
            )
            for i, part in enumerate(loan.parts)
        ]
        came: list[Any] = []

        def work() -> None:
            try:
                if address not in self._connections:
                    self._connections[address] = self._server.connect(address)
                came.append(jax.block_until_ready(self._connections[address].pull(loan.id, specs)))
            except Exception as error:
                came.append(error)

        thread = threading.Thread(target=work, name=f"pull from {address}", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not came:
            self._given_up.append(thread)
            raise UserError(f"the transfer server {address} sent nothing for {timeout_s:g} s")
        if isinstance(came[0], Exception):
            self._connections.pop(address, None)
            raise UserError(f"the transfer from {address} failed: {str(came[0]).splitlines()[0]}")
        leaves: dict[str, list[tuple[Part, jax.Array]]] = {}
        for part, array in zip(loan.parts, came[0], strict=True):
            leaves.setdefault(part.path, []).append((part, array))
        return leaves


def assembled(shape: tuple[int, ...], parts: Sequence[tuple[Part, jax.Array]]) -> np.ndarray:
    """A leaf on the host from its parts, which must cover it. Raises UserError if they do not."""
    if sum(array.size for _, array in parts) != int(np.prod(shape, dtype=np.int64)):
        raise UserError(f"the parts of the leaf {parts[0][0].path} do not make up its shape {shape}")
    if len(parts) == 1:
        return np.asarray(parts[0][1]).reshape(shape)
    whole = np.empty(shape, parts[0][1].dtype)
    for part, array in parts:
        whole[tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))] = np.asarray(array)
    return whole
