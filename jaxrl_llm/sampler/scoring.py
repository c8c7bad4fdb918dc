"""Log-probabilities of tokens that are given, and the likeliest tokens at their places: on the device, then as numpy.

Suffixes: N places, V vocabulary, A alternatives, P prompts, T positions of a padded prompt.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxrl_llm.sampler.sampling import softmax_of
from jaxrl_llm.types import Alternatives, PromptScores


def score(logits_NV: Array, targets_N: Array, alternatives: int) -> Array:
    """int32 [N, 1 + 2 A]: the target's log-probability (float32 bits) at temperature 1, the likeliest ids, and theirs.

    A target that is among the likeliest has the same number, bit for bit, in both places.
    """
    softmax = softmax_of(logits_NV, jnp.ones(len(logits_NV), jnp.float32))
    logits_NA, ids_NA = lax.top_k(logits_NV, alternatives)
    own_N, theirs_NA = softmax.logprob(logits_NV, targets_N), softmax.of(logits_NA)
    own_N1, theirs_NA = (lax.bitcast_convert_type(x, jnp.int32) for x in (own_N[:, None], theirs_NA))
    return jnp.concatenate([own_N1, ids_NA, theirs_NA], axis=1)


class ScoredPrompts:
    """What `score` said of a prefill's prompts: `parts` are int32 [P, T, 1 + 2 A], one after the other along T.

    The copy to the host starts at once; reading waits for it.
    """

    def __init__(self, parts: Sequence[Array]):
        self._parts = tuple(parts)
        for part in self._parts:
            part.copy_to_host_async()

    @functools.cached_property
    def _columns(self) -> np.ndarray:
        return np.concatenate([np.asarray(part) for part in self._parts], axis=1)

    def read(self, row: int, length: int, alternatives: int) -> PromptScores:
        """The scores of one prompt of `length` tokens, with as many of the alternatives."""
        columns = self._columns[row, : length - 1]
        kept = (columns.shape[1] - 1) // 2
        ids, theirs = columns[:, 1 : 1 + alternatives], columns[:, 1 + kept : 1 + kept + alternatives]
        own = np.ascontiguousarray(columns[:, 0]).view(np.float32)
        return PromptScores(own, Alternatives(ids.copy(), theirs.copy().view(np.float32)))
