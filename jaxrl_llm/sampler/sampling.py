"""Exact draws from softmax(logits / T) with two uniforms per slot, and the log-probability of what was drawn.

Suffixes: S slots, V vocabulary, B blocks of the vocabulary, W width of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt

from jaxrl_llm.sampler.restrictions import Restrictions, allowed, biased


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


class Softmax(NamedTuple):
    """What turns a logit into a log-probability over the full vocabulary, per slot."""

    divisor_S: Array
    peak_S: Array  # of logit / divisor
    log_total_S: Array  # of exp(logit / divisor - peak)

    def logprob(self, logits_SV: Float[Array, "S V"], tokens_S: Int[Array, " S"]) -> Float[Array, " S"]:
        """log softmax(logits / T)[token], float32 [S]."""
        return self.of(jnp.take_along_axis(logits_SV, tokens_S[:, None], axis=1))[:, 0]

    def of(self, logits_SN: Float[Array, "S N"]) -> Float[Array, "S N"]:
        """Log-probabilities of tokens that have these logits, float32 [S N]."""
        # Peak first: a large logit minus a large log-sum-exp would lose what separates them.
        return logits_SN / self.divisor_S[:, None] - self.peak_S[:, None] - self.log_total_S[:, None]


def softmax_of(logits_SV: Float[Array, "S V"], divisor_S: Float[Array, " S"]) -> Softmax:
    """The softmax of logits / divisor where nothing is drawn from it."""
    scaled_SV = logits_SV / divisor_S[:, None]
    peak_S = jnp.max(scaled_SV, axis=-1)
    return Softmax(divisor_S, peak_S, jnp.log(jnp.sum(jnp.exp(scaled_SV - peak_S[:, None]), axis=-1)))


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
    logits_SV: Float[Array, "S V"],
    temperature_S: Float[Array, " S"],
    keys_S: Key[Array, " S"],
    limits: Restrictions | None = None,
) -> tuple[Int[Array, " S"], Softmax]:
    """Draw one token per slot from softmax(logits / T): tokens int32 [S], and what gives any token's log-probability.

    Temperature 0 takes the argmax (the lowest id of a tie); its softmax is that of temperature 1. `limits` narrow the
    choice (see restrictions.py) and change no log-probability. A slot without restrictions draws the same token
    whether others have some or not.

    A Gumbel draw would need V random numbers per slot and step. Here the vocabulary is cut into blocks: the first
    uniform picks block b with probability Z_b / Z (Z_b sums exp(logit / T) over the block, Z over all), the second
    picks a token inside with probability exp(logit / T) / Z_b. The product is the softmax exactly, up to float32
    rounding of the sums and the 2^-24 grid of each uniform. A token of probability 0 (logit -inf) is never drawn.
    """
    S, V = logits_SV.shape
    W = _block_width(V)
    greedy_S = temperature_S == 0
    divisor_S1 = jnp.where(greedy_S, 1.0, temperature_S)[:, None]

    def blocks(x_SV):
        return jnp.pad(x_SV, ((0, 0), (0, -V % W)), constant_values=-jnp.inf).reshape(S, -1, W)

    logits_SBW = blocks(logits_SV)
    # A token's key is the output block of a counter-mode cipher, 64 random bits used nowhere else: no further hashing.
    uniform_S2 = (jax.random.key_data(keys_S) >> 8).astype(jnp.float32) * jnp.float32(2**-24)

    # Reductions read the logits themselves, so that no scaled copy of [S, V] is ever written.
    peak_SB = jnp.max(logits_SBW, axis=-1) / divisor_S1
    peak_S1 = jnp.max(peak_SB, axis=-1, keepdims=True)
    mass_SB = jnp.sum(jnp.exp(logits_SBW / divisor_S1[:, :, None] - peak_S1[:, :, None]), axis=-1)

    def pick_block(peak_SB, mass_SB):
        return jnp.where(greedy_S, jnp.argmax(peak_SB, axis=-1), _pick(mass_SB, uniform_S2[:, 0]))

    def inside(x_SBW, block_S):
        return jnp.take_along_axis(x_SBW, block_S[:, None, None], axis=1)[:, 0]

    def anything():
        block_S = pick_block(peak_SB, mass_SB)
        return block_S, inside(logits_SBW, block_S) / divisor_S1

    def allowed_only(limits: Restrictions):
        scaled_SV = biased(logits_SV, limits) / divisor_S1
        scaled_SBW = blocks(jnp.where(allowed(scaled_SV, limits), scaled_SV, -jnp.inf))
        their_peak_SB = jnp.max(scaled_SBW, axis=-1)
        # Relative to their own peak: beside a banned token that is far likelier, all that is left would underflow.
        their_peak_S11 = jnp.max(their_peak_SB, axis=-1)[:, None, None]
        their_mass_SB = jnp.sum(jnp.exp(scaled_SBW - their_peak_S11), axis=-1)
        narrowed_S = limits.active
        block_S = jnp.where(narrowed_S, pick_block(their_peak_SB, their_mass_SB), pick_block(peak_SB, mass_SB))
        plain_SW = inside(logits_SBW, block_S) / divisor_S1
        return block_S, jnp.where(narrowed_S[:, None], inside(scaled_SBW, block_S), plain_SW)

    if limits is None:
        block_S, inside_SW = anything()
    else:
        block_S, inside_SW = jax.lax.cond(jnp.any(limits.active), lambda: allowed_only(limits), anything)
    # Relative to the block's own peak: a light block underflows against the whole vocabulary's.
    mass_SW = jnp.exp(inside_SW - jnp.max(inside_SW, axis=-1, keepdims=True))
    place_S = jnp.where(greedy_S, jnp.argmax(inside_SW, axis=-1), _pick(mass_SW, uniform_S2[:, 1]))
    softmax = Softmax(divisor_S1[:, 0], peak_S1[:, 0], jnp.log(jnp.sum(mass_SB, axis=-1)))
    return (block_S * W + place_S).astype(jnp.int32), softmax
