"""The coordinator behind one lock: where the trainer, the scorer and every sampler's thread meet.

A sampler's thread does, over and over, what `Driver` says in words; what it is handed was decided by the coordinator
alone, so threads bring nothing but the order of events.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxrl_llm.rollout.coordinator import Assignment, Call, Cancel, Coordinator, Event, Unscored, Waits
from jaxrl_llm.types import Completion, EpisodeGroup, PromptTask, RunFailedError, Turn

_LOOK_S = 0.5


class WaitGivenUpError(Exception):
    """The trainer was asked to stop while it waited for samplers."""


class Driver(Protocol):
    """The thread or threads behind one sampler.

    `join`, then until `stopping`: `wait_for_work`, `work`, sample, `completed` or `failed`; `holds` after a swap, which
    `may_swap` must allow; `leave` if the sampler dies. An error that ends the run goes to `fail`.
    """

    def start(self, exchange: "Exchange") -> None: ...

    def report(self) -> dict[str, Any]:
        """For the record of a step, since the last call."""
        ...

    def stop(self) -> None:
        """Returns once the threads have ended. `exchange.stopping` is true already."""
        ...


class Exchange:
    """Any thread may call anything. Blocking calls raise RuntimeError when a thread has failed."""

    def __init__(self, coordinator: Coordinator, *, clock: Callable[[], float] = time.monotonic):
        self._coordinator, self._clock = coordinator, clock
        lock = threading.RLock()
        # Samplers are not woken when groups are scored or taken: what would start in that moment would start with
        # weights that the trainer is about to replace.
        self._for_samplers, self._for_others = threading.Condition(lock), threading.Condition(lock)
        self._lock = lock
        self._mail: defaultdict[str, tuple[list[Assignment], list[Cancel]]] = defaultdict(lambda: ([], []))
        self._stopping = False
        self._error: tuple[str, BaseException] | None = None
        self._trainer_waits: defaultdict[str, float] = defaultdict(float)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._wake()

    def fail(self, error: BaseException) -> None:
        """`error` of the present thread ends the run: whoever waits for groups raises it."""
        with self._lock:
            self._error = self._error or (threading.current_thread().name, error)
            self._wake()

    # Samplers.

    def join(self, sampler: str, version: int, slots: int) -> None:
        """See Coordinator.join."""
        with self._lock:
            self._coordinator.join(sampler, version, slots, self._clock())
            self._wake()

    def leave(self, sampler: str, reason: str) -> None:
        """See Coordinator.leave."""
        with self._lock:
            self._coordinator.leave(sampler, reason, self._clock())
            self._mail.pop(sampler, None)
            self._wake()

    def heard(self, sampler: str) -> None:
        """See Coordinator.heard."""
        with self._lock:
            self._coordinator.heard(sampler, self._clock())
            self._for_samplers.notify_all()

    def holds(self, sampler: str, version: int) -> None:
        """See Coordinator.holds."""
        with self._lock:
            self._coordinator.holds(sampler, version)
            self._for_samplers.notify_all()

    def may_swap(self, sampler: str) -> bool:
        """See Coordinator.may_swap."""
        with self._lock:
            return self._coordinator.may_swap(sampler)

    def work(self, sampler: str, *, ended: int = 0) -> tuple[list[Assignment], list[Cancel]]:
        """What `sampler` shall start on and what it need not finish, each given out once; at once. `ended` completions
        will be handed in by the next call, see Coordinator.ended."""
        with self._lock:
            self._coordinator.ended(sampler, ended)
            self._distribute()
            return self._mail.pop(sampler, ([], []))

    def wait_for_work(self, sampler: str, or_until: Callable[[], bool] = lambda: False) -> None:
        """Block until `work` has something for `sampler`, `or_until` holds (looked at whenever samplers are woken), or
        the run stops."""
        with self._lock:
            while True:
                self._distribute()
                if self._stopping or sampler in self._mail or or_until():
                    return
                self._for_samplers.wait(self._coordinator.next_event(self._clock()))

    def completed(self, sampler: str, group_id: int, attempt: int, sibling: int, completion: Completion) -> bool:
        """See Coordinator.completed."""
        with self._lock:
            now = self._clock()
            accepted = self._coordinator.completed(sampler, group_id, attempt, sibling, completion, now)
            self._for_others.notify_all()
            return accepted

    def failed(self, sampler: str, group_id: int, attempt: int, reason: str) -> None:
        """See Coordinator.failed."""
        with self._lock:
            self._coordinator.failed(sampler, group_id, attempt, reason, self._clock())
            self._wake()

    # Tools.

    def next_call(self) -> Call | None:
        """Blocks; None when the run stops."""
        with self._lock:
            while not self._stopping:
                call = self._coordinator.call()
                if call is not None:
                    return call
                self._for_others.wait()
            return None

    def answered(self, call: Call, turn: Turn) -> bool:
        """See Coordinator.answered."""
        with self._lock:
            accepted = self._coordinator.answered(call, turn, self._clock())
            self._wake()
            return accepted

    # Rewards.

    def next_unscored(self) -> Unscored | None:
        """Blocks; None when the run stops."""
        with self._lock:
            while not self._stopping:
                group = self._coordinator.unscored()
                if group is not None:
                    return group
                self._for_others.wait()
            return None

    def scored(self, group: EpisodeGroup) -> None:
        """See Coordinator.scored."""
        with self._lock:
            if not self._coordinator.scored(group):
                self._for_samplers.notify_all()
            self._for_others.notify_all()

    # The trainer.

    def take(self, give_up: Callable[[], bool] | None = None) -> list[EpisodeGroup]:
        """See Coordinator.take; blocks until the groups are there. Raises WaitGivenUpError once `give_up()` holds."""
        with self._lock:
            while (groups := self._coordinator.take(self._clock())) is None:
                self._raise_error()
                since, reason = self._clock(), self._coordinator.trainer_waits_for()
                # Samplers distribute work, and may all be waiting for an event that is far away.
                self._for_others.wait(_LOOK_S if give_up is not None else None)
                if give_up is not None and give_up():
                    raise WaitGivenUpError
                self._trainer_waits[reason] += self._clock() - since
            self._raise_error()
            return groups

    def publishes(self, version: int) -> bool:
        """See Coordinator.publishes."""
        return self._coordinator.publishes(version)

    def published(self, version: int, hand_over: Callable[[], None]) -> None:
        """See Coordinator.published; `hand_over` puts the weights where samplers find them."""
        with self._lock:
            self._coordinator.published(version)
            hand_over()
            self._for_samplers.notify_all()

    def wake_samplers(self) -> None:
        """Have them look for work: a version was made that they do not get."""
        with self._lock:
            self._for_samplers.notify_all()

    def sample_pinned(
        self,
        version: int,
        tasks: Sequence[PromptTask],
        siblings: int,
        *,
        first_stream: int = 0,
        give_up: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        """See Coordinator.pin and take_pinned; blocks until all are there. Raises WaitGivenUpError once `give_up()`
        holds and there is no sampler."""
        with self._lock:
            ids = self._coordinator.pin(version, tasks, siblings, first_stream=first_stream)
            self._for_samplers.notify_all()
            while (completions := self._coordinator.take_pinned(ids)) is None:
                self._raise_error()
                self._for_others.wait(_LOOK_S if give_up is not None else None)
                if give_up is not None and not self._coordinator.samplers and give_up():
                    raise WaitGivenUpError
            return completions

    def ages_s(self) -> dict[int, float]:
        """See Coordinator.ages_s."""
        with self._lock:
            return self._coordinator.ages_s

    def take_waits(self) -> tuple[Waits, dict[str, float]]:
        """How samplers have waited since the last call, and how long the trainer did by whom it waited for."""
        with self._lock:
            trainer, self._trainer_waits = dict(self._trainer_waits), defaultdict(float)
            return self._coordinator.take_waits(self._clock()), trainer

    def take_events(self) -> list[Event]:
        """See Coordinator.take_events."""
        with self._lock:
            return self._coordinator.take_events()

    def counts(self) -> dict[str, int]:
        """See Coordinator.counts."""
        with self._lock:
            return self._coordinator.counts

    # Inside, under the lock.

    def _wake(self) -> None:
        self._for_samplers.notify_all()
        self._for_others.notify_all()

    def _raise_error(self) -> None:
        if self._error:
            thread, error = self._error
            if isinstance(error, RunFailedError):  # which says it all
                raise error
            raise RuntimeError(f"the {thread} thread failed") from error

    def _distribute(self) -> None:
        now = self._clock()
        cancels = self._coordinator.overdue(now)
        assignments = self._coordinator.admit(now)
        for cancel in cancels:
            self._mail[cancel.sampler][1].append(cancel)
        for assignment in assignments:
            self._mail[assignment.sampler][0].append(assignment)
        if cancels or assignments:
            self._for_samplers.notify_all()
        if cancels or self._coordinator.exhausted_prompts:
            self._for_others.notify_all()  # a group's fate, or the end of the prompts, may complete the trainer's batch
