"""Completions of several turns: ids put behind ids."""

import numpy as np

from jaxrl_llm.types import Completion


def extended(before: Completion, after: Completion) -> Completion:
    """`before` and what came after it, which says how the two end."""
    length = len(before.tokens_T)
    return Completion(
        np.concatenate([before.tokens_T, after.tokens_T]),
        np.concatenate([before.logprobs_T, after.logprobs_T]),
        np.concatenate([before.versions_T, after.versions_T]),
        np.concatenate([before.forced_T, after.forced_T]),
        after.finish,
        turns=(*before.turns, *(length + start for start in after.turns)),
        failed=after.failed,
    )


def answered(before: Completion, ids: np.ndarray) -> Completion:
    """`before` and what a tool answered to the call at its end, `ids` (int32 [T], maybe none)."""
    count = len(ids)
    version = np.full(count, before.versions_T[-1], np.int32)
    said = ids, np.zeros(count, np.float32), version, np.ones(count, bool)
    return extended(before, Completion(*said, before.finish, turns=(count,)))
