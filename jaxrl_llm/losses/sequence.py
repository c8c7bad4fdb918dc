"""Reductions over the trainable tokens of a sequence, spread back to its tokens.

Rows are padded (one sequence per row: `segment_ids` None) or packed (`segment_ids` int [..., T], any ids in
[0, num_segments); the padding's id counts too). `num_segments` is static. Time is the last axis.
Sums are masked comparisons against each id, which XLA fuses: no scatter, the same bits on every run, and rows sharded
over devices stay where they are.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def _same_segment(segment_ids: Array, num_segments: int) -> Array:
    """Bool [..., S, T]."""
    segments_S1 = jnp.arange(num_segments, dtype=segment_ids.dtype)[:, None]
    return segment_ids[..., None, :] == jnp.expand_dims(segments_S1, tuple(range(segment_ids.ndim - 1)))


def _structure(segment_ids: Array | None, num_segments: int | None) -> tuple[Array, int] | None:
    """Both of them for packed rows, None for padded rows."""
    if segment_ids is None and num_segments is None:
        return None
    if segment_ids is None or num_segments is None:
        raise ValueError(f"packed rows need segment_ids and a static num_segments; num_segments is {num_segments}")
    return jnp.asarray(segment_ids), num_segments


def sequence_sum(
    x: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    segment_ids: Int[Array, "*b T"] | None = None,
    num_segments: int | None = None,
) -> Float[Array, "*b T"]:
    """At every token the sum of `x` over the trainable tokens of its sequence.

    A trainable token whose id is not in [0, num_segments) gets NaN: a wrong `num_segments` must not train quietly.
    Raises ValueError if only one of `segment_ids` and `num_segments` is given.
    """
    packed = _structure(segment_ids, num_segments)
    x = jnp.where(mask, x, 0.0)
    if packed is None:
        return jnp.broadcast_to(x.sum(axis=-1, keepdims=True), x.shape)
    segment_ids, num_segments = packed
    same_ST = _same_segment(segment_ids, num_segments)
    sums_S1 = jnp.where(same_ST, x[..., None, :], 0.0).sum(axis=-1, keepdims=True)
    spread = jnp.where(same_ST, sums_S1, 0.0).sum(axis=-2)
    lost = mask & ((segment_ids < 0) | (segment_ids >= num_segments))
    return jnp.where(lost, jnp.nan, spread)


def sequence_mean(
    x: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    segment_ids: Int[Array, "*b T"] | None = None,
    num_segments: int | None = None,
) -> Float[Array, "*b T"]:
    """At every token the mean of `x` over the trainable tokens of its sequence (0 where there is none)."""
    count = sequence_sum(jnp.ones_like(x), mask, segment_ids, num_segments)
    return sequence_sum(x, mask, segment_ids, num_segments) / jnp.maximum(count, 1.0)


def is_last(
    mask: Bool[Array, "*b T"], segment_ids: Int[Array, "*b T"] | None = None, num_segments: int | None = None
) -> Bool[Array, "*b T"]:
    """True at the last trainable token of each sequence."""
    packed = _structure(segment_ids, num_segments)
    place = jnp.where(mask, jnp.arange(1, mask.shape[-1] + 1), jnp.zeros(mask.shape, jnp.int32))
    if packed is None:
        return mask & (place == place.max(axis=-1, keepdims=True))
    segment_ids, num_segments = packed
    same_ST = _same_segment(segment_ids, num_segments)
    last_S1 = jnp.where(same_ST, place[..., None, :], 0).max(axis=-1, keepdims=True)
    return mask & (place == jnp.where(same_ST, last_S1, 0).max(axis=-2))
