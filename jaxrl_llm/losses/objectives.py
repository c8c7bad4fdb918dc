"""Token objectives J, to be maximised: loss = -sum(token_weights * J).

All take arrays of one shape (any) and a bool mask, and return J of that shape, 0 where the mask is False. Every
argument is masked before anything is computed from it, so NaN or huge values at masked places reach neither J nor a
gradient. `anchor` is what the importance ratio rho = exp(logprobs - anchor) is taken against: the sampler's
log-probabilities, or the trainer's own at the start of a multi-update step. Gradients flow through `logprobs` only.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.sequence import sequence_mean

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: beyond it a ratio carries no information, and inf * 0 is NaN."""


def keep_where(mask: Bool[Array, "*s"], *arrays: Float[Array, "*s"]) -> tuple[Float[Array, "*s"], ...]:
    """The arrays with 0 wherever the mask is False; their gradients are 0 there too."""
    return tuple(jnp.where(mask, x, 0.0) for x in arrays)


def log_ratio(logprobs: Float[Array, "*s"], anchor: Float[Array, "*s"], mask: Bool[Array, "*s"]) -> Float[Array, "*s"]:
    """logprobs - anchor, 0 at masked places, clamped to +-LOG_RATIO_LIMIT; no gradient to the anchor."""
    logprobs, anchor = keep_where(mask, logprobs, lax.stop_gradient(anchor))
    return jnp.clip(logprobs - anchor, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def reinforce(
    logprobs: Float[Array, "*s"],
    anchor: Float[Array, "*s"],
    advantages: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
) -> Float[Array, "*s"]:
    """A logp (Williams 1992; RLOO is this with leave-one-out advantages). The anchor is not used."""
    del anchor
    logprobs, advantages = keep_where(mask, logprobs, lax.stop_gradient(advantages))
    return advantages * logprobs


def cispo(
    logprobs: Float[Array, "*s"],
    behavior_logprobs: Float[Array, "*s"],
    advantages: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
    *,
    ratio_cap: float,
    ratio_floor: float = 0.0,
) -> Float[Array, "*s"]:
    """sg(clip(rho, ratio_floor, ratio_cap)) A logp (MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786).

    Gradient: clip(rho) A, also where the ratio is capped. `ratio_cap` bounds the ratio itself; it is not 1 + eps.
    """
    ratio = jnp.exp(lax.stop_gradient(log_ratio(logprobs, behavior_logprobs, mask)))
    logprobs, advantages = keep_where(mask, logprobs, lax.stop_gradient(advantages))
    return jnp.clip(ratio, ratio_floor, ratio_cap) * advantages * logprobs


def clipped_surrogate(
    ratio: Float[Array, "*s"],
    advantages: Float[Array, "*s"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Array, "*s"]:
    """min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); with `dual_clip` c, at least c A where A < 0.

    Written as a choice of branch, so that the gradient is rho A inside the clip range, bounds included, and 0 outside.
    """
    advantages = lax.stop_gradient(advantages)
    bound = jnp.where(advantages > 0, 1.0 + clip_high, 1.0 - clip_low)
    clipped = jnp.where(advantages > 0, ratio > bound, ratio < bound)
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        bound, clipped = jnp.where(dual, dual_clip, bound), clipped | dual
    return jnp.where(clipped, bound, ratio) * advantages


def _surrogate(log_rho, advantages, mask, clip_low, clip_high, dual_clip=None):
    log_rho, advantages = keep_where(mask, log_rho, advantages)
    ratio = jnp.exp(log_rho)
    j = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return jnp.where(mask, j, 0.0)


def ppo(
    logprobs: Float[Array, "*s"],
    anchor: Float[Array, "*s"],
    advantages: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Float[Array, "*s"]:
    """PPO's clipped term (arXiv:1707.06347), and that of GRPO, Dr. GRPO, DAPO (clip_high .28) and Magistral.

    `dual_clip` (arXiv:1912.09729, c = 3) bounds the term from below where A < 0. Gradient: rho A inside, 0 outside.
    """
    return _surrogate(log_ratio(logprobs, anchor, mask), advantages, mask, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Float[Array, "*b T"],
    anchor: Float[Array, "*b T"],
    advantages: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    *,
    segment_ids: Int[Array, "*b T"] | None = None,
    num_segments: int | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Float[Array, "*b T"]:
    """GSPO (arXiv:2507.18071): s = exp(mean_t log rho); min(s A, clip(s) A), once per sequence.

    Every token carries its sequence's value, so that the sample average (weight 1 / (n |y|)) gives GSPO's sequence
    average, whatever the lengths. Gradient at a token, under that average: s A / (n |y|).
    """
    log_s = sequence_mean(log_ratio(logprobs, anchor, mask), mask, segment_ids, num_segments)
    return _surrogate(log_s, advantages, mask, clip_low, clip_high)


def gspo_token(
    logprobs: Float[Array, "*b T"],
    anchor: Float[Array, "*b T"],
    advantages: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    *,
    segment_ids: Int[Array, "*b T"] | None = None,
    num_segments: int | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Float[Array, "*b T"]:
    """GSPO-token: s_t = sg[s] pi_t / sg[pi_t]. GSPO's value, and its gradient where A is constant in a sequence."""
    log_s = sequence_mean(log_ratio(logprobs, anchor, mask), mask, segment_ids, num_segments)
    (logprobs,) = keep_where(mask, logprobs)
    log_s = lax.stop_gradient(log_s) + (logprobs - lax.stop_gradient(logprobs))
    return _surrogate(log_s, advantages, mask, clip_low, clip_high)
