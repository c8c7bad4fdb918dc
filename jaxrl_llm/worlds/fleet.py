"""All samplers in other processes: a server where they register and fetch weights, a link to each, one thread."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from jaxrl_llm.rollout.exchange import Exchange
from jaxrl_llm.rollout.requests import HowToSample
from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.proto.methods import add_servicer
from jaxrl_llm.sampler.serving.access import Access
from jaxrl_llm.sampler.serving.grpc_server import start_server
from jaxrl_llm.types import Params, PolicyWeights, RunFailedError, UserError
from jaxrl_llm.weights.publisher import Publisher
from jaxrl_llm.weights.snapshot import named
from jaxrl_llm.weights.transfer import Lender
from jaxrl_llm.worlds.agreement import PROTOCOL, Facts, disagreement
from jaxrl_llm.worlds.dialling import Credentials, host_and_port, own_address, own_host
from jaxrl_llm.worlds.discovery import addresses
from jaxrl_llm.worlds.distribution import Distribution
from jaxrl_llm.worlds.link import Link, LinkOptions, Trainer
from jaxrl_llm.worlds.own_loop import run_own_loop
from jaxrl_llm.worlds.servicers import WeightsServicer
from jaxrl_llm.worlds.shelf import Shelf

_MAX_CALLS, _GRACE_S, _LOOK_S, _DISCOVER_S, _FORGOTTEN_S = 1024, 1.0, 0.25, 3.0, 900.0

_ADVERTISE = "sampler.remote.advertise"

Note = Callable[[str, str, dict[str, Any]], None]
"""(kind of event, plain words, further facts)"""


@dataclass(frozen=True)
class FleetOptions:
    """`port` and `advertise`: where samplers reach the trainer. `workers`: the samplers it dials (see `discovery`).
    Without any sampler for `patience_s` seconds the run fails (None: others sample too). With
    `lends`, versions travel from device to device where they can."""

    port: int
    advertise: str | None
    workers: tuple[str, ...]
    fan_out: int
    patience_s: float | None
    lends: bool
    links: LinkOptions


class Fleet:
    """A rollout.exchange.Driver of many samplers, and the board that their weights go to.

    Between `with` and its end samplers may register; from `start` to `stop` they sample.
    """

    def __init__(
        self,
        run: str,
        facts: Facts,
        how: HowToSample,
        access: Access,
        credentials: Credentials,
        options: FleetOptions,
        note: Note,
        *,
        to_host: Callable[[Params], Iterable[tuple[str, np.ndarray]]] = named,
    ):
        self._facts = facts
        self._trainer = Trainer(run, uuid.uuid4().hex, facts, how, credentials)
        self._access, self._options, self._note, self._to_host = access, options, note, to_host
        self._loop = asyncio.new_event_loop()
        self._shelf = Shelf()
        self._lender = Lender(own_host(access.host, options.advertise)) if options.lends else None
        self._links: dict[str, tuple[Link, asyncio.Task[None]]] = {}
        self._registered: set[str] = set()
        self._refusals: set[str] = set()
        self._started: Future[int] = Future()
        self._closing = asyncio.Event()
        self._exchange: Exchange | None = None
        self._watching: list[asyncio.Task[None]] = []
        self.finished = self._quiet = False
        self._thread = threading.Thread(target=self._own, name="worlds", daemon=True)

    def __enter__(self) -> "Fleet":
        """Raises UserError if the port cannot be had."""
        self._thread.start()
        try:
            self.port = self._started.result()
        except BaseException:
            self._thread.join()
            raise
        self.address = own_address(self._access.host, self.port, self._options.advertise, _ADVERTISE)
        self._distribution = Distribution(self._shelf, self.address, self._options.fan_out, self._loop)
        self._publisher = Publisher(
            self._distribution.put, self._fail, to_host=self._to_host, lends=self._lender is not None
        )
        self._publisher.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of every sampler; they hear whether the run has `finished`."""
        self._publisher.stop()
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    # The board of the samplers' weights.

    def publish(self, weights: PolicyWeights) -> None:
        """Hand weights in their wire form on to all samplers; returns at once."""
        self._publisher.publish(weights)

    def report(self) -> dict[str, Any]:
        """Of a record: how many samplers took a version since the last call, bytes, and the slowest one's seconds."""
        pushes = self._distribution.take_pushes()
        return {
            "pushes": pushes.count,
            "push_bytes": pushes.bytes,
            "push_pull_s": pushes.pull_s,
            "push_load_s": pushes.load_s,
            "push_detours": pushes.detours,
        }

    # A driver of samplers.

    def start(self, exchange: Exchange) -> None:
        """Attach every sampler that has registered, is named or is found, now and later."""
        asyncio.run_coroutine_threadsafe(self._begin(exchange), self._loop).result()

    def stop(self) -> None:
        """Nothing more is given out: `exchange.stopping` says so. The samplers are let go of at the end of `with`."""

    # The event loop's thread.

    def _own(self) -> None:
        try:
            run_own_loop(self._loop, self._serve, self._started)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        def add(server: grpc.aio.Server) -> None:
            add_servicer(WeightsServicer(self._shelf, self._lender), server, "Weights")
            add_servicer(self, server, "Trainer")

        server, port = await start_server(
            add, self._access, port=self._options.port, max_calls=_MAX_CALLS, on_refused=self._refused
        )
        self._started.set_result(port)
        try:
            await self._closing.wait()
            await self._let_go()
        finally:
            await server.stop(_GRACE_S)

    async def _let_go(self) -> None:
        for task in self._watching:
            task.cancel()
        if self._exchange is not None:
            self._write_down(self._exchange)
        self._quiet = True  # that samplers are let go of is not worth a line
        links = list(self._links.values())
        await asyncio.gather(*(link.detach(finished=self.finished) for link, _ in links), return_exceptions=True)
        tasks = [task for _, task in links]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def Register(
        self, request: rl_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> rl_pb2.RegisterResponse:
        """A sampler says where it is."""
        try:
            host_and_port(request.address, "the sampler's address")
        except UserError as error:
            return rl_pb2.RegisterResponse(refusal=str(error))
        them = f"the sampler at {request.address}"
        refusal = disagreement(self._facts, PROTOCOL, request.facts, request.protocol, them=them)
        if refusal:
            self._note_once("refused", f"sampler {request.address} is not taken: {refusal}", sampler=request.address)
        else:
            self._registered.add(request.address)
            if self._exchange is not None:
                self._link(request.address)
        return rl_pb2.RegisterResponse(refusal=refusal)

    async def _begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        for address in self._registered:
            self._link(address)
        self._watching = [asyncio.create_task(self._watch(exchange)), asyncio.create_task(self._discover())]
        for task in self._watching:
            task.add_done_callback(self._ended)

    def _link(self, address: str) -> None:
        """Make sure that there is a link to `address`, and that it does not sleep."""
        if address in self._links:
            self._links[address][0].poke()
            return
        assert self._exchange is not None
        link = Link(
            address,
            self._trainer,
            self._distribution,
            self._options.links,
            self._tell,
            transfer=self._lender is not None,
        )
        task = asyncio.create_task(link.run(self._exchange))
        task.add_done_callback(self._ended)
        self._links[address] = link, task

    async def _discover(self) -> None:
        """Dial the named samplers, and those that appear; forget those that have gone for good."""
        while True:
            listed: set[str] = set()
            for place in self._options.workers:
                listed.update(await addresses(place))
            for address in listed - self._links.keys():
                self._link(address)
            for address, (link, task) in list(self._links.items()):
                if address not in listed and link.away_s > _FORGOTTEN_S:
                    task.cancel()
                    del self._links[address]
                    self._registered.discard(address)
            await asyncio.sleep(_DISCOVER_S)

    async def _watch(self, exchange: Exchange) -> None:
        """Write down what happens, and end a run that has nobody to sample for it."""
        seen, patience_s = time.monotonic(), self._options.patience_s
        while True:
            self._write_down(exchange)
            if any(link.attached for link, _ in self._links.values()):
                seen = time.monotonic()
            elif patience_s is not None and time.monotonic() - seen > patience_s:
                raise RunFailedError(f"no sampler has been there for {patience_s:g} s; see the run's events.jsonl")
            await asyncio.sleep(_LOOK_S)

    def _write_down(self, exchange: Exchange) -> None:
        for event in exchange.take_events():
            self._note(event.kind, event.words, {"sampler": event.sampler, "group": event.group_id})

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._exchange is not None:
            self._exchange.fail(error)

    def _tell(self, kind: str, sampler: str, words: str) -> None:
        if not self._quiet:
            self._note(kind, words, {"sampler": sampler})

    def _note_once(self, kind: str, words: str, **facts: str) -> None:
        if words not in self._refusals:
            self._refusals.add(words)
            self._note(kind, words, facts)

    def _refused(self, peer: str) -> None:
        host = peer.rpartition(":")[0]
        self._note_once("refused", f"somebody at {host} showed no token or a wrong one", sampler=host)
