"""One sampler in another process, from the trainer's side: attach it, renew its weights, give it work, notice its end.

    Attach -> push the newest weights -> join the run -> { heartbeat | pushes | work } -> leave -> pause -> Attach ...

Weights reach a sampler in two phases, and the trainer speaks of a version as held only once the sampler has said so. A
call that is not answered in time is made again: every one of them may come twice.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from jaxrl_llm.rollout.coordinator import Assignment, Cancel
from jaxrl_llm.rollout.exchange import Exchange
from jaxrl_llm.rollout.requests import HowToSample
from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.serving.client import completion_of, sampling_message
from jaxrl_llm.types import UserError
from jaxrl_llm.weights.snapshot import Snapshot
from jaxrl_llm.worlds.agreement import PROTOCOL, Facts
from jaxrl_llm.worlds.dialling import Credentials, why
from jaxrl_llm.worlds.distribution import Distribution

_LONGEST_PAUSE_S, _REFUSED_PAUSE_S, _DETACH_S, _LOOK_S = 30.0, 30.0, 10.0, 0.02

Tell = Callable[[str, str, str], None]
"""(kind of event, sampler, plain words)"""


@dataclass(frozen=True)
class LinkOptions:
    """Seconds as in config.RemoteConfig. `verify_every` pushes the sampler reads its weights back and digests them."""

    heartbeat_s: float
    silence_s: float
    retry_s: float
    push_timeout_s: float
    verify_every: int


@dataclass(frozen=True)
class Trainer:
    """Who asks: the run's name, this process's session, and what a sampler must have in common with it."""

    run: str
    session: str
    facts: Facts
    how: HowToSample
    credentials: Credentials


class _EndedError(Exception):
    """Why a session is over."""


class _WrongWeightsError(_EndedError):
    """What a sampler holds is not what it was sent."""


class _RefusedError(Exception):
    """Why there is none."""


class Link:
    """Keeps the sampler at `address` in the run from `run` on, through all its lives; in one event loop."""

    def __init__(
        self,
        address: str,
        trainer: Trainer,
        distribution: Distribution,
        options: LinkOptions,
        tell: Tell,
        *,
        transfer: bool = False,
    ):
        self.address = address
        self._trainer, self._distribution, self._options, self._tell = trainer, distribution, options, tell
        self._told = self._fell_back = ""
        self._transfer = transfer
        self._lives = 0
        self._pushes = 0
        self._poked = asyncio.Event()
        self._away_since = time.monotonic()
        self._call: Callable[..., Any] | None = None

    @property
    def attached(self) -> bool:
        return self._call is not None

    @property
    def away_s(self) -> float:
        """Seconds since the sampler was last attached; 0 while it is."""
        return 0.0 if self.attached else time.monotonic() - self._away_since

    def poke(self) -> None:
        """The sampler has said that it is there: try now."""
        self._poked.set()

    async def run(self, exchange: Exchange) -> None:
        """Until it is cancelled."""
        pause = self._options.retry_s
        while True:
            lives = self._lives
            try:
                await self._live(exchange)
            except _RefusedError as error:
                self._tell_once("refused", f"sampler {self.address} is not taken: {error}")
                pause = max(pause, _REFUSED_PAUSE_S)
            except (_EndedError, grpc.RpcError, UserError) as error:
                if not self._lives:  # of one that has left, nothing else is expected
                    self._tell_once("unreachable", f"sampler {self.address} cannot be reached: {why(error)}")
            if self._lives != lives:
                pause = self._options.retry_s
            self._poked.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poked.wait(), pause)
                pause = self._options.retry_s
                continue
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def detach(self, *, finished: bool) -> None:
        """Tell the sampler that the run needs it no more; it does not matter whether it hears."""
        if self._call is None:
            return
        with contextlib.suppress(grpc.RpcError):
            request = rl_pb2.DetachRequest(session=self._trainer.session, finished=finished)
            await self._call("Detach", request, timeout=min(self._options.silence_s, _DETACH_S))

    def _tell_once(self, kind: str, words: str) -> None:
        if words != self._told:
            self._tell(kind, self.address, words)
            self._told = words

    async def _live(self, exchange: Exchange) -> None:
        """One life of the sampler, from Attach to its end, which is raised."""
        channel = self._trainer.credentials.channel(self.address)
        try:
            call = self._trainer.credentials.calls(channel, "World")
            attached = await self._attach(call)
            self._call = call
            beating = asyncio.create_task(self._beat(call, None))
            pushing = asyncio.create_task(self._push_first(call, attached))
            await self._first_of(beating, pushing)
            version, slots = pushing.result().version, attached.slots
            self._lives += 1
            self._told = ""
            name = self.address if self._lives == 1 else f"{self.address} (life {self._lives})"
            exchange.join(name, version, slots)
            life = _Life(name, exchange, self._trainer, self._trainer.credentials.calls(channel, "Sampler"))
            try:
                beating.cancel()
                await self._first_of(
                    asyncio.create_task(self._beat(call, life)),
                    asyncio.create_task(self._push_on(call, life, version)),
                    asyncio.create_task(life.work()),
                )
            except BaseException as error:
                reason = "the run is over" if isinstance(error, asyncio.CancelledError) else why_ended(error)
                life.end(reason)
                raise
        finally:
            if self.attached:
                self._call, self._away_since = None, time.monotonic()
            self._distribution.gone(self.address)
            await channel.close()

    async def _first_of(self, *tasks: asyncio.Task) -> None:
        """The first to end; it alone may do so without an error. The others are cancelled if it did not."""
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _attach(self, call: Callable[..., Any]) -> rl_pb2.AttachResponse:
        trainer = self._trainer
        request = rl_pb2.AttachRequest(
            protocol=PROTOCOL,
            run=trainer.run,
            session=trainer.session,
            facts=dict(trainer.facts),
            silence_s=self._options.silence_s,
        )
        try:
            response = await call("Attach", request, timeout=self._options.silence_s)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED):
                raise _RefusedError(why(error)) from None
            raise
        if response.refusal:
            raise _RefusedError(response.refusal)
        return response

    async def _beat(self, call: Callable[..., Any], life: "_Life | None") -> None:
        """Look whether the sampler is there; raises _EndedError once it is not."""
        options, heard = self._options, time.monotonic()
        while True:
            left = options.silence_s - (time.monotonic() - heard)
            if left <= 0:
                raise _EndedError(f"it has not answered for {options.silence_s:g} s")
            try:
                request = rl_pb2.HeartbeatRequest(session=self._trainer.session)
                response = await call("Heartbeat", request, timeout=min(left, options.heartbeat_s))
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    lost = error.code() == grpc.StatusCode.FAILED_PRECONDITION
                    raise _EndedError("it was restarted" if lost else why(error)) from None
                continue
            if response.state in ("failed", "stopped"):
                raise _EndedError(f"it has failed: {response.error or response.state}")
            heard = time.monotonic()
            if life is not None:
                life.heard()
            await asyncio.sleep(options.heartbeat_s)

    async def _push_first(self, call: Callable[..., Any], attached: rl_pb2.AttachResponse) -> Snapshot:
        """The newest weights there are, unless the sampler has them from before the connection was lost."""
        snapshot = await self._distribution.newer_than(-1)
        try:
            if (attached.version, attached.digest) == (snapshot.version, snapshot.digest):
                await self._commit(call, snapshot, verify=True)
                return snapshot
            return await self._push(call, snapshot, lambda: True, verify=True)
        except _WrongWeightsError as error:
            raise _RefusedError(str(error)) from None

    async def _push_on(self, call: Callable[..., Any], life: "_Life", version: int) -> None:
        while True:
            snapshot = await self._distribution.newer_than(version)
            self._pushes += 1
            verify = self._pushes % self._options.verify_every == 0
            snapshot = await self._push(call, snapshot, life.may_swap, verify=verify)
            version = snapshot.version
            life.holds(version)

    async def _push(
        self, call: Callable[..., Any], snapshot: Snapshot, may_swap: Callable[[], bool], *, verify: bool
    ) -> Snapshot:
        """Both phases; what the sampler holds then, which is newer than `snapshot` if that could not be had."""
        options, session = self._options, self._trainer.session
        avoid: set[str] = set()
        while True:
            async with self._distribution.source(snapshot, self.address, avoid) as source:
                offer = rl_pb2.OfferRequest(
                    session=session,
                    version=snapshot.version,
                    digest=snapshot.digest,
                    source=source,
                    transfer=self._transfer,
                    patience_s=options.push_timeout_s,
                )
                response = await self._insist(call, "Offer", offer)
            if response.failure and source != self._distribution.root:
                self._distribution.detour()
                avoid.add(source)
                continue
            if response.failure:
                self._tell_once(
                    "push_failed",
                    f"sampler {self.address} could not fetch version {snapshot.version}: {response.failure}",
                )
                await asyncio.sleep(min(1.0, options.retry_s))
                snapshot = await self._distribution.newer_than(-1)
                avoid = set()
                continue
            while not may_swap():
                await asyncio.sleep(_LOOK_S)
            await self._commit(call, snapshot, verify=verify)
            self._told = ""
            if response.fallback and response.fallback != self._fell_back:
                self._fell_back = response.fallback
                self._tell(
                    "push_fallback",
                    self.address,
                    f"sampler {self.address} fetches weights in chunks and not from device to device: "
                    f"{response.fallback}",
                )
            self._distribution.ready(self.address, snapshot.version)
            self._distribution.pushed(response)
            return snapshot

    async def _commit(self, call: Callable[..., Any], snapshot: Snapshot, *, verify: bool) -> None:
        """The second phase; with `verify` raises _WrongWeightsError unless the sampler really has these weights."""
        request = rl_pb2.CommitRequest(session=self._trainer.session, version=snapshot.version, verify=verify)
        committed = await self._insist(call, "Commit", request)
        if verify and committed.digest != snapshot.digest:
            raise _WrongWeightsError(
                f"its weights have the digest {committed.digest[:12]}, version {snapshot.version} has "
                f"{snapshot.digest[:12]}"
            )

    async def _insist(self, call: Callable[..., Any], method: str, request: Any) -> Any:
        """Make a call again and again until it is answered: asking twice changes nothing."""
        while True:
            try:
                return await call(method, request, timeout=self._options.push_timeout_s)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise _EndedError(why(error)) from None


def why_ended(error: BaseException) -> str:
    """In words for the log."""
    return why(error) if isinstance(error, Exception) else type(error).__name__


class _Life:
    """What a sampler that has joined is asked to do. A thread waits for its work, which the event loop then does."""

    def __init__(self, name: str, exchange: Exchange, trainer: Trainer, call: Callable[..., Any]):
        self._name, self._exchange, self._how, self._call = name, exchange, trainer.how, call
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._over = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def heard(self) -> None:
        self._exchange.heard(self._name)

    def holds(self, version: int) -> None:
        self._exchange.holds(self._name, version)

    def may_swap(self) -> bool:
        return self._exchange.may_swap(self._name)

    def end(self, reason: str) -> None:
        """The sampler has left the run; what it was doing is stopped."""
        self._over = True
        self._exchange.leave(self._name, reason)
        for task in self._running.values():
            task.cancel()

    async def work(self) -> None:
        """Until `end`, or an error of our own, which is raised."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            try:
                while not self._over and not self._exchange.stopping:
                    self._exchange.wait_for_work(self._name, or_until=lambda: self._over)
                    assignments, cancels = self._exchange.work(self._name)
                    loop.call_soon_threadsafe(self._begin, assignments, cancels)
            except Exception as error:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._fail, error)

        threading.Thread(target=wait, name=f"work of {self._name}", daemon=True).start()
        await self._failed

    def _begin(self, assignments: list[Assignment], cancels: list[Cancel]) -> None:
        if self._over:
            return
        for cancel in cancels:
            if (task := self._running.get((cancel.group_id, cancel.attempt))) is not None:
                task.cancel()
        for assignment in assignments:
            key = assignment.group_id, assignment.attempt
            task = self._running[key] = asyncio.create_task(self._sample(assignment))
            task.add_done_callback(lambda task, key=key: self._done(key, task))

    def _done(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _sample(self, assignment: Assignment) -> None:
        """One call for one assignment; whatever becomes of it is told to the exchange."""
        names = {f"{assignment.group_id}.{assignment.attempt}.{sibling}": sibling for sibling in assignment.siblings}
        missing = set(assignment.siblings)
        reason = "it ended the call without an answer"
        try:
            stream = self._call("Sample", self._request(assignment, list(names)))
            async for piece in stream:
                if piece.finish == rl_pb2.FINISH_RUNNING:
                    continue
                sibling = names.get(piece.ledger_id)
                if sibling is None or not _whole(piece):
                    reason = "it answered something else than was asked"
                    continue
                if piece.finish == rl_pb2.FINISH_ABORTED:
                    reason = "somebody aborted it"
                    continue
                missing.discard(sibling)
                self._exchange.completed(
                    self._name, assignment.group_id, assignment.attempt, sibling, completion_of(piece)
                )
        except grpc.RpcError as error:
            reason = why(error)
        if missing and not self._over:
            self._exchange.failed(self._name, assignment.group_id, assignment.attempt, reason)

    def _request(self, assignment: Assignment, names: list[str]) -> rl_pb2.SampleRequest:
        requests = self._how.requests(assignment)
        return rl_pb2.SampleRequest(
            prompt=requests[0].tokens_T,
            sampling=sampling_message(requests[0].sampling),
            draws=[
                rl_pb2.Draw(seed=r.seed, stream=r.stream, sibling=r.sibling, first=r.first, ledger_id=name)
                for r, name in zip(requests, names, strict=True)
            ],
            whole=True,
        )


def _whole(piece: rl_pb2.Piece) -> bool:
    """Whether a finished piece can be a completion: a sampler's mistake must not become the trainer's."""
    lengths = {len(piece.tokens), len(piece.logprobs), len(piece.versions), len(piece.forced)}
    return len(lengths) == 1 and all(map(math.isfinite, piece.logprobs))
