"""Rotary positions: frequencies with their published scalings, and the rotation itself."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import ModelConfig, RopeScalingConfig


class Rotation(NamedTuple):
    """Cosines and sines of every position, float32 [*b 1 C/2]: the same for all heads.

    `turns` (bool []) says whether the layer rotates at all; None, that all layers do. `temperature` (float32 [*b 1 1])
    multiplies the queries after rotation.
    """

    cos: Array
    sin: Array
    turns: Array | None = None
    temperature: Array | None = None


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
      original_context / high_freq_factor kept; between them linear in original_context over the wavelength (Llama 4:
      both factors are the same, nothing is between).
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
        share_kept = np.clip((turns - low) / (high - low), 0.0, 1.0) if low < high else (turns > low) * 1.0
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


def rotations(config: ModelConfig, positions: Int[Array, "*b"]) -> dict[str, Rotation]:
    """The rotation of every kind of layer in `config.attention_pattern`, all of one structure.

    Local layers (L) may have a base of their own. Layers without rope (N) turn by nothing; their queries may have a
    temperature that grows with the position, 1 + scale * log(1 + floor((p + 1) / every)) (arXiv:2501.19399, Llama 4).
    """
    kinds = sorted(set(config.attention_pattern))
    usual = _rotation(positions, config.rope_theta, config.head_dim, config.rope_scaling, config.max_context)
    found = dict.fromkeys(kinds, usual)
    if config.local_rope_theta is not None:
        found["L"] = _rotation(
            positions, config.local_rope_theta, config.head_dim, RopeScalingConfig(), config.max_context
        )
    if "N" not in kinds:
        return found
    still = Rotation(jnp.ones_like(usual.cos), jnp.zeros_like(usual.sin))
    found = {kind: (still if kind == "N" else r)._replace(turns=jnp.asarray(kind != "N")) for kind, r in found.items()}
    if config.query_temperature_every is not None and config.query_temperature_scale is not None:
        spans = jnp.floor((positions[..., None, None] + 1) / jnp.float32(config.query_temperature_every))
        growing = 1 + config.query_temperature_scale * jnp.log1p(spans)
        kept = jnp.ones_like(growing)
        found = {kind: r._replace(temperature=growing if kind == "N" else kept) for kind, r in found.items()}
    return found


def _rotation(positions, theta: float, head_dim: int, scaling: RopeScalingConfig, max_context: int) -> Rotation:
    frequencies, factor = rope_frequencies(theta, head_dim, scaling, max_context)
    angles = positions[..., None, None].astype(jnp.float32) * np.expand_dims(
        frequencies, tuple(range(positions.ndim + 1))
    )
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: Float[Array, "*b n C"], rotation: Rotation) -> Float[Array, "*b n C"]:
    """Turns pair i, (x[i], x[i + C/2]) in the half-split convention, by its angle; computed in float32."""
    cos, sin, *_ = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def place(config: ModelConfig, q: Float[Array, "*b H C"], k: Float[Array, "*b K C"], rotation: Rotation):
    """Queries and keys as a layer compares them: rotated, then normed and scaled where the config says so."""
    q, k = rotate(q, rotation), rotate(k, rotation)
    if config.qk_unit_norm:
        q, k = (_unit(x, config.norm_eps, rotation.turns) for x in (q, k))
    if rotation.temperature is not None:
        q = (q * rotation.temperature).astype(q.dtype)
    return q, k


def _unit(x: Float[Array, "*b n C"], eps: float, turns: Array | None) -> Float[Array, "*b n C"]:
    """x over its root mean square, where the layer rotates."""
    x32 = x.astype(jnp.float32)
    normed = (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return normed if turns is None else jnp.where(turns, normed, x)
