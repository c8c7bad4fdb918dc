"""A critic for PPO: its head, generalised advantage estimation, and its clipped loss."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.logprobs import HIGHEST
from jaxrl_llm.losses.objectives import keep_where


def critic_values(
    hidden: Float[Array, "*b D"],
    head_D: Float[Array, " D"],
    bias: Float[Array, ""],
) -> Float[Array, "*b"]:
    """The critic's head: one float32 value per token, hidden . head + bias. Start it from zeros."""
    product = jnp.matmul(hidden.astype(jnp.float32), head_D.astype(jnp.float32), precision=HIGHEST)
    return product + bias.astype(jnp.float32)


def gae(
    rewards_BT: Float[Array, "B T"],
    values_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Advantages and returns (arXiv:1506.02438): A_t = sum_l (gamma lam)^l delta_{t+l}, returns = A + V.

    delta_t = r_t + gamma V_{t+1} - V_t. The next token is the next *trainable* token of the same sequence (what a tool
    wrote in between is stepped over), and after the last one V is 0. With values 0 and lam 1 the advantages are the
    discounted rewards to go. No gradient passes; both are 0 at masked places.
    """
    rewards_BT, values_BT = keep_where(mask_BT, lax.stop_gradient(rewards_BT), lax.stop_gradient(values_BT))
    segment_ids_BT = jnp.zeros(mask_BT.shape, jnp.int32) if segment_ids_BT is None else segment_ids_BT

    def step(carry, now):
        next_value_B, next_advantage_B, next_segment_B = carry
        reward_B, value_B, mask_B, segment_B = now
        same_B = segment_B == next_segment_B
        next_value_B = jnp.where(same_B, next_value_B, 0.0)
        next_advantage_B = jnp.where(same_B, next_advantage_B, 0.0)
        advantage_B = reward_B + gamma * next_value_B - value_B + gamma * lam * next_advantage_B
        carry = (
            jnp.where(mask_B, value_B, next_value_B),
            jnp.where(mask_B, advantage_B, next_advantage_B),
            segment_B,
        )
        return carry, jnp.where(mask_B, advantage_B, 0.0)

    start = (jnp.zeros_like(values_BT[:, 0]), jnp.zeros_like(values_BT[:, 0]), segment_ids_BT[:, -1])
    by_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (rewards_BT, values_BT, mask_BT, segment_ids_BT))
    _, advantages_TB = lax.scan(step, start, by_time, reverse=True)
    advantages_BT = jnp.swapaxes(advantages_TB, 0, 1)
    return advantages_BT, jnp.where(mask_BT, advantages_BT + values_BT, 0.0)


def value_loss(
    values: Float[Array, "*s"],
    old_values: Float[Array, "*s"],
    returns: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
    *,
    clip: float | None = 0.2,
) -> Float[Array, "*s"]:
    """Half the squared error per token, to be minimised; 0 at masked places.

    With `clip` c the larger of the error of V and of V held within c of the value at the start of the step, as in
    PPO's reference code: no gradient once V has moved by c towards the return.
    """
    values, old_values, returns = keep_where(mask, values, lax.stop_gradient(old_values), lax.stop_gradient(returns))
    error = jnp.square(values - returns)
    if clip is not None:
        held = old_values + jnp.clip(values - old_values, -clip, clip)
        error = jnp.maximum(error, jnp.square(held - returns))
    return jnp.where(mask, 0.5 * error, 0.0)
