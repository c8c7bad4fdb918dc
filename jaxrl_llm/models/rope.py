"""Rotary positions: frequencies with their published scalings, and the rotation itself."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import ModelConfig, RopeScalingConfig


class Rotation(NamedTuple):
    """Cosines and sines of every position, float32 [*b 1 C/2]: the same for all heads."""

    cos: Array
    sin: Array


def rope_frequencies(
    theta: float, head_dim: int, scaling: RopeScalingConfig, max_context: int
) -> tuple[np.ndarray, float]:
    """Radians per position of each rotary pair (float32 [C/2]), and what the rotated vectors are multiplied by.

    Unscaled, pair i of a head of width C turns by theta**(-2i/C) (arXiv:2104.09864). The scalings, by factor s:

    - linear (arXiv:2306.15595): every frequency over s.
    - dynamic: theta grows to theta * (s r - s + 1)**(C / (C - 2)), r = max_context / original_context (at least 1).
      The base belongs to the longest sequence the model is set up for, not to each sequence's own length: keys in a
      cache could not follow a base that changes as their sequence grows.
    - llama3 (the Llama 3.1 release): wavelengths above original_context / low_freq_factor are divided by s, below
      original_context / high_freq_factor kept; between them linear in original_context over the wavelength.
    - yarn (arXiv:2309.00071): pairs that turn more than beta_fast times within original_context are kept, less than
      beta_slow times divided by s, a linear ramp over the pairs between (whole pairs at its ends).
    """
    half = head_dim // 2
    if scaling.kind == "dynamic":
        stretch = max(1.0, max_context / _set(scaling.original_context))
        theta *= (scaling.factor * stretch - scaling.factor + 1) ** (head_dim / (head_dim - 2))
    kept = theta ** (-np.arange(half) / half)
    divided = kept / scaling.factor
    if scaling.kind in ("none", "dynamic"):
        return kept.astype(np.float32), 1.0
    if scaling.kind == "linear":
        return divided.astype(np.float32), 1.0
    if scaling.kind == "llama3":
        low, high = _set(scaling.low_freq_factor), _set(scaling.high_freq_factor)
        turns = _set(scaling.original_context) * kept / (2 * math.pi)
        share_kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (share_kept * kept + (1 - share_kept) * divided).astype(np.float32), 1.0

    def pair_that_turns(times: float) -> float:
        return half * math.log(_set(scaling.original_context) / (times * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(pair_that_turns(_set(scaling.beta_fast))), 0)
    last = min(math.ceil(pair_that_turns(_set(scaling.beta_slow))), head_dim - 1)
    share_divided = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0.0, 1.0)
    frequencies = share_divided * divided + (1 - share_divided) * kept
    return frequencies.astype(np.float32), _set(scaling.attention_factor)


def _set(value: float | None) -> float:
    assert value is not None  # RopeScalingConfig checks it
    return value


def rotations(config: ModelConfig, positions: Int[Array, "*b"]) -> tuple[Rotation, Rotation | None]:
    """The rotation of the layers, and that of the local layers where they have a base of their own."""
    everywhere = _rotation(positions, config.rope_theta, config.head_dim, config.rope_scaling, config.max_context)
    if config.local_rope_theta is None:
        return everywhere, None
    return everywhere, _rotation(
        positions, config.local_rope_theta, config.head_dim, RopeScalingConfig(), config.max_context
    )


def _rotation(positions, theta: float, head_dim: int, scaling: RopeScalingConfig, max_context: int) -> Rotation:
    frequencies, factor = rope_frequencies(theta, head_dim, scaling, max_context)
    angles = positions[..., None, None].astype(jnp.float32) * np.expand_dims(
        frequencies, tuple(range(positions.ndim + 1))
    )
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: Float[Array, "*b n C"], rotation: Rotation) -> Float[Array, "*b n C"]:
    """Turns pair i, (x[i], x[i + C/2]) in the half-split convention, by its angle; computed in float32."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
