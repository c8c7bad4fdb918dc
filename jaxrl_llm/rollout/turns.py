"""Episodes of several turns: who answers the policy's calls of tools, and how an episode goes on after one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_llm.types import Completion, PromptTask, SampleRequest, Turn


@dataclass(frozen=True)
class Tools:
    """`next_turn(task, completion)` answers the call at the completion's end, and may be called `at_once` times."""

    next_turn: Callable[[PromptTask, Completion], Turn]
    at_once: int


def next_request(first: SampleRequest, turn: Turn) -> SampleRequest:
    """What the turn after `turn` is asked for with, in the episode that `first` began.

    Its prompt are the ids there are, and its tokens' keys are numbered on from theirs.
    """
    so_far = turn.completion.tokens_T
    return replace(
        first,
        tokens_T=np.concatenate([first.tokens_T, so_far]),
        sampling=replace(first.sampling, max_new_tokens=turn.more),
        first=len(so_far),
    )
