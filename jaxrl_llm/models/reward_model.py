"""A reward model: the same decoder with one number per sequence in the place of the vocabulary's logits.

Parameter tree: that of models/transformer.py without `head`, and `score` [1 D].
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.logprobs import project_f32
from jaxrl_llm.models.buckets import length_buckets
from jaxrl_llm.models.transformer import abstract_params, forward, logical_axes
from jaxrl_llm.sharding import param_shardings, replicated, rows_sharding
from jaxrl_llm.types import Params


def sequence_scores(
    config: ModelConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    *,
    mesh: Mesh | None = None,
) -> Float[Array, " B"]:
    """The scalar head, float32 whatever the weights' dtype, at each row's last token; what stands behind it is padding
    and changes nothing. An empty row has a score that means nothing. `mesh` is where the arrays live, if they are
    split."""
    T = tokens_BT.shape[1]
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens_BT.shape)
    segment_ids_BT = (positions_BT < lengths_B[:, None]).astype(jnp.int32)
    hidden_BTD = forward(config, params, tokens_BT, positions_BT, segment_ids_BT, mesh=mesh)
    last_BD = jnp.take_along_axis(hidden_BTD, jnp.maximum(lengths_B - 1, 0)[:, None, None], axis=1)[:, 0]
    return project_f32(last_BD, params["score"])[:, 0]


def reward_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """Where the parameters live, as a tree like them. Raises UserError naming a leaf that the mesh does not divide."""
    axes = logical_axes(config) | {"score": (None, "embed")}
    return param_shardings(mesh, axes, reward_abstract(config))


def reward_abstract(config: ModelConfig) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`s. `config` must have tied embeddings: there is no head."""
    assert config.tie_embeddings
    return abstract_params(config) | {"score": jax.ShapeDtypeStruct((1, config.d_model), config.param_dtype)}


class SequenceScorer:
    """Scores lists of token ids with fixed shapes: `rows` sequences at once, padded to a length of `buckets`.

    The score is taken at the last token that is not `pad_id` (at the first if there is no other), which is
    `transformers`' rule. Each bucket is a program of its own, compiled when a sequence first needs it and never again.
    The params must live on `mesh`. Equal sequences of one call are computed once, so that their scores are equal to
    the bit.
    """

    def __init__(
        self, config: ModelConfig, params: Params, *, mesh: Mesh, rows: int, max_tokens: int, pad_id: int | None
    ):
        self._params, self._rows, self._mesh, self._pad_id = params, rows, mesh, pad_id
        self.buckets = length_buckets(max_tokens)
        self._jitted = jax.jit(partial(sequence_scores, config, mesh=mesh), out_shardings=replicated(mesh))
        self._programs: dict[int, Any] = {}

    @property
    def compiled(self) -> tuple[int, ...]:
        """The buckets whose programs exist."""
        return tuple(sorted(self._programs))

    def __call__(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Scores float32 [N] of N sequences, each of 1 ... max_tokens ids."""
        read = [self._until_score(ids) for ids in sequences]
        by_bucket: dict[int, list[tuple[int, ...]]] = {}
        for ids in dict.fromkeys(read):
            bucket = next(bucket for bucket in self.buckets if bucket >= len(ids))
            by_bucket.setdefault(bucket, []).append(ids)
        scores: dict[tuple[int, ...], np.float32] = {}
        for bucket, group in by_bucket.items():
            for start in range(0, len(group), self._rows):
                part = group[start : start + self._rows]
                scores |= zip(part, self._run(part, bucket), strict=False)
        return np.array([scores[ids] for ids in read], np.float32)

    def _until_score(self, ids: Sequence[int]) -> tuple[int, ...]:
        """What stands behind the token that the score is taken at cannot change it."""
        last = next((at for at in reversed(range(len(ids))) if ids[at] != self._pad_id), 0)
        return tuple(ids[: last + 1])

    def _run(self, part: Sequence[tuple[int, ...]], bucket: int) -> np.ndarray:
        tokens, lengths = np.zeros((self._rows, bucket), np.int32), np.zeros(self._rows, np.int32)
        for row, ids in enumerate(part):
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        placed = jax.device_put((tokens, lengths), (rows_sharding(self._mesh), replicated(self._mesh)))
        if bucket not in self._programs:
            self._programs[bucket] = self._jitted.lower(self._params, *placed).compile()
        return np.asarray(self._programs[bucket](self._params, *placed))
