"""The float32 head: logits, and log-probabilities with entropy that never hold [N, V] at once.

Suffixes: N flat tokens, D model width, V vocabulary; K, M and S as in losses/chunks.py.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.chunks import Chunks, chunk_of, put_chunk

HIGHEST = lax.Precision.HIGHEST
HeadDtype = Literal["float32", "bfloat16"]
"""What the head's products are computed in: float32 at the highest precision, or, to see what that is worth, bfloat16
(the ablation of ScaleRL's section on the FP32 head): factors and logits are then rounded to it."""


def rounded(x: Array, dtype: HeadDtype) -> Array:
    """`x` as a factor of the head's products."""
    # A cast alone would not do: XLA may drop a pair of casts to bfloat16 and back, and keep what it should lose.
    return (x if dtype == "float32" else lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)).astype(dtype)


def _dot(left: Array, right: Array, contract: tuple[int, int], dtype: HeadDtype) -> Array:
    """Contract one axis of each matrix, into float32.

    Of factors in float32, at the highest precision: on TPU and GPU the default would be bf16 or TF32.
    """
    return lax.dot_general(
        rounded(left, dtype),
        rounded(right, dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=HIGHEST if dtype == "float32" else None,
        preferred_element_type=jnp.float32,
    )


def project_f32(
    hidden_ND: Float[Array, "N D"], head_VD: Float[Array, "V D"], *, dtype: HeadDtype = "float32"
) -> Float[Array, "N V"]:
    """Logits of the output head: a float32 array whatever the dtype of its arguments, of a product in `dtype`.

    Sampler and trainer both call this one function, because a head that is float32 on one side only makes their
    log-probabilities differ (ScaleRL section on the FP32 head).
    """
    return rounded(_dot(hidden_ND, head_VD, (1, 1), dtype), dtype).astype(jnp.float32)


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """cap * tanh(x / cap), which stays within +-cap (Gemma 2, arXiv:2408.00118); x itself where cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def token_logprobs(
    hidden_ND: Float[Array, "N D"],
    head_VD: Float[Array, "V D"],
    targets_N: Int[Array, " N"],
    *,
    temperature: float | Float[Array, ""],
    chunk: int,
    shards: int = 1,
    wanted_N: Bool[Array, " N"] | None = None,
    dtype: HeadDtype = "float32",
    softcap: float | None = None,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Log-probability of each target and entropy of its distribution: two float32 [N], in nats.

    The distribution is softmax(soft_cap(hidden head^T, softcap) / temperature) over the full vocabulary; the sampler
    must cap its logits alike. Logits exist for at most `chunk`
    tokens at a time, in the backward pass too, which computes them again. Both outputs are differentiable in `hidden`
    and `head` (the head's gradient is accumulated in float32); `temperature` has no gradient. A token whose two
    outputs are not used adds nothing to any gradient, even if its hidden state is NaN.

    With `wanted_N`, only those tokens are worked out: they are brought to the front, and the loop over chunks ends with
    the last of them. The others' outputs are 0 and have no gradient.

    N may be sharded in contiguous blocks: every device works on its own tokens in every chunk, and nothing moves.
    `chunk` therefore counts the tokens of all devices together. `shards` is the number of blocks N is sharded into
    (product of its mesh axes): with it, devices add up the head's gradient once instead of once per chunk.
    It changes no result. A chunk is rounded up to a multiple of it.

    Raises ValueError if `chunk` or `shards` is not positive.
    """
    temperature = lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    chunks = Chunks.of(hidden_ND.shape[0], chunk=chunk, shards=shards, wanted_N=wanted_N)
    hidden_KMD, targets_KM, static = chunks.lay(hidden_ND), chunks.lay(targets_N), (chunks.width, dtype, softcap)
    outputs = _token_logprobs(hidden_KMD, head_VD, targets_KM, temperature, chunks.used, static)
    return chunks.back(outputs[0]), chunks.back(outputs[1])


_Static = tuple[int, HeadDtype, float | None]
"""(tokens of one shard in one chunk, dtype of the head's products, soft cap of the logits)"""


def _is_target(targets_S: Array, vocab: int) -> Array:
    # A comparison fuses into the reductions around it and stays local when the vocabulary is sharded; a gather
    # would bring the logits together first.
    return targets_S[:, None] == jnp.arange(vocab, dtype=targets_S.dtype)[None, :]


def distribution(
    logits_SV: Float[Array, "S V"], targets_S: Int[Array, " S"]
) -> tuple[Float[Array, " S"], Float[Array, " S"], Float[Array, " S"]]:
    """Log-probability of each target, entropy and log-sum-exp of its distribution."""
    logz_S = jax.nn.logsumexp(logits_SV, axis=-1)
    logp_SV = logits_SV - logz_S[:, None]
    entropy_S = -jnp.sum(jnp.where(logp_SV > -jnp.inf, jnp.exp(logp_SV) * logp_SV, 0.0), axis=-1)
    logprobs_S = jnp.sum(jnp.where(_is_target(targets_S, logits_SV.shape[1]), logp_SV, 0.0), axis=-1)
    return logprobs_S, entropy_S, logz_S


def through_logits(
    raw_SV: Float[Array, "S V"],
    targets_S: Int[Array, " S"],
    found: tuple[Float[Array, " S"], Float[Array, " S"]],
    d_found: tuple[Float[Array, " S"], Float[Array, " S"]],
    temperature: Float[Array, ""],
    softcap: float | None,
) -> Float[Array, "S V"]:
    """The gradient for the head's product, given those for log-probabilities and entropies (`d_found`).

    `found` are the entropies and log-sum-exps that `distribution` worked out of the product, capped and over
    temperature.
    """
    (entropy_S, logz_S), (d_logprobs_S, d_entropy_S) = found, d_found
    capped_SV = soft_cap(raw_SV, softcap)
    logp_SV = capped_SV / temperature - logz_S[:, None]
    p_SV = jnp.exp(logp_SV)
    plogp_SV = jnp.where(logp_SV > -jnp.inf, p_SV * logp_SV, 0.0)
    # d logp / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
    d_logits_SV = d_logprobs_S[:, None] * (_is_target(targets_S, raw_SV.shape[1]) - p_SV)
    d_logits_SV -= d_entropy_S[:, None] * (plogp_SV + p_SV * entropy_S[:, None])
    d_raw_SV = d_logits_SV / temperature
    return d_raw_SV if softcap is None else d_raw_SV * (1 - (capped_SV / softcap) ** 2)  # d tanh = 1 - tanh^2


def head_gradients(
    d_logits_SV: Float[Array, "S V"],
    hidden_SD: Float[Array, "S D"],
    rounded_VD: Float[Array, "V D"],
    shards: int,
    dtype: HeadDtype,
) -> tuple[Float[Array, "S D"], Float[Array, "K D V"]]:
    """The gradients for hidden states and, shard by shard, for the head's transpose, of that for the logits."""
    # Each shard adds up its own tokens; a plain dot would have all devices agree on [D, V] after every chunk. The
    # small factor is transposed, and kept so: as a product over the first axis of both, XLA on CPU takes half as long
    # again.
    d_KMV, h_KMD = (x.reshape(shards, -1, x.shape[-1]) for x in (d_logits_SV, hidden_SD))
    h_KDM = lax.optimization_barrier(h_KMD.swapaxes(1, 2))
    if shards == 1:
        d_head_KDV = _dot(h_KDM[0], d_KMV[0], (1, 0), dtype)[None]
    else:
        d_head_KDV = jax.vmap(lambda h, d: _dot(h, d, (1, 0), dtype))(h_KDM, d_KMV)
    return _dot(d_logits_SV, rounded_VD, (1, 0), dtype), d_head_KDV


def summed_head_gradient(d_head_KDV: Float[Array, "K D V"], dtype: Any) -> Float[Array, "V D"]:
    """The head's gradient from its shards' parts."""
    return d_head_KDV.sum(axis=0).T.astype(dtype)


def _forward(hidden_KMD, head_VD, targets_KM, temperature, used, static: _Static):
    """Log-probabilities, entropies and log-sum-exps [K M]; chunks from `used` on stay 0."""
    width, dtype, softcap = static
    head_VD = rounded(head_VD, dtype)

    def one_chunk(c, outputs):
        logits_SV = project_f32(chunk_of(hidden_KMD, c, width), head_VD, dtype=dtype)
        found = distribution(soft_cap(logits_SV, softcap) / temperature, chunk_of(targets_KM, c, width))
        return tuple(put_chunk(old, new, c, width) for old, new in zip(outputs, found, strict=True))

    nothing_KM = jnp.zeros(targets_KM.shape, jnp.float32)
    return lax.fori_loop(0, used, one_chunk, (nothing_KM,) * 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _token_logprobs(hidden_KMD, head_VD, targets_KM, temperature, used, static):
    logprobs_KM, entropy_KM, _ = _forward(hidden_KMD, head_VD, targets_KM, temperature, used, static)
    return logprobs_KM, entropy_KM


def _token_logprobs_fwd(hidden_KMD, head_VD, targets_KM, temperature, used, static):
    logprobs_KM, entropy_KM, logz_KM = _forward(hidden_KMD, head_VD, targets_KM, temperature, used, static)
    saved = (hidden_KMD, head_VD, targets_KM, temperature, used, entropy_KM, logz_KM)
    return (logprobs_KM, entropy_KM), saved


def _token_logprobs_bwd(static, saved, cotangents):
    width, dtype, softcap = static
    hidden_KMD, head_VD, targets_KM, temperature, used, entropy_KM, logz_KM = saved
    shards = hidden_KMD.shape[0]
    rounded_VD = rounded(head_VD, dtype)

    def one_chunk(c, carry):
        d_head_KDV, d_hidden_KMD = carry
        targets_S, entropy_S, logz_S, d_logprobs_S, d_entropy_S = (
            chunk_of(x, c, width) for x in (targets_KM, entropy_KM, logz_KM, *cotangents)
        )
        # A row nobody differentiates may hold NaN (padding); 0 * NaN would spread into the head.
        live_S1 = ((d_logprobs_S != 0) | (d_entropy_S != 0))[:, None]
        hidden_SD = jnp.where(live_S1, chunk_of(hidden_KMD, c, width).astype(jnp.float32), 0.0)
        raw_SV = project_f32(hidden_SD, rounded_VD, dtype=dtype)
        found, d_found = (entropy_S, logz_S), (d_logprobs_S, d_entropy_S)
        d_raw_SV = through_logits(raw_SV, targets_S, found, d_found, temperature, softcap)
        d_raw_SV = jnp.where(live_S1, d_raw_SV, 0.0)
        d_hidden_SD, more_KDV = head_gradients(d_raw_SV, hidden_SD, rounded_VD, shards, dtype)
        return d_head_KDV + more_KDV, put_chunk(d_hidden_KMD, d_hidden_SD.astype(hidden_KMD.dtype), c, width)

    nothing = (jnp.zeros((shards, *head_VD.T.shape), jnp.float32), jnp.zeros_like(hidden_KMD))
    d_head_KDV, d_hidden_KMD = lax.fori_loop(0, used, one_chunk, nothing)
    return d_hidden_KMD, summed_head_gradient(d_head_KDV, head_VD.dtype), None, jnp.zeros_like(temperature), None


_token_logprobs.defvjp(_token_logprobs_fwd, _token_logprobs_bwd)
