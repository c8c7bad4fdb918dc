"""A sampler that decodes in virtual time: slots, a queue, dispatches, weights swapped between two of them."""

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from jaxrl_llm.pipeline.clock import Clock


@dataclass(frozen=True)
class Weights:
    """A version and what it is made of: `content` is equal exactly where the weights are."""

    version: int
    content: int


@dataclass
class _Sequence:
    length: int
    done: int = 0
    spans: list[tuple[int, Weights]] = field(default_factory=list)  # (first token, weights) in order


class Decoder:
    """Requests in, spans of (first token, weights) out.

    A dispatch decodes `chunk` tokens of every running sequence and takes chunk * `step_s(running)` seconds, besides
    `prefill_s` for every prompt it starts with. What arrives during a dispatch acts after it. `finished(key, length,
    spans)` and `swapped(weights)` are called between two dispatches, `boundary()` after each of them: what is submitted
    there starts at once.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        slots: int,
        chunk: int,
        step_s: Callable[[int], float],
        prefill_s: float,
        weights: Weights,
        finished: Callable[[Hashable, int, list[tuple[int, Weights]]], None],
        swapped: Callable[[Weights], None],
        boundary: Callable[[], None] = lambda: None,
    ):
        self._clock, self._slots, self._chunk, self._step_s, self._prefill_s = clock, slots, chunk, step_s, prefill_s
        self._finished, self._swapped, self._boundary = finished, swapped, boundary
        self.weights = weights
        self._next: Weights | None = None
        self._running: dict[Hashable, _Sequence] = {}
        self._queue: deque[tuple[Hashable, int]] = deque()
        self._cancelled: set[Hashable] = set()
        self._dead = self._held = False
        self._began = self._each_s = self._warm_s = 0.0
        self._dispatches = 0  # how many will have run at the event that is due, 0 while nothing runs
        self._due = 0  # which event that is
        self.tokens = 0
        self.busy_s = 0.0

    # What others ask; each acts at the next boundary.

    def submit(self, key: Hashable, length: int) -> None:
        self._queue.append((key, length))
        self._poke()

    def cancel(self, key: Hashable) -> None:
        self._cancelled.add(key)
        self._poke()

    def swap(self, weights: Weights) -> None:
        self._next = weights
        self._poke()

    def look(self) -> None:
        """Have `boundary` called at the end of the dispatch under way; at once if there is none."""
        self._poke()

    def hold(self, seconds: float) -> None:
        """Do nothing for so long (SIGSTOP): the dispatch under way ends that much later."""
        self._held = True
        self._clock.after(seconds, self._release)

    def kill(self) -> None:
        self._dead = True

    def _release(self) -> None:
        self._held = False
        self._at_boundary(self._due)

    @property
    def busy(self) -> bool:
        return self._dispatches > 0

    # Dispatches.

    def _poke(self) -> None:
        """Come back at the end of the present dispatch; at once if there is none."""
        if not self._dispatches:
            self._schedule(0.0, 0)
            return
        gone = self._clock.now - self._began - self._warm_s
        dispatch = max(1, math.ceil(gone / self._each_s - 1e-9)) if self._each_s else 1
        if dispatch < self._dispatches:
            self._schedule(self._warm_s + dispatch * self._each_s - (self._clock.now - self._began), dispatch)

    def _schedule(self, delay_s: float, dispatches: int) -> None:
        self._dispatches = dispatches
        self._due += 1
        due = self._due
        self._clock.after(delay_s, lambda: self._at_boundary(due))

    def _at_boundary(self, due: int) -> None:
        if self._dead or self._held or due != self._due:
            return
        if self._dispatches:
            self.busy_s += self._clock.now - self._began
        made, self._dispatches = self._dispatches * self._chunk, 0
        ended = []
        for key, sequence in self._running.items():
            self.tokens += min(made, sequence.length - sequence.done)
            sequence.done += made
            if sequence.done >= sequence.length:
                ended.append(key)
        for key in ended:
            sequence = self._running.pop(key)
            self._finished(key, sequence.length, sequence.spans)
        for key in self._cancelled:
            self._running.pop(key, None)
        self._queue = deque(item for item in self._queue if item[0] not in self._cancelled)
        self._cancelled.clear()
        if self._next is not None:
            self.weights, self._next = self._next, None
            for sequence in self._running.values():
                sequence.spans.append((sequence.done, self.weights))
            self._swapped(self.weights)
        self._boundary()
        self._dispatch()

    def _dispatch(self) -> None:
        started = 0
        while self._queue and len(self._running) < self._slots:
            key, length = self._queue.popleft()
            self._running[key] = _Sequence(length, spans=[(0, self.weights)])
            started += 1
        if not self._running:
            return
        self._began, self._warm_s = self._clock.now, started * self._prefill_s
        self._each_s = self._chunk * self._step_s(len(self._running))
        shortest = min(sequence.length - sequence.done for sequence in self._running.values())
        dispatches = max(1, math.ceil(shortest / self._chunk))
        self._schedule(self._warm_s + dispatches * self._each_s, dispatches)
