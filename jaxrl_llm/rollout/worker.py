"""Two threads: one admits prompts and drives the scheduler, one works out rewards.

issuer.take -> slots.admit -> scheduler.submit (G siblings) -> scheduler.step ... -> env -> EpisodeGroup, in issue order
      new weights from the board are swapped in between two dispatches, then slots.release

A group is scored once its last sibling has ended, all siblings together and one group at a time: what a reward model
computes then depends on the group alone, never on what else was waiting.

The lag slots bound staleness at its worst. To keep it low at other times a prompt is admitted only when the scheduler
can start on it at once and no more than `max_ready` finished groups wait for their rewards or the trainer: what is
sampled earlier than needed is only older when it is trained.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.lag import LagSlots
from jaxrl_llm.types import Completion, Episode, EpisodeGroup, Params, PromptTask, SampleRequest, Sampling
from jaxrl_llm.weights import WeightBoard


class Scheduler(Protocol):
    """What the worker needs of the sampler; sampler.scheduler.Scheduler is one."""

    def submit(self, requests: Sequence[SampleRequest]) -> list[int]: ...

    def step(self, between: Callable[[], None] | None = None) -> list[tuple[int, Completion]]: ...

    def swap(self, loaded: Params, version: int) -> None: ...

    @property
    def version(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def idle(self) -> bool: ...


class Environment(Protocol):
    def episodes(self, task: PromptTask, completions: Sequence[Completion]) -> Sequence[Episode]: ...


class RolloutWorker:
    """Owns the scheduler (and so the decode state) from `start` to `stop`; everything else talks to its queue.

    `concurrency` is how many requests the scheduler decodes at once; `max_ready`, at least a step's prompts, is how
    many finished groups may wait. A trainer that takes groups must publish weights afterwards: that wakes the thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        board: WeightBoard,
        slots: LagSlots,
        issuer: GroupIssuer,
        environment: Environment,
        *,
        group_size: int,
        concurrency: int,
        max_ready: int,
        sampling: Sampling,
        seed: int,
    ):
        self._scheduler, self._board, self._slots, self._issuer = scheduler, board, slots, issuer
        self._environment, self._group_size = environment, group_size
        self._concurrency, self._max_ready = concurrency, max_ready
        self._sampling, self._seed = sampling, seed
        self._pending: dict[int, tuple[int, int]] = {}  # request -> (group, sibling)
        self._tasks: dict[int, PromptTask] = {}
        self._siblings: dict[int, dict[int, Completion]] = {}
        self._order: deque[int] = deque()  # group ids in issue order
        self._unscored: deque[tuple[int, PromptTask, list[Completion]]] = deque()
        self._in_scoring = 0  # groups unscored, the one at work included
        self._ready: dict[int, EpisodeGroup] = {}
        self._changed = threading.Condition()
        self._exhausted = False
        self._stopping = False
        self._error: tuple[str, BaseException] | None = None
        self._wait_s = 0.0
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name=name, daemon=True)
            for name, run in (("rollout", self._sample), ("rewards", self._score))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads after their current scheduler step and group; groups in flight stay on the ledger."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._board.wake()
        for thread in self._threads:
            thread.join()

    def next_groups(self, count: int) -> list[EpisodeGroup]:
        """The next `count` groups in issue order; fewer only when no prompt is left to issue.

        Blocks. Re-raises what ended one of the threads.
        """
        groups: list[EpisodeGroup] = []
        with self._changed:
            while len(groups) < count:
                self._changed.wait_for(lambda: self._error or self._head_is_ready() or self._finished())
                if self._error:
                    thread, error = self._error
                    raise RuntimeError(f"the {thread} thread failed") from error
                if not self._head_is_ready():
                    break
                groups.append(self._ready.pop(self._order.popleft()))
        return groups

    def take_wait_seconds(self) -> float:
        """Seconds the sampler has waited for lag slots (that is, for the trainer) since the last call."""
        with self._changed:
            waited, self._wait_s = self._wait_s, 0.0
            return waited

    def _head_is_ready(self) -> bool:
        return bool(self._order) and self._order[0] in self._ready

    def _finished(self) -> bool:
        return self._exhausted and not self._order

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            with self._changed:
                self._error = threading.current_thread().name, error
                self._changed.notify_all()

    def _sample(self) -> None:
        while not self._stopping:
            finished = self._scheduler.step(self._between_dispatches)
            for request, completion in finished:
                self._collect(request, completion)
            if not finished and self._scheduler.idle:
                if self._exhausted:
                    return
                self._wait_for_weights()

    def _score(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._unscored)
                if self._stopping:
                    return
                group_id, task, completions = self._unscored.popleft()
            group = EpisodeGroup(group_id, task, tuple(self._environment.episodes(task, completions)))
            with self._changed:
                self._in_scoring -= 1
                self._ready[group_id] = group
                self._changed.notify_all()

    def _between_dispatches(self) -> None:
        self._swap_weights()
        self._admit()

    def _swap_weights(self) -> None:
        weights = self._board.newer_than(self._scheduler.version)
        if weights is not None:
            self._scheduler.swap(weights.params, weights.version)
            self._slots.release(weights.version)

    def _admit(self) -> None:
        requests: list[SampleRequest] = []
        owners: list[tuple[int, int]] = []
        while not self._exhausted and self._slots.free and self._wanted(len(requests)):
            issued = self._issuer.take()
            if issued is None:
                with self._changed:
                    self._exhausted = True
                    self._changed.notify_all()
                break
            group_id, task = issued
            self._slots.admit()
            with self._changed:
                self._order.append(group_id)
            self._tasks[group_id], self._siblings[group_id] = task, {}
            for sibling in range(self._group_size):
                owners.append((group_id, sibling))
                requests.append(SampleRequest(task.tokens_T, self._sampling, self._seed, group_id, sibling))
        if requests:
            self._pending.update(zip(self._scheduler.submit(requests), owners, strict=True))

    def _wanted(self, submitting: int) -> bool:
        """Whether one more group would be started on at once, and not only to lie in stock."""
        with self._changed:
            stock = self._in_scoring + len(self._ready)
        return self._scheduler.in_flight + submitting < self._concurrency and stock < self._max_ready

    def _wait_for_weights(self) -> None:
        started = time.monotonic()
        self._board.wait_newer_than(self._scheduler.version)
        with self._changed:
            self._wait_s += time.monotonic() - started

    def _collect(self, request: int, completion: Completion) -> None:
        group_id, sibling = self._pending.pop(request)
        siblings = self._siblings[group_id]
        siblings[sibling] = completion
        if len(siblings) == self._group_size:
            task, siblings = self._tasks.pop(group_id), self._siblings.pop(group_id)
            with self._changed:
                self._unscored.append((group_id, task, [siblings[s] for s in range(self._group_size)]))
                self._in_scoring += 1
                self._changed.notify_all()
