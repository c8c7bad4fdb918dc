"""What comes back of a call to the sampler, piece by piece, for a reader in another thread or in an event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.types import Alternatives, Completion, FinishReason, PromptScores


@dataclass(frozen=True)
class Delta:
    """New tokens of one request: arrays as in `Completion`, equally long; `finish` is set in its last delta only.

    `prompt`, if it was asked for, comes with the first token.
    """

    tokens_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    forced_T: np.ndarray
    finish: FinishReason | None
    alternatives: Alternatives | None = None
    prompt: PromptScores | None = None


def delta_after(completion: Completion, seen: int, finish: FinishReason | None) -> Delta:
    """What `completion` has beyond its first `seen` tokens."""
    new, known = slice(seen, None), completion.alternatives
    return Delta(
        completion.tokens_T[new],
        completion.logprobs_T[new],
        completion.versions_T[new],
        completion.forced_T[new],
        finish,
        None if known is None else Alternatives(known.ids_TN[new], known.logprobs_TN[new]),
        None if seen else completion.prompt,
    )


class Reply:
    """(index, Delta) pairs of one call's requests as their tokens are made; `for` and `async for` both work.

    `accepted` is the requests' ids, once the scheduler has taken them; it raises what it refused them with, and so
    does iterating. Several deltas of one request are joined while nobody reads: what waits for a slow reader is never
    more than the completions themselves, whose lengths `max_new_tokens` bounds, and nobody else waits for it.
    `close` (or leaving a `with` block) aborts whatever still runs. One reader at a time.
    """

    def __init__(self, abort: Callable[["Reply"], None]):
        self.accepted: Future[list[int]] = Future()
        self._abort = abort
        self._changed = threading.Condition()
        self._pending: dict[int, list[Delta]] = {}
        self._running: set[int] = set()
        self._error: BaseException | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def __enter__(self) -> "Reply":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what still runs and forget what was not read. May be called from anywhere, and more than once."""
        never_began = self.accepted.cancel()
        with self._changed:
            over = never_began or (self.accepted.done() and not self._running)
            self._closed, self._running = True, set()
            self._pending.clear()
            self._wake()
        if not over:
            self._abort(self)

    def __iter__(self) -> "Reply":
        return self

    def __next__(self) -> tuple[int, Delta]:
        self.accepted.result()
        with self._changed:
            self._changed.wait_for(self._readable)
            if (pair := self._take()) is None:
                raise StopIteration
            return pair

    def __aiter__(self) -> "Reply":
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        await asyncio.wrap_future(self.accepted)
        while True:
            with self._changed:
                self._loop = asyncio.get_running_loop()
                if self._readable():
                    if (pair := self._take()) is None:
                        raise StopAsyncIteration
                    return pair
                self._event.clear()
            await self._event.wait()

    def _readable(self) -> bool:
        return bool(self._pending) or self._error is not None or not self._running

    def _take(self) -> tuple[int, Delta] | None:
        if self._pending:
            index = next(iter(self._pending))
            return index, _joined(self._pending.pop(index))
        if self._error is not None:
            raise self._error
        return None

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(self._event.set)

    # The owning thread's side.

    def _begin(self, ids: list[int]) -> None:
        with self._changed:
            if not self._closed:
                self._running = set(range(len(ids)))
        self.accepted.set_result(ids)

    def _put(self, index: int, delta: Delta) -> None:
        with self._changed:
            if index not in self._running:
                return  # closed
            self._pending.setdefault(index, []).append(delta)
            if delta.finish is not None:
                self._running.discard(index)
            self._wake()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error, self._running = error, set()
            self._wake()


def _joined(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        np.concatenate([d.tokens_T for d in deltas]),
        np.concatenate([d.logprobs_T for d in deltas]),
        np.concatenate([d.versions_T for d in deltas]),
        np.concatenate([d.forced_T for d in deltas]),
        deltas[-1].finish,
        _joined_alternatives([d.alternatives for d in deltas if d.alternatives is not None]),
        next((d.prompt for d in deltas if d.prompt is not None), None),
    )


def _joined_alternatives(parts: list[Alternatives]) -> Alternatives | None:
    if not parts:
        return None
    return Alternatives(np.concatenate([p.ids_TN for p in parts]), np.concatenate([p.logprobs_TN for p in parts]))


def join(completion_deltas: list[Delta]) -> Completion:
    """The completion that a request's deltas, all of them, make up."""
    whole = _joined(completion_deltas)
    assert whole.finish is not None
    arrays = whole.tokens_T, whole.logprobs_T, whole.versions_T, whole.forced_T
    return Completion(*arrays, whole.finish, whole.alternatives, whole.prompt)
