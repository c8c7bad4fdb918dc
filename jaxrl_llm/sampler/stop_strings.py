"""Finding the token that completes a stop string."""

from collections.abc import Callable, Sequence

import numpy as np

# Special tokens decode to nothing, so a stop string may reach over a few more tokens than it has bytes.
_SLACK = 8


def first_stop(
    decode: Callable[[Sequence[int]], str], tokens_T: np.ndarray, stop_strings: Sequence[str], already: int
) -> int | None:
    """Length of the shortest beginning of `tokens_T` whose text holds a stop string that its first `already` tokens
    did not complete; None if there is none.

    Every ordinary token is at least one byte of text, so only the last few tokens before `already` can take part.
    """
    longest = max(len(stop.encode()) for stop in stop_strings)
    start = max(0, already - longest - _SLACK)
    before = decode(tokens_T[start:already].tolist())
    for end in range(already + 1, len(tokens_T) + 1):
        text = decode(tokens_T[start:end].tolist())
        if any(stop in text and stop not in before for stop in stop_strings):
            return end
    return None
