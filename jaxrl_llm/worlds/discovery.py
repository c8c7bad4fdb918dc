"""Finding the other side: an address, a file that holds some, or a DNS name."""

import asyncio
import os
import socket
from pathlib import Path

from jaxrl_llm.types import UserError
from jaxrl_llm.worlds.dialling import host_and_port

FORMS = "host:port, file:PATH (one host:port a line) or dns:NAME:PORT (every address of the name)"


def check_place(place: str, what: str) -> None:
    """Raises UserError naming `what` unless `place` is of one of the three forms."""
    kind, colon, rest = place.partition(":")
    if kind == "file" and colon:
        if not rest:
            raise UserError(f"{what} = {place!r} names no file; use {FORMS}")
    else:
        host_and_port(rest if kind == "dns" else place, what)


async def addresses(place: str) -> list[str]:
    """The addresses that `place` stands for at this moment; none while its file or name does not exist."""
    kind, _, rest = place.partition(":")
    if kind == "file":
        try:
            lines = Path(rest).read_text().split("\n")[:-1]  # what does not end in a newline is still being written
        except OSError:
            return []
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if kind == "dns":
        name, port = host_and_port(rest, place)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError:
            return []
        hosts = sorted({(family, address[0]) for family, _, _, _, address in found})
        return [f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}" for family, host in hosts]
    return [place]


def announce(path: Path, address: str) -> None:
    """Write a file for `file:PATH` in one atomic step. Raises UserError if it cannot be."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(f"{address}\n")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"the address {address} cannot be written to {path} ({error.strerror})") from None
