"""A thread that owns a Scheduler, so that any other thread and any event loop may use it.

Everything that is asked of the scheduler is done by that thread between two dispatches; streams are fed while the next
dispatch runs.
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import jax

from jaxrl_llm.sampler.reply import Delta, Reply, delta_after, join
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.types import Completion, Params, QueueFullError, RunFailedError, SampleRequest, UserError

T = TypeVar("T")

State = Literal["starting", "running", "paused", "draining", "drained", "failed", "stopped"]


class SamplerClosedError(RunFailedError):
    """The sampler takes nothing now: it drains, was shut down, or failed."""


@dataclass(frozen=True)
class Health:
    """`stepped_s` is the time since the owning thread last said it was alive; long while it waits for work."""

    state: State
    version: int
    in_flight: int
    stepped_s: float
    error: str | None

    @property
    def live(self) -> bool:
        return self.state not in ("failed", "stopped")

    @property
    def ready(self) -> bool:
        """Whether a request would be worked on now."""
        return self.live and self.state != "starting"


@dataclass
class _Stream:
    reply: Reply
    index: int
    live: bool  # wants its tokens as they are made
    seen: int = 0


class SamplerService:
    """Owns `scheduler` from `start` (or `with`) to `stop`; nobody else may touch it in between.

    A request that the scheduler refuses (UserError, QueueFullError) fails alone. Any other error of the scheduler is
    the end: every stream raises it, later calls raise SamplerClosedError, `health` says so.

    With `warm_up` the thread first compiles all that requests will need; until `started` is done, requests queue up.
    """

    def __init__(self, scheduler: Scheduler, *, warm_up: bool = False):
        self.engine = scheduler.engine
        self._scheduler = scheduler
        self._streams: dict[int, _Stream] = {}
        self._issued = 0
        self._drains: list[Future[None]] = []
        self._draining = False
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._closed: str | None = None
        self._log = logging.getLogger(__name__)
        self._thread = threading.Thread(target=self._own, name="sampler", daemon=True)
        self._warm_up = warm_up
        self.started: Future[None] = Future()
        self._observe("starting" if warm_up else None)

    def start(self) -> "SamplerService":
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread after its present dispatch; what has not finished raises SamplerClosedError."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "SamplerService":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Any thread.

    def submit(self, requests: Sequence[SampleRequest], *, stream: bool = True) -> Reply:
        """Ask for completions; returns at once. With `stream` False each request answers once, when it has finished.

        `Reply.accepted` and iterating raise UserError for a request that the scheduler cannot serve, QueueFullError
        if its queue has no room for the whole call, SamplerClosedError if it takes nothing.
        """
        reply = Reply(self._abort_reply)
        self._post(reply.accepted, lambda: self._submit(reply, list(requests), stream))
        return reply

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Wait for these requests' completions, in their order."""
        deltas: list[list[Delta]] = [[] for _ in requests]
        with self.submit(requests, stream=False) as reply:
            for index, delta in reply:
                deltas[index].append(delta)
        return [join(parts) for parts in deltas]

    def abort(self, ids: Iterable[int]) -> Future[tuple[list[int], list[int]]]:
        """Stop requests: (ids that still ran, ids that were over already).

        Raises UserError for an id that was never given out; nothing is stopped then.
        """
        return self._call(partial(self._abort, list(ids)))

    def pause(self) -> Future[None]:
        """No dispatch until `resume`; requests are still taken and queue up."""
        return self._call(self._scheduler.pause)

    def resume(self) -> Future[None]:
        """Undo `pause` and `drain`."""
        return self._call(self._resume)

    def drain(self) -> Future[None]:
        """Refuse new requests until `resume`; done when nothing is in flight. Raises UserError while paused."""
        drained: Future[None] = Future()
        self._post(drained, lambda: self._begin_drain(drained))
        return drained

    def update_weights(self, params: Params, version: int) -> None:
        """Copy weights to the engine while it goes on decoding, then swap them in; returns when that is done.

        Raises UserError for weights of another shape and for a version that is not newer.
        """
        self.swap(jax.block_until_ready(self.engine.load_params(params)), version).result()

    def swap(self, loaded: Params, version: int) -> Future[None]:
        """Sample with weights that `engine.load_params` returned from the next dispatch on; done when that is so.

        Raises UserError for a version that is not newer.
        """
        return self._call(partial(self._scheduler.swap, loaded, version))

    def weights(self) -> Future[tuple[int, Params]]:
        """(version, the engine's copy) of the weights in use."""
        return self._call(lambda: (self._scheduler.version, self._scheduler.params))

    @property
    def health(self) -> Health:
        """At once, whatever the owning thread is doing."""
        seen = self._observed
        return dataclasses.replace(seen, stepped_s=time.monotonic() - seen.stepped_s)

    @property
    def metrics(self) -> dict[str, float]:
        """The scheduler's totals and present numbers, by name; at once."""
        statistics, seen = self._scheduler.statistics, self._observed
        totals = {field.name: getattr(statistics, field.name) for field in dataclasses.fields(statistics)}
        present = {"version": seen.version, "in_flight": seen.in_flight, "live": float(seen.live)}
        shape = {"slots": self.engine.slots, "occupancy": statistics.occupancy}
        return {name: float(value) for name, value in {**totals, **shape, **present}.items()}

    def _call(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._post(future, lambda: future.set_result(work()))
        return future

    def _post(self, future: Future, work: Callable[[], None]) -> None:
        """Have the owning thread do `work`; `future` is told if it is not done."""

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._closed is not None:
                future.set_exception(SamplerClosedError(self._closed))
                return
            try:
                work()
            except (UserError, QueueFullError, SamplerClosedError) as error:  # the caller's affair alone
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise

        with self._changed:
            if self._closed is None:
                self._commands.append(command)
                self._changed.notify_all()
                return
        command()

    def _abort_reply(self, reply: Reply) -> None:
        def work() -> None:
            if reply.accepted.exception() is None:
                self._scheduler.abort([id for id in reply.accepted.result() if id in self._streams])

        self._call(work)

    # The owning thread.

    def _own(self) -> None:
        try:
            if self._warm_up:
                self._scheduler.warm_up()
            self._observe()
            self.started.set_result(None)
            while self._wait():
                for id, completion in self._scheduler.step(self._run_commands):
                    stream = self._streams.pop(id)
                    stream.reply._put(stream.index, delta_after(completion, stream.seen, completion.finish))
                self._feed()
                if self._scheduler.idle:
                    drains, self._drains = self._drains, []
                    for drained in drains:
                        drained.set_result(None)
                self._observe()
            self._end("the sampler was shut down", "stopped", None)
        except BaseException as error:
            self._log.exception("the sampler failed; it takes no more requests")
            self._end(f"the sampler failed: {type(error).__name__}: {error}", "failed", error)

    def _wait(self) -> bool:
        """Until something is asked, if there is nothing to decode; False when it is time to stop."""
        nothing_to_do = self._scheduler.idle or self._scheduler.paused
        with self._changed:
            if nothing_to_do:
                self._changed.wait_for(lambda: self._commands or self._stopping)
            return not self._stopping

    def _run_commands(self) -> None:
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()

    def _submit(self, reply: Reply, requests: list[SampleRequest], stream: bool) -> None:
        if self._draining:
            raise SamplerClosedError("the sampler drains and takes no requests; resume it, or try another one")
        if not requests:
            raise UserError("a call needs at least one request")
        ids = self._scheduler.submit(requests)
        self._issued = max(self._issued, *(id + 1 for id in ids))
        for index, id in enumerate(ids):
            self._streams[id] = _Stream(reply, index, stream)
        reply._begin(ids)

    def _abort(self, ids: list[int]) -> tuple[list[int], list[int]]:
        if unknown := [id for id in ids if not 0 <= id < self._issued]:
            raise UserError(f"no request has the id {unknown[0]}; nothing was stopped")
        running = [id for id in ids if id in self._streams]
        self._scheduler.abort(running)
        return running, [id for id in ids if id not in self._streams]

    def _begin_drain(self, drained: Future[None]) -> None:
        if self._scheduler.paused:
            raise UserError("the sampler is paused, so it can finish nothing; resume it before it drains")
        self._draining = True
        self._drains.append(drained)

    def _resume(self) -> None:
        self._draining = False
        for drained in self._drains:
            drained.set_exception(SamplerClosedError("the sampler was resumed before it had drained"))
        self._drains = []
        self._scheduler.resume()

    def _feed(self) -> None:
        """Hand out what the last dispatch made."""
        for id, stream in self._streams.items():
            new = self._scheduler.so_far(id, stream.seen) if stream.live else None
            if new is not None and len(new.tokens_T):
                stream.reply._put(stream.index, delta_after(new, 0, None))
                stream.seen += len(new.tokens_T)

    def _observe(self, state: State | None = None, error: str | None = None) -> None:
        """Keep what `health` answers with: reading it must not wait for a dispatch."""
        scheduler = self._scheduler
        if state is None:
            drains = ("drained" if scheduler.idle else "draining") if self._draining else "running"
            state = "paused" if scheduler.paused else drains
        self._observed = Health(state, scheduler.version, scheduler.in_flight, time.monotonic(), error)

    def _end(self, why: str, state: State, error: BaseException | None) -> None:
        self._observe(state, why if error else None)
        with self._changed:
            self._closed = why
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        for reply in {id(stream.reply): stream.reply for stream in self._streams.values()}.values():
            closed = SamplerClosedError(why)
            closed.__cause__ = error
            reply._fail(closed)
        self._streams.clear()
        for waiting in [*self._drains, *([] if self.started.done() else [self.started])]:
            waiting.set_exception(SamplerClosedError(why))
