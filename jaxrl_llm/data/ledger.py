"""The books of issued prompt groups: issued = trained + dropped(reason) + in flight, always."""

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Ledger:
    """Every issued group ends in exactly one of trained, dropped(reason), in flight.

    A group's id counts issues; its source index says which prompt it is, so that a group in flight when a run
    stopped is issued again under its own id.
    """

    def __init__(self):
        self._in_flight: dict[int, int] = {}
        self._next_group = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()

    @property
    def issued(self) -> int:
        return self._next_group

    @property
    def in_flight(self) -> dict[int, int]:
        """group id -> source index, in issue order."""
        return dict(self._in_flight)

    def issue(self, source_index: int) -> int:
        group_id = self._next_group
        self._next_group += 1
        self._in_flight[group_id] = source_index
        return group_id

    def train(self, group_id: int) -> None:
        self._settle(group_id)
        self.trained += 1

    def drop(self, group_id: int, reason: str) -> None:
        self._settle(group_id)
        self.dropped[reason] += 1

    def _settle(self, group_id: int) -> None:
        if group_id not in self._in_flight:
            raise AssertionError(f"group {group_id} is not in flight: trained or dropped twice, or never issued")
        del self._in_flight[group_id]

    def state(self) -> dict[str, Any]:
        return {
            "next_group": self._next_group,
            "in_flight": [[group, index] for group, index in self._in_flight.items()],
            "trained": self.trained,
            "dropped": dict(self.dropped),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next_group = int(state["next_group"])
        self._in_flight = {int(group): int(index) for group, index in state["in_flight"]}
        self.trained = int(state["trained"])
        self.dropped = Counter({reason: int(n) for reason, n in state["dropped"].items()})
        if self.issued != self.trained + self.dropped.total() + len(self._in_flight):
            raise AssertionError(f"ledger does not balance: {state}")
