"""Two-operand addition as a procedural task, split into train and held-out problems that never overlap."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer, in text. `task_id` is unique and stable."""

    task_id: str
    prompt: str
    answer: str


def _addition(a: int, b: int) -> Problem:
    return Problem(f"addition/{a}+{b}", f"{a}+{b}=", f"{a + b}")


def _echo_addition(a: int, b: int) -> Problem:
    # Pretrained policies continue an equation far better than they answer with a bare number.
    return Problem(f"echo_addition/{a}+{b}", f"{a} + {b} =", f"{a} + {b} = {a + b}")


TASKS: Mapping[str, Callable[[int, int], Problem]] = {"addition": _addition, "echo_addition": _echo_addition}


def split_problems(task: str, *, low: int, high: int, heldout: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(train, held-out) problems over all operand pairs low..high, disjoint as ordered pairs.

    The split depends on its arguments alone: no global random state, no hashing.
    """
    pairs = [(a, b) for a in range(low, high + 1) for b in range(low, high + 1)]
    order = np.random.default_rng([seed, len(pairs)]).permutation(len(pairs))
    problems = [TASKS[task](*pairs[i]) for i in order]
    return problems[heldout:], problems[:heldout]
