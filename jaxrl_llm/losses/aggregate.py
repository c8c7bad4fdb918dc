"""From token objectives to one number: token weights whose weighted sum is minus the loss.

The weights are worked out once on the host for the whole optimizer batch. Every denominator is global by construction,
so microbatches, devices and hosts only add up numerators: loss = -sum(weights * J) is the same however it is split.
"""

from typing import Literal, get_args

import numpy as np

Aggregation = Literal["token", "sample", "prompt", "constant", "sequence_sum"]


def completion_weights(
    lengths_N: np.ndarray,
    prompt_index_N: np.ndarray,
    keep_N: np.ndarray,
    *,
    kind: Aggregation,
    max_tokens: int | None = None,
) -> np.ndarray:
    """Weight of each trainable token of each completion: float64 [N].

    `lengths_N` counts trainable tokens, `prompt_index_N` names each completion's prompt group by any integer, `keep_N`
    is False for completions that left the batch (dropped, truncated and masked, zero variance). Those weigh 0 and are
    in no denominator. With n kept completions, m kept prompts and |y| tokens:

    - token: 1 / sum of |y| over the batch (DAPO)
    - sample: 1 / (n |y|) (GRPO)
    - prompt: 1 / (m * sum of |y| over the prompt's kept siblings) (ScaleRL, Magistral)
    - constant: 1 / (n max_tokens), whatever was padded (Dr. GRPO)
    - sequence_sum: 1 / n

    A prompt counts as kept while one of its completions is. Nothing kept gives all zeros.
    Raises ValueError on an unknown kind, on `max_tokens` given or missing against the kind, and on a kept completion
    without a trainable token.
    """
    if kind not in get_args(Aggregation):
        raise ValueError(f"aggregation {kind!r} is unknown; choose one of {', '.join(get_args(Aggregation))}")
    if (kind == "constant") != (max_tokens is not None):
        raise ValueError(f"max_tokens is {max_tokens} with aggregation {kind!r}; only 'constant' divides by it")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; aggregation 'constant' divides by it")
    keep_N = np.asarray(keep_N, bool)
    lengths_N = np.where(keep_N, np.asarray(lengths_N, np.int64), 0)
    if (empty := np.flatnonzero(keep_N & (lengths_N < 1))).size:
        raise ValueError(f"completion {empty[0]} is kept but has {lengths_N[empty[0]]} trainable tokens; drop it")
    if not keep_N.any():
        return np.zeros(keep_N.shape)

    completions = int(keep_N.sum())
    match kind:
        case "token":
            denominator_N = np.full(keep_N.shape, lengths_N.sum())
        case "sample":
            denominator_N = completions * lengths_N
        case "prompt":
            _, group_N = np.unique(prompt_index_N, return_inverse=True)
            tokens_P = np.bincount(group_N, weights=lengths_N)
            denominator_N = np.count_nonzero(tokens_P) * tokens_P[group_N]
        case "constant":
            assert max_tokens is not None  # checked above
            denominator_N = np.full(keep_N.shape, completions * max_tokens)
        case "sequence_sum":
            denominator_N = np.full(keep_N.shape, completions)
    return np.where(keep_N, 1.0 / np.where(keep_N, denominator_N, 1), 0.0)
