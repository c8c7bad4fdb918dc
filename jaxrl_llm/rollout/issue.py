"""Which prompt goes to the sampler next, and the books about it, shared by the sampling and the training thread."""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.data.curriculum import PassRates
from jaxrl_llm.data.ledger import Ledger
from jaxrl_llm.data.prompts import Prompts
from jaxrl_llm.types import EpisodeGroup, PromptTask

_LOG = logging.getLogger(__name__)


class GroupIssuer:
    """Issues prompt groups: first those in flight when the run last stopped, then the stream, retired prompts skipped.

    One lock makes "advance the stream" and "book the group" a single act, so a checkpoint never falls between them.
    With `most_replaced`, so many groups a step are replaced where all completions are right or all are wrong (DAPO's
    dynamic sampling, with a bound); what is scored ahead counts for the step that is settled next.
    """

    def __init__(self, stream: Prompts, rates: PassRates, *, most_replaced: int = 0):
        self._stream, self._rates, self._ledger = stream, rates, Ledger()
        self._most_replaced, self._replaced, self._said = most_replaced, [0, 0], False  # all wrong, all right
        self._again: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def take(self) -> tuple[int, PromptTask] | None:
        """(group id, prompt), or None once every prompt of the stream is retired or used up."""
        with self._lock:
            if self._again:
                group_id, index = self._again.pop(0)
                task = self._stream[index]
                assert task is not None  # it was issued once
                return group_id, task
            for _ in range(self._stream.epoch_size * 2):  # two epochs' worth of indices meet every prompt at least once
                index = self._stream.next_index
                self._stream.next_index += 1
                task = self._stream[index]
                if task is not None and not self._rates.retired(task.task_id):
                    return self._ledger.issue(index), task
            return None

    @property
    def waiting(self) -> int:
        """Groups that were in flight when the run last stopped and have not been issued again yet."""
        with self._lock:
            return len(self._again)

    def refuse(self, group: EpisodeGroup) -> bool:
        """Whether a scored group is to be replaced by another; if so its books are closed.

        One without any reward is none of ours: it is dropped as such when its step is settled.
        """
        right, total = _counts(group)
        if not self._most_replaced or not total or 0 < right < total:
            return False
        with self._lock:
            if sum(self._replaced) >= self._most_replaced:
                if not self._said:
                    wrong, all_right = self._replaced
                    _LOG.warning(
                        "dynamic sampling has replaced %d prompts in one step (%d of pass rate 0, %d of pass rate 1), "
                        "as many as algorithm.dynamic_sampling allows; the step goes on with what it gets",
                        wrong + all_right, wrong, all_right,
                    )  # fmt: skip
                self._said = True
                return False
            self._replaced[right > 0] += 1
            self._ledger.drop(group.group_id, "all_right" if right else "all_wrong")
            self._rates.record(group.task.task_id, right=right, total=total)
        return True

    def settle(
        self, trained: Sequence[EpisodeGroup], dropped: Mapping[int, str], scored: Sequence[EpisodeGroup]
    ) -> None:
        """Close the books on one step: groups that trained, groups dropped (id -> reason), and all that were scored."""
        with self._lock:
            for group in trained:
                self._ledger.train(group.group_id)
            for group_id, reason in dropped.items():
                self._ledger.drop(group_id, reason)
            for group in scored:
                right, total = _counts(group)
                self._rates.record(group.task.task_id, right=right, total=total)
            self._replaced, self._said = [0, 0], False

    def drop(self, group_id: int, reason: str) -> None:
        """A group that no trainer will see."""
        with self._lock:
            self._ledger.drop(group_id, reason)

    def counts(self) -> dict[str, Any]:
        with self._lock:
            return {
                "prompts_issued": self._ledger.issued,
                "prompts_trained": self._ledger.trained,
                "prompts_dropped": dict(self._ledger.dropped),
                "prompts_in_flight": len(self._ledger.in_flight),
                "prompts_retired": self._rates.retired_count,
            }

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {
                "next_index": self._stream.next_index,
                "ledger": self._ledger.state(),
                "pass_rates": self._rates.state(),
                "replaced": list(self._replaced),
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._stream.next_index = int(state["next_index"])
            self._ledger.restore(state["ledger"])
            self._rates.restore(state["pass_rates"])
            self._replaced, self._said = list(state["replaced"]), False
            self._again = list(self._ledger.in_flight.items())


def _counts(group: EpisodeGroup) -> tuple[int, int]:
    """(right, scored) completions of a group."""
    rewards = [episode.reward for episode in group.episodes if episode.reward.failed is None]
    return sum(reward.parts["correct"] > 0 for reward in rewards), len(rewards)
