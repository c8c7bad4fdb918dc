"""Token advantages that need a model: a KL penalty in the reward, or a critic. Arrays are [..., B, T], any structure.

Without either, advantages are worked out on the host from rewards alone (advantages.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.advantages import Normalisation, normalise
from jaxrl_llm.losses.kl import rewards_with_kl
from jaxrl_llm.losses.sequence import sequence_sum
from jaxrl_llm.losses.value import gae


class Given(NamedTuple):
    """What advantages are made of, token by token.

    `scores` holds the completion's reward at each of its tokens, `values` the critic's, 0 without one. `completions`
    is 1 + group * siblings + sibling at a completion's tokens and 0 elsewhere.
    """

    scores: Float[Array, "*b T"]
    kl: Float[Array, "*b T"]
    values: Float[Array, "*b T"]
    mask: Bool[Array, "*b T"]
    completions: Int[Array, "*b T"]
    segment_ids: Int[Array, "*b T"]


def group_credit(
    given: Given,
    *,
    num_segments: int,
    beta: float,
    groups: int,
    siblings: int,
    baseline: Callable[[Array, Array], Array],
    normalisation: Normalisation,
) -> tuple[Float[Array, "*b T"], None]:
    """Advantages of a whole completion from its penalised reward, score - beta sum_t kl (RLOO, arXiv:2402.14740).

    Every token of a completion gets its advantage; 0 at masked places. Nobody's values are read and there are no
    returns.
    """
    scores, kl, _, mask, completions, segment_ids = given
    penalised = jnp.where(mask, scores, 0.0) - beta * sequence_sum(kl, mask, segment_ids, num_segments)
    # Each completion's trainable tokens all write the same number, so their order cannot matter; 0 is for the rest.
    places = jnp.where(mask, completions, 0)
    flat = jnp.zeros(1 + groups * siblings, penalised.dtype).at[places].set(penalised)
    there = jnp.zeros(flat.shape, bool).at[places].set(True)
    rewards_PG, keep_PG = flat[1:].reshape(groups, siblings), there[1:].reshape(groups, siblings)
    advantages_PG = normalise(baseline(rewards_PG, keep_PG), keep_PG, kind=normalisation)
    spread = jnp.concatenate([jnp.zeros(1, flat.dtype), advantages_PG.reshape(-1)])
    return spread[places], None


def credit_to_go(
    given: Given,
    *,
    num_segments: int,
    beta: float,
    gamma: float,
    lam: float,
    normalisation: Normalisation,
) -> tuple[Float[Array, "*b T"], Float[Array, "*b T"]]:
    """Advantages and returns token by token: -beta kl at each, the score at the last (PPO; REINFORCE++ with values 0).

    Advantages are normalised over all trainable tokens, after the returns are taken. Both are 0 at masked places.
    No completion is compared with another.
    """
    scores, kl, values, mask, _, segment_ids = given
    structure: dict[str, Any] = {"segment_ids": segment_ids, "num_segments": num_segments}
    rewards = rewards_with_kl(scores, kl, mask, beta=beta, **structure)

    def rows(x: Array) -> Array:
        return x.reshape(-1, x.shape[-1])

    advantages, returns = gae(rows(rewards), rows(values), rows(mask), rows(segment_ids), gamma=gamma, lam=lam)
    flat = normalise(advantages.reshape(1, -1), mask.reshape(1, -1), kind=normalisation)
    return flat.reshape(mask.shape), returns.reshape(mask.shape)
