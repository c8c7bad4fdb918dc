"""Rewards that compare texts."""

import re
import unicodedata
from collections.abc import Sequence

from jaxrl_llm.rewards.protocol import answered
from jaxrl_llm.types import PromptTask, Reward


def exact_match(
    texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool], correct: float, wrong: float
) -> list[Reward]:
    """`correct` if the completion ended by itself and its text is the answer, else `wrong`.

    Surrounding white space is ignored. A truncated completion is wrong whatever its text: it never said it was done.
    """
    return [
        answered(ended and text.strip() == task.answer.strip(), correct=correct, wrong=wrong)
        for text, ended in zip(texts, finished, strict=True)
    ]


def normalised_match(
    texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool], correct: float, wrong: float
) -> list[Reward]:
    """`exact_match` of `normalised` texts; an answer of which nothing is left is compared exactly."""
    wanted = normalised(task.answer)
    if not wanted:
        return exact_match(texts, task, finished=finished, correct=correct, wrong=wrong)
    return [
        answered(ended and normalised(text) == wanted, correct=correct, wrong=wrong)
        for text, ended in zip(texts, finished, strict=True)
    ]


def normalised(text: str) -> str:
    """Case, punctuation, the articles a, an and the, compatibility forms of characters and runs of white space do not
    count; signs that mean something in a number or a formula do."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = re.sub(r"[!\"#&'`,;:?\[\]{}_~]|\.(?!\d)", " ", folded)
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))
