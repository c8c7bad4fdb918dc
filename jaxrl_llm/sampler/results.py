"""What one dispatch sends to the host: JetStream's result with log-probabilities, versions and the slots' status."""

import dataclasses
from typing import NamedTuple

import flax.struct
import numpy as np
from jax import Array

from jaxrl_llm.sampler.jetstream import ResultTokens
from jaxrl_llm.sampler.slots import FORCED


class Columns(NamedTuple):
    """Host views: all [S, steps + 1], `status` [S]."""

    tokens: np.ndarray
    valid: np.ndarray
    forced: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    status: np.ndarray


@flax.struct.dataclass
class PolicyResultTokens(ResultTokens):
    """JetStream's result with more columns: log-probabilities (float32 bits), versions and each slot's status.

    Tokens, flags (JetStream's validity; a forced token has one bit more), log-probabilities and versions each take
    `steps + 1` columns: one for the token sampled when the slot was inserted (valid in the first dispatch afterwards
    only), then one per decode step. JetStream's own index pairs leave that first column out, because to its callers it
    comes with `prefill`.
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
        return Columns(
            data[:, t0 - 1 : t1],
            flags != 0,
            flags & FORCED != 0,
            data[:, slice(*self.logprobs_idx)].view(np.float32),
            data[:, slice(*self.versions_idx)],
            data[:, self.status_idx[0]],
        )


def result_tokens(data: Array | np.ndarray, steps: int, samples_per_slot: int = 1) -> PolicyResultTokens:
    """Name the columns of `data`, int32 [S, 4 * (steps + 1) + 2]."""
    w = steps + 1
    return PolicyResultTokens(
        data=data,
        tokens_idx=(1, w),
        valid_idx=(w + 1, 2 * w),
        logprobs_idx=(2 * w, 3 * w),
        versions_idx=(3 * w, 4 * w),
        length_idx=(4 * w, 4 * w + 1),
        status_idx=(4 * w + 1, 4 * w + 2),
        samples_per_slot=samples_per_slot,
    )
