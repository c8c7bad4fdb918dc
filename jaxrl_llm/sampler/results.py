"""What one dispatch sends to the host: JetStream's result with log-probabilities, versions and the slots' status."""

import dataclasses
from typing import NamedTuple

import flax.struct
import numpy as np
from jax import Array

from jaxrl_llm.sampler.jetstream import ResultTokens
from jaxrl_llm.sampler.slots import FORCED


class Columns(NamedTuple):
    """Host views: all [S, steps + 1], `status` [S], what is known of alternatives [S, steps + 1, A]."""

    tokens: np.ndarray
    valid: np.ndarray
    forced: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    status: np.ndarray
    likeliest: np.ndarray
    likeliest_logprobs: np.ndarray


@flax.struct.dataclass
class PolicyResultTokens(ResultTokens):
    """JetStream's result with more columns: log-probabilities (float32 bits), versions, alternatives, slots' status.

    Tokens, flags (JetStream's validity; a forced token has one bit more), log-probabilities, versions and each of the
    likeliest tokens and their log-probabilities take `steps + 1` columns: one for the token sampled when the slot was
    inserted (valid in the first dispatch afterwards only), then one per decode step. JetStream's own index pairs leave
    that first column out, because to its callers it comes with `prefill`.
    """

    logprobs_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    versions_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    status_idx: tuple[int, int] = flax.struct.field(pytree_node=False)

    def convert_to_numpy(self) -> "PolicyResultTokens":
        return dataclasses.replace(self, data=np.asarray(self.data))

    @property
    def steps(self) -> int:
        """Decode steps a dispatch may take."""
        return self.tokens_idx[1] - self.tokens_idx[0]

    def columns(self) -> Columns:
        data = np.asarray(self.data)
        (t0, t1), (v0, v1) = self.tokens_idx, self.valid_idx
        flags = data[:, v0 - 1 : v1]
        beside = data[:, self.versions_idx[1] : self.length_idx[0]].reshape(len(data), 2, -1, t1 - t0 + 1)
        likeliest, theirs = beside.swapaxes(2, 3).swapaxes(0, 1)
        return Columns(
            data[:, t0 - 1 : t1],
            flags != 0,
            flags & FORCED != 0,
            data[:, slice(*self.logprobs_idx)].view(np.float32),
            data[:, slice(*self.versions_idx)],
            data[:, self.status_idx[0]],
            likeliest,
            theirs.view(np.float32),
        )


def result_tokens(data: Array | np.ndarray, steps: int, samples_per_slot: int = 1) -> PolicyResultTokens:
    """Name the columns of `data`, int32 [S, (4 + 2 A) * (steps + 1) + 2]."""
    w, last = steps + 1, data.shape[1] - 2
    return PolicyResultTokens(
        data=data,
        tokens_idx=(1, w),
        valid_idx=(w + 1, 2 * w),
        logprobs_idx=(2 * w, 3 * w),
        versions_idx=(3 * w, 4 * w),
        length_idx=(last, last + 1),
        status_idx=(last + 1, last + 2),
        samples_per_slot=samples_per_slot,
    )
