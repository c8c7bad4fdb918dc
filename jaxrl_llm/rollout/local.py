"""The sampler in this process: a thread that owns a scheduler and drives it for the exchange.

New weights from the board are swapped in between two dispatches, and prompts admitted there: what is submitted then
starts at once.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxrl_llm.rollout.exchange import Exchange
from jaxrl_llm.rollout.requests import HowToSample
from jaxrl_llm.types import Completion, Params, SampleRequest
from jaxrl_llm.weights import WeightBoard

NAME = "local"


class Scheduler(Protocol):
    """What is needed of the sampler; sampler.scheduler.Scheduler is one."""

    def submit(self, requests: Sequence[SampleRequest]) -> list[int]: ...

    def step(self, between: Callable[[], None] | None = None) -> list[tuple[int, Completion]]: ...

    def swap(self, loaded: Params, version: int) -> None: ...

    def abort(self, ids: Sequence[int]) -> None: ...

    @property
    def version(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def idle(self) -> bool: ...


class LocalSampler:
    """Owns the scheduler (and so the decode state) from `start` to `stop`; `slots` requests run at once."""

    def __init__(self, scheduler: Scheduler, board: WeightBoard, how: HowToSample, *, slots: int):
        self._scheduler, self._board, self._how, self._slots = scheduler, board, how, slots
        self._asked: dict[int, tuple[int, int, int]] = {}  # request -> (group, attempt, sibling)
        self._thread: threading.Thread | None = None

    def start(self, exchange: Exchange) -> None:
        self._thread = threading.Thread(target=self._guard, args=(exchange,), name="rollout", daemon=True)
        self._thread.start()

    def report(self) -> dict[str, Any]:
        return {}

    def stop(self) -> None:
        """After the present scheduler step."""
        if self._thread is not None:
            self._thread.join()

    def _guard(self, exchange: Exchange) -> None:
        try:
            self._run(exchange)
        except BaseException as error:
            exchange.fail(error)

    def _run(self, exchange: Exchange) -> None:
        exchange.join(NAME, self._scheduler.version, self._slots)
        while not exchange.stopping:
            finished = self._scheduler.step(lambda: self._between_dispatches(exchange))
            for request, completion in finished:
                self._hand_in(exchange, request, completion)
            if not finished and self._scheduler.idle:
                exchange.wait_for_work(NAME, or_until=lambda: self._newer(exchange))

    def _newer(self, exchange: Exchange) -> bool:
        return self._board.newer_than(self._scheduler.version) is not None and exchange.may_swap(NAME)

    def _between_dispatches(self, exchange: Exchange) -> None:
        weights = self._board.newer_than(self._scheduler.version)
        if weights is not None and exchange.may_swap(NAME):
            self._scheduler.swap(weights.params, weights.version)
            exchange.holds(NAME, weights.version)
        assignments, cancels = exchange.work(NAME, ended=len(self._asked) - self._scheduler.in_flight)
        requests: list[SampleRequest] = []
        owners: list[tuple[int, int, int]] = []
        for assignment in assignments:
            requests += self._how.requests(assignment)
            owners += [(assignment.group_id, assignment.attempt, sibling) for sibling in assignment.siblings]
        if requests:
            self._asked.update(zip(self._scheduler.submit(requests), owners, strict=True))
        if cancels:
            given_up = {(c.group_id, c.attempt, sibling) for c in cancels for sibling in c.siblings}
            self._scheduler.abort([request for request, owner in self._asked.items() if owner in given_up])

    def _hand_in(self, exchange: Exchange, request: int, completion: Completion) -> None:
        group_id, attempt, sibling = self._asked.pop(request)
        if completion.finish == "aborted":  # because of a Cancel
            exchange.heard(NAME)
            return
        exchange.completed(NAME, group_id, attempt, sibling, completion)
