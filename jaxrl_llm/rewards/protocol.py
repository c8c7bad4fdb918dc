"""What a reward is."""

import math
from collections.abc import Sequence
from typing import Protocol

from jaxrl_llm.types import PromptTask, Reward


class RewardFunction(Protocol):
    """The rewards of all completions of one prompt, in their order; called from several threads at once.

    `finished` says which completions ended by themselves. A reward depends on the prompt and its completions alone. One
    that says what is right has the part "correct", 0 or 1, unless it failed.
    """

    def __call__(self, texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool]) -> list[Reward]: ...


def answered(right: bool, *, correct: float, wrong: float) -> Reward:
    """The reward of an answer that is right or wrong."""
    return Reward(correct if right else wrong, {"correct": float(right)})


def failed(reason: str) -> Reward:
    """No reward, and why: such a completion is dropped, never scored 0."""
    return Reward(math.nan, {}, failed=reason)
