"""The reward of a reward model: what it says about a prompt and a completion, or why it says nothing."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.rewards.protocol import failed
from jaxrl_llm.types import PromptTask, Reward, UserError


def learned_rewards(
    texts: Sequence[str],
    task: PromptTask,
    *,
    finished: Sequence[bool],
    encode: Callable[[str, str], list[int]],
    score: Callable[[Sequence[Sequence[int]]], np.ndarray],
    max_tokens: int,
) -> list[Reward]:
    """One reward for each completion, finished or not: the score of `encode(prompt, completion)`, also as the part
    "model".

    `score` is called once, with all that can be scored. A completion that cannot be encoded (UserError), has more than
    `max_tokens` tokens or a score that is not finite gets a failed reward: a reward model that cannot judge says
    nothing about the completion.
    """
    reasons: dict[int, str] = {}
    encoded: dict[int, list[int]] = {}
    for index, text in enumerate(texts):
        try:
            ids = encode(task.prompt, text)
        except UserError as error:
            reasons[index] = f"the reward model cannot be given the text: {error}"
            continue
        if len(ids) > max_tokens:
            reasons[index] = f"{len(ids)} tokens are more than the {max_tokens} that the reward model may be given"
        else:
            encoded[index] = ids
    values = dict(zip(encoded, score(list(encoded.values())).tolist(), strict=True)) if encoded else {}
    reasons |= {i: f"the reward model's score is {value}" for i, value in values.items() if not math.isfinite(value)}
    return [failed(reasons[i]) if i in reasons else Reward(values[i], {"model": values[i]}) for i in range(len(texts))]
