"""Completions of several turns: ids put behind ids."""

import numpy as np

from jaxrl_llm.types import Completion


def extended(before: Completion, after: Completion) -> Completion:
    """`before` and what came after it, which says how the two end."""
    return Completion(
        np.concatenate([before.tokens_T, after.tokens_T]),
        np.concatenate([before.logprobs_T, after.logprobs_T]),
        np.concatenate([before.versions_T, after.versions_T]),
        np.concatenate([before.forced_T, after.forced_T]),
        after.finish,
        calls=before.calls + after.calls,
        failed=after.failed,
    )


def answered(before: Completion, ids: np.ndarray) -> Completion:
    """`before` and what a tool answered to its last call, `ids` (int32 [T])."""
    count = len(ids)
    version = np.full(count, before.versions_T[-1], np.int32)
    answer = Completion(ids, np.zeros(count, np.float32), version, np.ones(count, bool), finish=before.finish, calls=1)
    return extended(before, answer)


def turn_starts(completion: Completion) -> list[int]:
    """Where each turn begins: at 0, and behind every answer of a tool."""
    if not completion.calls:
        return [0]
    ends = completion.forced_T & ~np.append(completion.forced_T[1:], False)
    return [0, *(np.flatnonzero(ends) + 1).tolist()]
