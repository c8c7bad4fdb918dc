"""Exact draws from softmax(logits / T) with two uniforms per slot, and the log-probability of what was drawn.

Suffixes: S slots, V vocabulary, B blocks of the vocabulary, W width of a block.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt


def request_keys(
    seed_S: UInt[Array, " S"], stream_S: UInt[Array, " S"], sibling_S: UInt[Array, " S"]
) -> Key[Array, " S"]:
    """One key per request: fold(seed, stream, sibling).

    The generator is named, so that a replay does not depend on JAX's process-wide default.
    """

    def one(seed, stream, sibling):
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, stream), sibling)

    return jax.vmap(one)(seed_S, stream_S, sibling_S)


def token_keys(keys_S: Key[Array, " S"], n_S: Int[Array, " S"]) -> Key[Array, " S"]:
    """The key of each slot's n-th token; it knows neither the slot, nor the neighbours, nor the order of arrival."""
    return jax.vmap(jax.random.fold_in)(keys_S, n_S)


def _block_width(vocab: int) -> int:
    return 1 << ((vocab - 1).bit_length() + 1) // 2


def _pick(mass_SN: Float[Array, "S N"], uniform_S: Float[Array, " S"]) -> Int[Array, " S"]:
    """Index i with probability mass[i] / sum(mass): the first whose running sum exceeds uniform * total."""
    return _first_above(jnp.cumsum(mass_SN, axis=-1), mass_SN, uniform_S)


def _first_above(
    upto_SN: Float[Array, "S N"], mass_SN: Float[Array, "S N"], uniform_S: Float[Array, " S"]
) -> Int[Array, " S"]:
    """`_pick` with the running sums given.

    A parallel sum may round each entry's prefix in its own association, so the step at an empty entry need not be 0:
    entries without mass are ruled out by name, and if rounding leaves no candidate the heaviest entry is taken.
    """
    hit_SN = (upto_SN > (uniform_S * upto_SN[:, -1])[:, None]) & (mass_SN > 0)
    return jnp.where(jnp.any(hit_SN, axis=-1), jnp.argmax(hit_SN, axis=-1), jnp.argmax(mass_SN, axis=-1))


def sample(
    logits_SV: Float[Array, "S V"], temperature_S: Float[Array, " S"], keys_S: Key[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draw one token per slot from softmax(logits / T): (tokens int32 [S], log-probabilities float32 [S]).

    The log-probability is log softmax(logits / T)[token] over the full vocabulary. Temperature 0 takes the argmax
    (the lowest id of a tie) and reports its log-probability at temperature 1.

    A Gumbel draw would need V random numbers per slot and step. Here the vocabulary is cut into blocks: the first
    uniform picks block b with probability Z_b / Z (Z_b sums exp(logit / T) over the block, Z over all), the second
    picks a token inside with probability exp(logit / T) / Z_b. The product is the softmax exactly, up to float32
    rounding of the sums and the 2^-24 grid of each uniform. A token of probability 0 (logit -inf) is never drawn.
    """
    S, V = logits_SV.shape
    W = _block_width(V)
    greedy_S = temperature_S == 0
    divisor_S1 = jnp.where(greedy_S, 1.0, temperature_S)[:, None]
    logits_SBW = jnp.pad(logits_SV, ((0, 0), (0, -V % W)), constant_values=-jnp.inf).reshape(S, -1, W)
    # A token's key is the output block of a counter-mode cipher, 64 random bits used nowhere else: no further hashing.
    uniform_S2 = (jax.random.key_data(keys_S) >> 8).astype(jnp.float32) * jnp.float32(2**-24)

    # Reductions read the logits themselves, so that no scaled copy of [S, V] is ever written.
    peak_SB = jnp.max(logits_SBW, axis=-1) / divisor_S1
    peak_S1 = jnp.max(peak_SB, axis=-1, keepdims=True)
    mass_SB = jnp.sum(jnp.exp(logits_SBW / divisor_S1[:, :, None] - peak_S1[:, :, None]), axis=-1)
    log_total_S = jnp.log(jnp.sum(mass_SB, axis=-1))

    block_S = jnp.where(greedy_S, jnp.argmax(peak_SB, axis=-1), _pick(mass_SB, uniform_S2[:, 0]))
    inside_SW = jnp.take_along_axis(logits_SBW, block_S[:, None, None], axis=1)[:, 0] / divisor_S1
    # Relative to the block's own peak: a light block underflows against the whole vocabulary's.
    mass_SW = jnp.exp(inside_SW - jnp.max(inside_SW, axis=-1, keepdims=True))
    place_S = jnp.where(greedy_S, jnp.argmax(inside_SW, axis=-1), _pick(mass_SW, uniform_S2[:, 1]))
    # Peak first: a large logit minus a large log-sum-exp would lose what separates them.
    logprob_S = jnp.take_along_axis(inside_SW - peak_S1, place_S[:, None], axis=1)[:, 0] - log_total_S
    return (block_S * W + place_S).astype(jnp.int32), logprob_S
