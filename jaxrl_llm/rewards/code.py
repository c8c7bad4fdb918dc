"""Rewards for programs: every test passed, or not."""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxrl_llm.types import PromptTask, Reward

# The last fenced block counts: models think aloud in earlier ones. A fence closes with at least as many marks.
_BLOCK = re.compile(
    r"^(?P<fence>`{3,}|~{3,})[^\n`]*\n(?P<code>.*?)(?:^(?P=fence)[`~]*\s*$|\Z)", re.MULTILINE | re.DOTALL
)


class Examined(Protocol):
    """What became of a program's tests."""

    @property
    def passed(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def all_passed(self) -> bool: ...


Examine = Callable[[str, Sequence[str]], Sequence[Examined | str]]
"""(tests as JSON text, programs) -> what became of each; a text says why nobody knows."""


def program_of(text: str) -> str:
    """The code of the last fenced block of `text`, or all of it if it has none. A block that never closes is one."""
    blocks = list(_BLOCK.finditer(text))
    return blocks[-1]["code"] if blocks else text


class CodeReward:
    """`correct` if a completion ended by itself and its program passes all of its task's tests, else `wrong`.

    The task's answer is the tests, as `examine` takes them. Parts: correct, and tests_passed, the share that passed.
    """

    def __init__(self, examine: Examine, *, correct: float, wrong: float):
        self._examine, self._correct, self._wrong = examine, correct, wrong

    def __call__(self, texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool]) -> list[Reward]:
        rewards = [Reward(self._wrong, {"correct": 0.0, "tests_passed": 0.0}) for _ in texts]
        ended = [index for index, done in enumerate(finished) if done]
        if not ended:
            return rewards
        results = self._examine(task.answer, [program_of(texts[index]) for index in ended])
        for index, found in zip(ended, results, strict=True):
            if isinstance(found, str):
                rewards[index] = Reward(0.0, {}, failed=found)
                continue
            share = found.passed / found.total
            value = self._correct if found.all_passed else self._wrong
            rewards[index] = Reward(value, {"correct": float(found.all_passed), "tests_passed": share})
        return rewards
