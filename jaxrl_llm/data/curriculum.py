"""Which training prompts are used, in which order, and when one is retired: by pass rates, measured or recorded.

Static choices (a band of pass rates, a stratified subset, the order) are made from a file of measured rates before the
run begins and depend on that file and the seed alone. What changes with the run is the history of each prompt, and the
position in the stream (prompts.py); both are in checkpoints.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.types import PromptTask, UserError


@dataclass(frozen=True)
class Pool:
    """The training prompts of one source that a run uses, in the order it was asked for; `weight` is its share."""

    name: str
    weight: float
    tasks: list[PromptTask]


class PassRates:
    """Counts of right and all completions per prompt, over the whole run.

    With `retire_at` set, a prompt whose historical pass rate has reached it is retired for good
    (ScaleRL's no-positive-resampling, .9): later epochs skip it.
    """

    def __init__(self, *, retire_at: float | None):
        self._retire_at = retire_at
        self._counts: dict[str, tuple[int, int]] = {}
        self._retired: set[str] = set()

    def record(self, task_id: str, *, right: int, total: int) -> None:
        """`total` completions of one group were scored, `right` of them right."""
        if not 0 <= right <= total:
            raise AssertionError(f"{right} of {total} completions right for {task_id}")
        old_right, old_total = self._counts.get(task_id, (0, 0))
        self._counts[task_id] = (old_right + right, old_total + total)
        rate = self.rate(task_id)
        if self._retire_at is not None and rate is not None and rate >= self._retire_at:
            self._retired.add(task_id)

    def rate(self, task_id: str) -> float | None:
        """Share of right completions so far; None before the first."""
        right, total = self._counts.get(task_id, (0, 0))
        return right / total if total else None

    def retired(self, task_id: str) -> bool:
        return task_id in self._retired

    @property
    def retired_count(self) -> int:
        return len(self._retired)

    def state(self) -> dict[str, Any]:
        counts = {task_id: list(counts) for task_id, counts in self._counts.items()}
        return {"counts": counts, "retired": sorted(self._retired)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._counts = {task_id: (int(right), int(total)) for task_id, (right, total) in state["counts"].items()}
        self._retired = set(state["retired"])


def read_pass_rates(path: str) -> dict[str, float]:
    """task id -> measured pass rate, from the lines {"task_id", "right", "total"} that `jaxrl passrate` writes.

    Raises UserError naming the first line that is none, or that repeats an id.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"pass rates {path} cannot be read ({error}); make them with `jaxrl passrate`") from None
    rates: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        match record:
            case {"measured": _}:
                continue
            case {"task_id": str(task_id), "right": int(right), "total": int(total)} if 0 <= right <= total > 0:
                if task_id in rates:
                    raise UserError(f"{path} line {number}: task {task_id} stands twice")
                rates[task_id] = right / total
            case _:
                raise UserError(f'{path} line {number} is not {{"task_id", "right", "total"}} with 0 <= right <= total')
    if not rates:
        raise UserError(f"pass rates {path} is empty; make them with `jaxrl passrate`")
    return rates


def check_rated(tasks: Sequence[PromptTask], rates: Mapping[str, float], path: str) -> None:
    """Raises UserError if a task has no pass rate: a guess would put it anywhere."""
    missing = [task.task_id for task in tasks if task.task_id not in rates]
    if missing:
        raise UserError(
            f"{path} has no pass rate of {len(missing)} of {len(tasks)} training prompts, {missing[0]} among them; "
            "measure them with `jaxrl passrate` on this configuration"
        )


def within_band(tasks: Sequence[PromptTask], rates: Mapping[str, float], band: tuple[float, float]) -> list[PromptTask]:
    """The tasks whose pass rate lies in the closed interval `band`, in their order.

    IsoCompute's easy prompts have an Avg@16 in [.3, .6], its hard ones in [0, .0625].
    """
    low, high = band
    return [task for task in tasks if low <= rates[task.task_id] <= high]


def stratified_subset(
    tasks: Sequence[PromptTask], rates: Mapping[str, float], count: int, *, strata: int, seed: int
) -> list[PromptTask]:
    """`count` tasks, of each of `strata` equal intervals of the pass rate in proportion (largest remainders first), in
    their order. Drawn from the seed; a larger subset holds a smaller one's share of each stratum.

    Raises UserError if there are not so many.
    """
    if count > len(tasks):
        raise UserError(f"unique_prompts = {count} is more than the {len(tasks)} prompts that there are; ask for fewer")
    members: list[list[int]] = [[] for _ in range(strata)]
    for index, task in enumerate(tasks):
        stratum = 0 if strata == 1 else min(strata - 1, int(rates[task.task_id] * strata))
        members[stratum].append(index)
    exact = [count * len(of) / len(tasks) for of in members]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(strata), key=lambda s: (shares[s] - exact[s], s))
    for stratum in by_remainder[: count - sum(shares)]:
        shares[stratum] += 1
    chosen = [
        index
        for stratum, of in enumerate(members)
        for index in np.random.default_rng([seed, stratum]).permutation(of)[: shares[stratum]]
    ]
    return [tasks[index] for index in sorted(chosen)]


def easy_to_hard(tasks: Sequence[PromptTask], rates: Mapping[str, float], *, seed: int) -> list[PromptTask]:
    """The tasks by falling pass rate; equal ones in an order drawn from the seed."""
    order = np.random.default_rng([seed, len(tasks)]).permutation(len(tasks))
    return [tasks[index] for index in sorted(order, key=lambda index: -rates[tasks[index].task_id])]
