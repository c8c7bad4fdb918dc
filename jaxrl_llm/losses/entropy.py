"""Entropy bonus, with a fixed or an adaptive coefficient."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def entropy_bonus(
    entropy: Float[Array, "*s"], mask: Bool[Array, "*s"], alpha: float | Float[Array, ""]
) -> Float[Array, "*s"]:
    """alpha times the entropy of each token's full-vocabulary distribution; a term of J, so it is added."""
    return alpha * jnp.where(mask, entropy, 0.0)


def adapt_alpha(alpha: Any, entropy: Any, *, target: float, step: float = 0.005, low: float = 0.0, high: float) -> Any:
    """Next coefficient: up by `step` while the batch's mean entropy is below `target`, else down; kept in [low, high].

    Skywork-OR1 (arXiv:2505.22312) adapts so, with target .2 and step .005 from 0. Host floats or traced scalars.
    """
    moved = alpha + jnp.where(jnp.asarray(entropy) < target, step, -step)
    return jnp.clip(moved, low, high)


def applied_alpha(alpha: Any, entropy: Any, *, target: float) -> Any:
    """The coefficient while the entropy is at most `target`, else 0: entropy is held up, never pushed beyond."""
    return jnp.where(jnp.asarray(entropy) <= target, alpha, 0.0)
