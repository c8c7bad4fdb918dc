"""Which tokens a slot may draw: biases, bans, top-k, top-p and min-p, without sorting the vocabulary.

Suffixes: S slots, V vocabulary, N biased ids.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt


@flax.struct.dataclass
class Restrictions:
    """Per slot; a slot that is not `active` may draw anything, whatever its other numbers say."""

    active: Bool[Array, " S"]
    top_k: Int[Array, " S"]  # 0 is off
    top_p: Float[Array, " S"]  # 1 is off
    min_p: Float[Array, " S"]  # 0 is off
    biased: Int[Array, "S N"]  # -1 is nothing
    biases: Float[Array, "S N"]  # -inf is a ban


def biased(logits_SV: Float[Array, "S V"], limits: Restrictions) -> Float[Array, "S V"]:
    """The logits plus the biases of the ids that have some."""
    S, V = logits_SV.shape
    ids_SN = jnp.where(limits.biased < 0, V, limits.biased)
    return logits_SV.at[jnp.arange(S)[:, None], ids_SN].add(limits.biases, mode="drop")


def allowed(scaled_SV: Float[Array, "S V"], limits: Restrictions) -> Bool[Array, "S V"]:
    """The tokens left, from biased logits already divided by the temperature.

    Banned ids, whose logits are -inf, are none of them. Top-k keeps the k likeliest; top-p, of these, the fewest
    likeliest that hold at least p of their mass; min-p whatever is at least min_p times as likely as the likeliest.
    Ties at a border are kept, all of them, so that the choice does not depend on the order of ids. At least the
    likeliest token is always left.
    """
    S, V = scaled_SV.shape
    order_SV = _ordered(scaled_SV)
    peak_S1 = jnp.max(scaled_SV, axis=-1, keepdims=True)
    mass_SV = jnp.exp(scaled_SV - peak_S1)

    k_S = jnp.where(limits.top_k == 0, V, limits.top_k)
    k_cut_S = _largest(lambda cut_S1: jnp.sum(order_SV >= cut_S1, axis=-1) >= k_S, S)
    mass_SV = jnp.where(order_SV >= k_cut_S[:, None], mass_SV, 0.0)
    wanted_S = jnp.where(limits.top_p >= 1, 0.0, limits.top_p * jnp.sum(mass_SV, axis=-1))
    # Held against the same sum that made `wanted`, a cut that keeps everything always suffices.
    p_cut_S = _largest(lambda cut_S1: jnp.sum(jnp.where(order_SV >= cut_S1, mass_SV, 0.0), axis=-1) >= wanted_S, S)
    p_cut_S = jnp.where(limits.top_p >= 1, jnp.uint32(0), p_cut_S)
    floor_S1 = peak_S1 + jnp.log(limits.min_p)[:, None]
    return (order_SV >= jnp.maximum(k_cut_S, p_cut_S)[:, None]) & (scaled_SV >= floor_S1) & (scaled_SV > -jnp.inf)


def _ordered(x: Float[Array, "S V"]) -> UInt[Array, "S V"]:
    """float32 as integers in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _largest(enough, slots: int) -> UInt[Array, " S"]:
    """The largest cut for which `enough` holds, bit by bit from the top; `enough` holds at 0 and never comes back."""

    def body(i, cut_S):
        candidate_S = cut_S | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(candidate_S[:, None]), candidate_S, cut_S)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(slots, jnp.uint32))
