"""KL estimators from sampled tokens, delta = logprobs - reference (J. Schulman 2020), and the KL penalty as a reward.

All per token, 0 at masked places, no gradient to the reference. Their gradients differ from what their names promise:
as a loss on policy, k1 has zero expected gradient, k2 has the gradient of the reverse KL, k3 a biased one.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.objectives import log_ratio
from jaxrl_llm.losses.sequence import is_last


def k1(
    logprobs: Float[Array, "*s"], reference_logprobs: Float[Array, "*s"], mask: Bool[Array, "*s"]
) -> Float[Array, "*s"]:
    """delta. Unbiased, may be negative. Derivative 1."""
    return log_ratio(logprobs, reference_logprobs, mask)


def k2(
    logprobs: Float[Array, "*s"], reference_logprobs: Float[Array, "*s"], mask: Bool[Array, "*s"]
) -> Float[Array, "*s"]:
    """delta^2 / 2. Derivative delta."""
    return 0.5 * jnp.square(log_ratio(logprobs, reference_logprobs, mask))


def k3(
    logprobs: Float[Array, "*s"], reference_logprobs: Float[Array, "*s"], mask: Bool[Array, "*s"]
) -> Float[Array, "*s"]:
    """exp(-delta) + delta - 1. Unbiased and never negative. Derivative 1 - exp(-delta)."""
    delta = log_ratio(logprobs, reference_logprobs, mask)
    return jnp.expm1(-delta) + delta


def rewards_with_kl(
    scores: Float[Array, "*b T"],
    kl: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    *,
    beta: float,
    segment_ids: Int[Array, "*b T"] | None = None,
    num_segments: int | None = None,
) -> Float[Array, "*b T"]:
    """Token rewards of PPO and REINFORCE++: -beta kl at every token, plus the score at a sequence's last token.

    `scores` holds the completion's reward at each of its tokens. No gradient passes. The sum over a sequence is
    RLOO's penalised reward, score - beta sum_t kl.
    """
    kl, scores = lax.stop_gradient(kl), lax.stop_gradient(scores)
    penalty = jnp.where(mask, -beta * kl, 0.0)
    return penalty + jnp.where(is_last(mask, segment_ids, num_segments), scores, 0.0)
