"""Which prompt goes to the sampler next, and the books about it, shared by the sampling and the training thread."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.data.curriculum import PassRates
from jaxrl_llm.data.ledger import Ledger
from jaxrl_llm.data.prompts import Prompts
from jaxrl_llm.types import EpisodeGroup, PromptTask


class GroupIssuer:
    """Issues prompt groups: first those in flight when the run last stopped, then the stream, retired prompts skipped.

    One lock makes "advance the stream" and "book the group" a single act, so a checkpoint never falls between them.
    """

    def __init__(self, stream: Prompts, rates: PassRates):
        self._stream, self._rates, self._ledger = stream, rates, Ledger()
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
                rewards = [e.reward for e in group.episodes if e.reward.failed is None]
                right = sum(reward.parts["correct"] > 0 for reward in rewards)
                self._rates.record(group.task.task_id, right=right, total=len(rewards))

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
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._stream.next_index = int(state["next_index"])
            self._ledger.restore(state["ledger"])
            self._rates.restore(state["pass_rates"])
            self._again = list(self._ledger.in_flight.items())
