"""A sampler world's servers and its registration, in one event loop with a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

import grpc

from jaxrl_llm.sampler.proto.methods import add_servicer
from jaxrl_llm.sampler.serving.access import Access
from jaxrl_llm.sampler.serving.grpc_server import start_server
from jaxrl_llm.weights.transfer import Lender
from jaxrl_llm.worlds.agreement import Facts
from jaxrl_llm.worlds.dialling import Credentials
from jaxrl_llm.worlds.own_loop import run_own_loop
from jaxrl_llm.worlds.registration import stay_registered
from jaxrl_llm.worlds.sampler_world import SamplerWorld
from jaxrl_llm.worlds.servicers import WeightsServicer, WorldSamplerServicer, WorldServicer
from jaxrl_llm.worlds.shelf import Shelf

_GRACE_S = 2.0


class SamplerServer:
    """Up from `with` on; `port` is where it listens. `over` is done when the world has nothing more to do: with None
    when the run has finished, or with what ended it."""

    def __init__(
        self,
        world: SamplerWorld,
        shelf: Shelf,
        access: Access,
        *,
        port: int,
        max_calls: int,
        lender: Lender | None = None,
    ):
        self._lender = lender
        self._world, self._shelf, self._access = world, shelf, access
        self._port, self._max_calls = port, max_calls
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: Future[int] = Future()
        self.over: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="worlds")

    def __enter__(self) -> "SamplerServer":
        self._thread.start()
        try:
            self.port = self._started.result()
        except BaseException:
            self._thread.join()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def register(
        self,
        trainer: str,
        own_address: str,
        facts: Facts,
        credentials: Credentials,
        *,
        patience_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Go to the trainer by itself, and end with its run; see `stay_registered`."""

        async def register() -> None:
            staying = asyncio.ensure_future(
                stay_registered(self._world, trainer, own_address, facts, credentials, patience_s=patience_s, say=say)
            )
            finished = asyncio.ensure_future(self._world.finished.wait())
            await asyncio.wait((staying, finished), return_when=asyncio.FIRST_COMPLETED)
            if finished.done():
                staying.cancel()
                return
            finished.cancel()
            staying.result()

        def ended(future: Future[None]) -> None:
            if self.over.done() or future.cancelled():
                return
            if error := future.exception():
                self.over.set_exception(error)
            else:
                self.over.set_result(None)

        asyncio.run_coroutine_threadsafe(register(), self._loop).add_done_callback(ended)

    @property
    def failure(self) -> str | None:
        """Why the sampler can sample no more."""
        return self._world.failure

    def _run(self) -> None:
        run_own_loop(self._loop, self._serve, self._started)

    async def _serve(self) -> None:
        world = self._world

        def add(server: grpc.aio.Server) -> None:
            add_servicer(WorldSamplerServicer(world.service), server)
            add_servicer(WorldServicer(world), server, "World")
            add_servicer(WeightsServicer(self._shelf, self._lender), server, "Weights")

        server, port = await start_server(add, self._access, port=self._port, max_calls=self._max_calls)
        self._started.set_result(port)
        try:
            await self._stop.wait()
            await world.close()
        finally:
            await server.stop(_GRACE_S)
