"""From prompts to scored groups: samplers' threads, the threads for rewards, and the exchange they share.

    coordinator.admit -> sampler (weights swapped between dispatches) -> completed -> env -> EpisodeGroup -> next_groups
                  ^----------- next turn <- tools, on threads of their own <-'

A group is scored once its last sibling has ended, all siblings together and none of another group with them: what a
reward model computes then depends on the group alone, never on what else was waiting. Several threads may score, each
a group, so that one slow completion does not hold up the groups behind it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxrl_llm.rollout.coordinator import Coordinator, Event
from jaxrl_llm.rollout.exchange import Driver, Exchange
from jaxrl_llm.rollout.statistics import age_by_length
from jaxrl_llm.rollout.turns import Tools
from jaxrl_llm.types import Completion, Episode, EpisodeGroup, PolicyWeights, PromptTask


class Environment(Protocol):
    def episodes(self, task: PromptTask, completions: Sequence[Completion]) -> Sequence[Episode]: ...


class Board(Protocol):
    def publish(self, weights: PolicyWeights) -> None: ...


class RolloutWorker:
    """Everything between the prompt stream and the trainer, from `start` to `stop`.

    A trainer that takes groups must publish the version it makes of them afterwards: that wakes the samplers.
    `environment` is asked for as many groups at once as there are `scorers`, and `tools`, if there are any, for as many
    calls as they take.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        environment: Environment,
        samplers: Sequence[Driver],
        board: Board,
        give_up: Callable[[], bool] | None = None,
        *,
        scorers: int = 1,
        tools: Tools | None = None,
    ):
        self.exchange = Exchange(coordinator)
        self._give_up = give_up
        self._environment, self._samplers, self._board = environment, samplers, board
        self._tools = tools
        self._threads = [threading.Thread(target=self._score, name="rewards", daemon=True) for _ in range(scorers)]
        for _ in range(0 if tools is None else tools.at_once):
            self._threads.append(threading.Thread(target=self._answer, name="tools", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        for sampler in self._samplers:
            sampler.start(self.exchange)

    def stop(self) -> None:
        """End the threads after what they are doing; groups in flight stay on the ledger."""
        self.exchange.stop()
        for sampler in self._samplers:
            sampler.stop()
        for thread in self._threads:
            thread.join()

    def next_groups(self) -> list[EpisodeGroup]:
        """The next step's groups; fewer only when no prompt is left to issue.

        Blocks; raises WaitGivenUpError once `give_up()` holds. Re-raises what ended one of the threads.
        """
        return self.exchange.take(self._give_up)

    def publish(self, version: int, make: Callable[[], Any]) -> None:
        """The trainer has made `version`; `make()` is the samplers' copy of its weights, made only if they get it."""

        if not self.exchange.publishes(version):
            self.exchange.wake_samplers()
            return
        weights = PolicyWeights(version, make())
        self.exchange.published(version, lambda: self._board.publish(weights))

    def take_events(self) -> list[Event]:
        """What has happened to samplers and groups since the last call; a fleet writes it down sooner."""
        return self.exchange.take_events()

    def report(self, groups: Sequence[EpisodeGroup]) -> dict[str, Any]:
        """For the record of a step on `groups`, the last taken: who waited for whom since the last report, how old the
        groups are by length, and what went wrong on the way (totals).

        `sampler_wait_s` is how long a sampler had nothing to do, the mean over samplers; `sampler_waits_s` its reasons
        and `sampler_idle` the share of slot time without a sequence (see coordinator.Waits).
        """
        waits, trainer_waits_s = self.exchange.take_waits()
        return {
            "sampler_wait_s": sum(waits.empty_s.values()) / max(1.0, waits.samplers),
            "sampler_waits_s": waits.empty_s,
            "sampler_idle": waits.idle_share,
            "samplers": waits.samplers,
            "trainer_waits_s": trainer_waits_s,
            "age_by_length_s": age_by_length(groups, self.exchange.ages_s()),
            "rollouts": self.exchange.counts(),
            **{name: value for sampler in self._samplers for name, value in sampler.report().items()},
        }

    def _score(self) -> None:
        try:
            while (group := self.exchange.next_unscored()) is not None:
                episodes = tuple(self._environment.episodes(group.task, group.completions))
                self.exchange.scored(EpisodeGroup(group.group_id, group.task, episodes))
        except BaseException as error:
            self.exchange.fail(error)

    def _answer(self) -> None:
        try:
            assert self._tools is not None
            while (call := self.exchange.next_call()) is not None:
                self.exchange.answered(call, self._tools.next_turn(call.task, call.completion))
        except BaseException as error:
            self.exchange.fail(error)
