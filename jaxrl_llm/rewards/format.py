"""A reward for the form of a completion: thoughts between tags, then an answer."""

from collections.abc import Sequence

from jaxrl_llm.rewards.extract import boxes
from jaxrl_llm.types import PromptTask, Reward


def format_reward(
    texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool], opened_in_prompt: bool, boxed: bool
) -> list[Reward]:
    """1 for a completion that ended by itself and `follows` the form, else 0; also as the part "format"."""
    values = [
        float(ended and follows(text, opened_in_prompt=opened_in_prompt, boxed=boxed))
        for text, ended in zip(texts, finished, strict=True)
    ]
    return [Reward(value, {"format": value}) for value in values]


def follows(text: str, *, opened_in_prompt: bool, boxed: bool) -> bool:
    r"""Whether a text is `<think>` thoughts `</think>` answer: each tag once, neither thoughts nor answer empty and
    nothing before. Where the prompt ended with the first tag the text begins behind it. With `boxed` the answer holds a
    \boxed{}.
    """
    if not opened_in_prompt:
        if not text.lstrip().startswith("<think>"):
            return False
        text = text.lstrip().removeprefix("<think>")
    thoughts, closed, answer = text.partition("</think>")
    if not closed or "<think>" in text or "</think>" in answer:
        return False
    return bool(thoughts.strip() and answer.strip()) and (not boxed or bool(boxes(answer)))
