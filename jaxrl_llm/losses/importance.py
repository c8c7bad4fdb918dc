"""Importance corrections between sampler and trainer: a weight per token that multiplies any token objective.

The ratio is exp(old - behavior): trainer's log-probability at the start of the step against the sampler's, at the same
weights if nothing is stale. Weights have the shape of their arguments, carry no gradient, and are 0 at masked places.
Log-ratios are clamped to +-20 before exp. A sequence weight stands at every token of its sequence, so the corrections
multiply sequence objectives as well as token objectives. A token whose weight is 0 stays in the denominators, which
were fixed on the host before any ratio was known.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.objectives import LOG_RATIO_LIMIT, keep_where, log_ratio
from jaxrl_llm.losses.sequence import sequence_mean, sequence_sum


def _token_log_ratio(old_logprobs: Array, behavior_logprobs: Array, mask: Array) -> Array:
    return lax.stop_gradient(log_ratio(old_logprobs, behavior_logprobs, mask))


def _product_log_ratio(old_logprobs, behavior_logprobs, mask, segment_ids, num_segments) -> Array:
    log_ratio_sum = sequence_sum(
        _token_log_ratio(old_logprobs, behavior_logprobs, mask), mask, segment_ids, num_segments
    )
    return jnp.clip(log_ratio_sum, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def tis(
    old_logprobs: Float[Array, "*s"],
    behavior_logprobs: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
    *,
    cap: float = 2.0,
) -> Float[Array, "*s"]:
    """Truncated importance sampling: min(ratio, cap) per token (Yao et al. 2025, flash-rl)."""
    ratio = jnp.exp(_token_log_ratio(old_logprobs, behavior_logprobs, mask))
    return jnp.where(mask, jnp.minimum(ratio, cap), 0.0)


def tis_sequence(
    old_logprobs: Float[Array, "*b T"],
    behavior_logprobs: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    *,
    segment_ids: Int[Array, "*b T"] | None = None,
    num_segments: int | None = None,
    cap: float = 2.0,
) -> Float[Array, "*b T"]:
    """min(product of the sequence's ratios, cap), at every token of the sequence. Usual caps: 2 to 10."""
    log_product = _product_log_ratio(old_logprobs, behavior_logprobs, mask, segment_ids, num_segments)
    return jnp.where(mask, jnp.minimum(jnp.exp(log_product), cap), 0.0)


def _inside(ratio: Array, mask: Array, low: float, high: float, weighted: bool) -> Array:
    return jnp.where(mask & (ratio >= low) & (ratio <= high), ratio if weighted else 1.0, 0.0)


def mis(
    old_logprobs: Float[Array, "*s"],
    behavior_logprobs: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
    *,
    low: float = 0.0,
    high: float = 2.0,
    weighted: bool = True,
) -> Float[Array, "*s"]:
    """Masked importance sampling: the ratio inside [low, high], 0 outside; with `weighted` False 1 inside."""
    ratio = jnp.exp(_token_log_ratio(old_logprobs, behavior_logprobs, mask))
    return _inside(ratio, mask, low, high, weighted)


def seq_mis(
    old_logprobs: Float[Array, "*b T"],
    behavior_logprobs: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    *,
    segment_ids: Int[Array, "*b T"] | None = None,
    num_segments: int | None = None,
    low: float = 0.0,
    high: float = 2.0,
    weighted: bool = True,
) -> Float[Array, "*b T"]:
    """Seq-MIS: as `mis` on the product of the sequence's ratios, which keeps or drops the whole sequence."""
    ratio = jnp.exp(_product_log_ratio(old_logprobs, behavior_logprobs, mask, segment_ids, num_segments))
    return _inside(ratio, mask, low, high, weighted)


def icepop(
    old_logprobs: Float[Array, "*s"],
    behavior_logprobs: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Float[Array, "*s"]:
    """IcePop (Ling team 2025): the ratio k if it is in [.5, 5], else 0; goes with the sample average."""
    return mis(old_logprobs, behavior_logprobs, mask, low=low, high=high)


def geometric_rejection(
    old_logprobs: Float[Array, "*b T"],
    behavior_logprobs: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    *,
    segment_ids: Int[Array, "*b T"] | None = None,
    num_segments: int | None = None,
    low: float = 0.999,
    high: float = 1.001,
) -> Float[Array, "*b T"]:
    """1 for a sequence whose geometric mean ratio exp(mean log-ratio) is in [low, high], else 0."""
    log_ratios = _token_log_ratio(old_logprobs, behavior_logprobs, mask)
    mean = sequence_mean(log_ratios, mask, segment_ids, num_segments)
    return _inside(jnp.exp(mean), mask, low, high, weighted=False)


def off_policy_sequence_mask(
    logprobs: Float[Array, "*b T"],
    anchor: Float[Array, "*b T"],
    advantages: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    *,
    segment_ids: Int[Array, "*b T"] | None = None,
    num_segments: int | None = None,
    delta: float,
) -> Float[Array, "*b T"]:
    """0 for a sequence with A < 0 and mean(anchor - logprobs) > delta nats, else 1 (DeepSeek-V3.2, arXiv:2512.02556).

    It drops bad completions which the policy has already left. Where advantages vary in a sequence, their mean counts.
    """
    drift = sequence_mean(-_token_log_ratio(logprobs, anchor, mask), mask, segment_ids, num_segments)
    (advantages,) = keep_where(mask, lax.stop_gradient(advantages))
    drop = (sequence_mean(advantages, mask, segment_ids, num_segments) < 0) & (drift > delta)
    return jnp.where(mask & ~drop, 1.0, jnp.zeros_like(drift))
