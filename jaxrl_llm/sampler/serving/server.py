"""Both servers in one event loop, in a thread of its own."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass

import uvicorn

from jaxrl_llm.sampler.serving.access import Access
from jaxrl_llm.sampler.serving.grpc_server import start_grpc
from jaxrl_llm.sampler.serving.http_app import Served, http_app
from jaxrl_llm.types import UserError


@dataclass(frozen=True)
class Ports:
    """Where the servers listen; `jetstream` says whether JetStream's own service is on the gRPC port."""

    grpc: int
    http: int
    jetstream: bool


@contextlib.contextmanager
def serving(
    served: Served, access: Access, *, grpc_port: int, http_port: int, max_calls: int, grace_s: int = 5
) -> Generator[Ports]:
    """Both servers up inside the block; at its end they take no more calls and give open ones `grace_s` to finish.

    `max_calls` bounds the calls each server answers at a time. Raises UserError if a port cannot be had.
    """
    started: Future[Ports] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        grpc_server = await start_grpc(served.service, served.tokenizer, access, port=grpc_port, max_calls=max_calls)
        try:
            listening = _listen(access.host, http_port)
        except UserError:
            await grpc_server.server.stop(None)
            raise
        http_server = uvicorn.Server(
            uvicorn.Config(
                http_app(served, access, max_calls=max_calls),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                ssl_certfile=access.tls.certificate if access.tls else None,
                ssl_keyfile=access.tls.key if access.tls else None,
                # Connections, idle ones included; requests are counted by the application itself.
                limit_concurrency=4 * max_calls,
                timeout_graceful_shutdown=grace_s,
            )
        )
        http = asyncio.ensure_future(http_server.serve(sockets=[listening]))
        while not http_server.started and not http.done():
            await asyncio.sleep(0.01)
        started.set_result(Ports(grpc_server.port, listening.getsockname()[1], grpc_server.jetstream))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((stopping, http), return_when=asyncio.FIRST_COMPLETED)
        http_server.should_exit = True
        await asyncio.gather(http, grpc_server.server.stop(grace_s))
        while http_server.server_state.connections:  # closed, but the event loop has to see it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="servers")
    thread.start()
    try:
        yield started.result()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed already where a server could not start
            loop.call_soon_threadsafe(stop.set)
        thread.join()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), port))
    except OSError as error:
        listening.close()
        raise UserError(
            f"cannot listen on {host}:{port} for HTTP ({error.strerror}); choose another --http-port"
        ) from None
    return listening
