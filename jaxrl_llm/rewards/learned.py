"""The reward of a reward model: what it says about a prompt and a completion, or why it says nothing."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.types import Reward, UserError


def learned_rewards(
    prompt: str,
    completions: Sequence[str],
    *,
    encode: Callable[[str, str], list[int]],
    score: Callable[[Sequence[Sequence[int]]], np.ndarray],
    max_tokens: int,
) -> list[Reward]:
    """One reward for each completion: the score of `encode(prompt, completion)`, also as the part "model".

    `score` is called once, with all that can be scored. A completion that cannot be encoded (UserError), has more than
    `max_tokens` tokens or a score that is not finite gets a failed reward: a reward model that cannot judge says
    nothing about the completion.
    """
    failed: dict[int, str] = {}
    encoded: dict[int, list[int]] = {}
    for index, completion in enumerate(completions):
        try:
            ids = encode(prompt, completion)
        except UserError as error:
            failed[index] = f"the reward model cannot be given the text: {error}"
            continue
        if len(ids) > max_tokens:
            failed[index] = f"{len(ids)} tokens are more than the {max_tokens} that the reward model may be given"
        else:
            encoded[index] = ids
    values = dict(zip(encoded, score(list(encoded.values())).tolist(), strict=True)) if encoded else {}
    failed |= {i: f"the reward model's score is {value}" for i, value in values.items() if not math.isfinite(value)}
    return [
        Reward(math.nan, {}, failed=failed[i]) if i in failed else Reward(values[i], {"model": values[i]})
        for i in range(len(completions))
    ]
