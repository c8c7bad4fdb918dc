"""Per-prompt history of pass rates, and the rule that retires prompts the policy has mastered."""

from collections.abc import Mapping
from typing import Any


class PassRates:
    """Counts of right and all completions per prompt, over the whole run.

    With `retire_at` set, a prompt whose historical pass rate has reached it is retired for good
    (ScaleRL's no-positive-resampling, .9): later epochs skip it.
    """

    def __init__(self, *, retire_at: float | None):
        self._retire_at = retire_at
        self._counts: dict[str, tuple[int, int]] = {}

    def record(self, task_id: str, *, right: int, total: int) -> None:
        if not 0 <= right <= total:
            raise AssertionError(f"{right} of {total} completions right for {task_id}")
        old_right, old_total = self._counts.get(task_id, (0, 0))
        self._counts[task_id] = (old_right + right, old_total + total)

    def rate(self, task_id: str) -> float | None:
        """Share of right completions so far; None before the first."""
        right, total = self._counts.get(task_id, (0, 0))
        return right / total if total else None

    def retired(self, task_id: str) -> bool:
        rate = self.rate(task_id)
        return self._retire_at is not None and rate is not None and rate >= self._retire_at

    @property
    def retired_count(self) -> int:
        return sum(self.retired(task_id) for task_id in self._counts)

    def state(self) -> dict[str, Any]:
        return {task_id: list(counts) for task_id, counts in self._counts.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._counts = {task_id: (int(right), int(total)) for task_id, (right, total) in state.items()}
