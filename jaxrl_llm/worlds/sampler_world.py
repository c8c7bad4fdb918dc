"""The state of a sampler in a process of its own: whose run it samples for, with which weights, what it has ready.

    Attach -> Offer (pull, check, load beside the weights in use) -> Commit (swap between two dispatches) -> Offer ...

All methods run in one event loop; what takes long runs in threads. Weights are never half applied: a version is in use
whole from one decode step on, or it is not.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import jax

from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.sampler.service import SamplerClosedError, SamplerService
from jaxrl_llm.sampler.wire_form import WireForm
from jaxrl_llm.types import Params, UserError
from jaxrl_llm.weights.snapshot import take_snapshot
from jaxrl_llm.worlds.agreement import PROTOCOL, Facts, disagreement
from jaxrl_llm.worlds.fetching import Fetched
from jaxrl_llm.worlds.shelf import Shelf


class NoSessionError(RuntimeError):
    """A call that does not belong to the session of this sampler, or comes in the wrong order."""


@dataclass
class _Session:
    id: str
    run: str
    silence_s: float
    heard: float


@dataclass(frozen=True)
class _Ready:
    version: int
    digest: str
    loaded: Params
    response: rl_pb2.OfferResponse


Fetch = Callable[[rl_pb2.OfferRequest], Awaitable[Fetched]]


class SamplerWorld:
    """`fetch` brings an offered snapshot; `make_scheduler(loaded, version)` makes the scheduler of the first one.

    `shelf` is where peers find what this sampler has. `say` tells the terminal.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        wire: WireForm,
        facts: Facts,
        *,
        fetch: Fetch,
        make_scheduler: Callable[[Params, int], Scheduler],
        shelf: Shelf,
        say: Callable[[str], None],
    ):
        self._engine, self._wire, self._facts = engine, wire, facts
        self._fetch, self._make_scheduler, self._shelf, self._say = fetch, make_scheduler, shelf, say
        self._session: _Session | None = None
        self._service: SamplerService | None = None
        self._in_use: tuple[int, str] | None = None
        self._ready: _Ready | None = None
        self._pulling: tuple[tuple[int, str], asyncio.Task[rl_pb2.OfferResponse]] | None = None
        self._committing = asyncio.Lock()
        self._attaching = asyncio.Lock()
        self._closed = False
        self.finished = asyncio.Event()

    def service(self) -> SamplerService:
        """What samples. Raises SamplerClosedError before the first weights have come."""
        if self._service is None:
            raise SamplerClosedError("the sampler has no weights yet; its trainer has to send some")
        return self._service

    @property
    def failure(self) -> str | None:
        """Why this sampler can sample no more."""
        return self._service.health.error if self._service is not None else None

    @property
    def silent_s(self) -> float | None:
        """Seconds by which the trainer has been silent for longer than it said it would be; None without a trainer."""
        if self._session is None:
            return None
        return max(0.0, time.monotonic() - self._session.heard - self._session.silence_s)

    async def attach(self, request: rl_pb2.AttachRequest) -> rl_pb2.AttachResponse:
        """Refusals are answers, not errors: the trainer writes them down."""
        if why := disagreement(self._facts, PROTOCOL, request.facts, request.protocol, them="the trainer"):
            return rl_pb2.AttachResponse(refusal=why)
        if why := self.failure:
            return rl_pb2.AttachResponse(refusal=f"the sampler has failed: {why}")
        async with self._attaching:
            known = self._session
            if known is not None and known.id != request.session:
                if known.run != request.run and not self.silent_s:
                    return rl_pb2.AttachResponse(refusal=f"the sampler works for the run {known.run!r}")
                await self._forget()
            if self._session is None:
                self._say(f"sampling for the run {request.run!r}")
                self._session = _Session(request.session, request.run, request.silence_s, time.monotonic())
            self._session.heard = time.monotonic()
            version, digest = self._in_use or (0, "")
            return rl_pb2.AttachResponse(slots=self._engine.slots, version=version, digest=digest)

    async def offer(self, request: rl_pb2.OfferRequest) -> rl_pb2.OfferResponse:
        """Raises NoSessionError for another session's."""
        self._hear(request.session)
        key = request.version, request.digest
        if self._in_use == key:
            return rl_pb2.OfferResponse(digest=request.digest)
        if self._ready is not None and (self._ready.version, self._ready.digest) == key:
            return self._ready.response
        newest = max((k[0] for k in (self._in_use, self._pulling and self._pulling[0]) if k), default=-1)
        if self._pulling is None or self._pulling[0] != key:
            if request.version <= newest:
                return rl_pb2.OfferResponse(superseded=True, failure=f"version {newest} is here or on its way already")
            if self._pulling is not None:
                self._pulling[1].cancel()
            self._pulling = key, asyncio.create_task(self._prepare(request))
        task = self._pulling[1]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self._hear(request.session)  # or the whole session is over
                return rl_pb2.OfferResponse(superseded=True, failure="a newer version was offered")
            raise

    async def commit(self, request: rl_pb2.CommitRequest) -> rl_pb2.CommitResponse:
        """Raises NoSessionError for another session's, and for a version that is not ready."""
        self._hear(request.session)
        # Whoever asks may give up waiting; what was begun goes on, and the next to ask finds it done.
        return await asyncio.shield(asyncio.create_task(self._commit(request)))

    async def _commit(self, request: rl_pb2.CommitRequest) -> rl_pb2.CommitResponse:
        async with self._committing:
            if self._in_use is None or self._in_use[0] != request.version:
                ready = self._ready
                if ready is None or ready.version != request.version:
                    raise NoSessionError(f"version {request.version} is not ready; offer it first")
                await self._swap(ready)
                self._in_use, self._ready = (ready.version, ready.digest), None
            digest = await self._read_digest() if request.verify else ""
        return rl_pb2.CommitResponse(version=request.version, digest=digest)

    def heartbeat(self, request: rl_pb2.HeartbeatRequest) -> rl_pb2.HeartbeatResponse:
        """Raises NoSessionError for another session's."""
        self._hear(request.session)
        if self._service is None:
            return rl_pb2.HeartbeatResponse()
        health = self._service.health
        return rl_pb2.HeartbeatResponse(
            state=health.state, version=health.version, in_flight=health.in_flight, error=health.error or ""
        )

    async def detach(self, request: rl_pb2.DetachRequest) -> rl_pb2.DetachResponse:
        """Raises NoSessionError for another session's."""
        self._hear(request.session)
        assert self._session is not None
        self._say(
            f"the run {self._session.run!r} {'has finished' if request.finished else 'has let go of this sampler'}"
        )
        async with self._attaching:
            await self._forget()
        if request.finished:
            self.finished.set()
        return rl_pb2.DetachResponse()

    async def close(self) -> None:
        """End what runs; calls that wait for completions are told."""
        self._closed = True
        await self._forget()

    def _hear(self, session: str) -> None:
        if self._closed:
            raise SamplerClosedError("the sampler was told to stop")
        if self._session is None or self._session.id != session:
            raise NoSessionError("this sampler does not know the session; attach it")
        self._session.heard = time.monotonic()

    async def _prepare(self, request: rl_pb2.OfferRequest) -> rl_pb2.OfferResponse:
        """Pull, check and load what was offered; what goes wrong is the answer."""
        started = time.monotonic()
        try:
            fetched = await self._fetch(request)
            snapshot = fetched.snapshot
            pulled = time.monotonic()
            self._ready = None  # its memory is needed; whoever offered it has gone on to this version
            leaves = snapshot.on_device or {leaf.path: leaf.array for leaf in snapshot.leaves}
            tree = self._wire.rebuild(leaves)
            loaded = await asyncio.to_thread(lambda: jax.block_until_ready(self._engine.load_params(tree)))
        except (UserError, jax.errors.JaxRuntimeError, MemoryError) as error:  # too little memory is the device's error
            return rl_pb2.OfferResponse(failure=str(error))
        finally:
            if self._pulling is not None and self._pulling[1] is asyncio.current_task():
                self._pulling = None
        response = rl_pb2.OfferResponse(
            digest=snapshot.digest,
            bytes=snapshot.nbytes,
            pull_s=pulled - started,
            load_s=time.monotonic() - pulled,
            fallback=fetched.fallback,
        )
        self._shelf.put(snapshot)
        self._ready = _Ready(request.version, request.digest, loaded, response)
        return response

    async def _swap(self, ready: _Ready) -> None:
        if self._service is not None:
            await asyncio.shield(asyncio.wrap_future(self._service.swap(ready.loaded, ready.version)))
            return
        scheduler = await asyncio.to_thread(self._make_scheduler, ready.loaded, ready.version)
        service = SamplerService(scheduler, warm_up=True).start()
        self._service = service
        await asyncio.shield(asyncio.wrap_future(service.started))
        self._say(f"sampling with version {ready.version}")

    async def _read_digest(self) -> str:
        """Of what the scheduler really samples with, read back from its devices."""
        version, loaded = await asyncio.shield(asyncio.wrap_future(self.service().weights()))
        return (await asyncio.to_thread(lambda: take_snapshot(version, self._wire.read_back(loaded)))).digest

    async def _forget(self) -> None:
        """Whose sampler this was, and all that came from there."""
        if self._pulling is not None:
            self._pulling[1].cancel()
        service, self._service = self._service, None
        self._session = self._in_use = self._ready = self._pulling = None
        self._shelf.clear()
        if service is not None:
            await asyncio.to_thread(service.stop)
