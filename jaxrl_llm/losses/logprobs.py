"""The float32 head: logits, and log-probabilities with entropy that never hold [N, V] at once.

Suffixes: N flat tokens, D model width, V vocabulary, K shards of N, M tokens of one shard, S tokens of one chunk.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

HIGHEST = lax.Precision.HIGHEST
HeadDtype = Literal["float32", "bfloat16"]
"""What the head's products are computed in: float32 at the highest precision, or, to see what that is worth, bfloat16
(the ablation of ScaleRL's section on the FP32 head): factors and logits are then rounded to it."""


def _rounded(x: Array, dtype: HeadDtype) -> Array:
    # A cast alone would not do: XLA may drop a pair of casts to bfloat16 and back, and keep what it should lose.
    return (x if dtype == "float32" else lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)).astype(dtype)


def _dot(left: Array, right: Array, contract: tuple[int, int], dtype: HeadDtype) -> Array:
    """Contract one axis of each matrix, into float32.

    Of factors in float32, at the highest precision: on TPU and GPU the default would be bf16 or TF32.
    """
    return lax.dot_general(
        _rounded(left, dtype),
        _rounded(right, dtype),
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
    return _rounded(_dot(hidden_ND, head_VD, (1, 1), dtype), dtype).astype(jnp.float32)


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
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it counts the tokens whose logits exist at once and must be at least 1")
    if shards < 1:
        raise ValueError(f"shards is {shards}; it counts the blocks that N is sharded into and must be at least 1")
    temperature = lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    n = hidden_ND.shape[0]
    per_shard = -(-n // shards)
    chunks = max(1, -(-per_shard // -(-chunk // shards)))
    width = -(-per_shard // chunks)

    def blocks(x_N: Array) -> Array:
        """[N ...] -> [K M ...], a row per shard, padded with zeros to whole chunks."""
        others = [(0, 0)] * (x_N.ndim - 1)
        x_KM = jnp.pad(x_N, [(0, per_shard * shards - n), *others]).reshape(shards, per_shard, *x_N.shape[1:])
        return jnp.pad(x_KM, [(0, 0), (0, width * chunks - per_shard), *others])

    def unblocked(x_KM: Array) -> Array:
        return x_KM[:, :per_shard].reshape(-1)[:n]

    hidden_KMD, targets_KM, used = blocks(hidden_ND), blocks(targets_N), jnp.int32(chunks)
    if wanted_N is None:
        outputs = _token_logprobs(hidden_KMD, head_VD, targets_KM, temperature, used, (width, dtype, softcap))
        return unblocked(outputs[0]), unblocked(outputs[1])
    wanted_KM = blocks(wanted_N)
    order_KM = jnp.argsort(~wanted_KM, axis=1, stable=True)
    used = jnp.max(-(-jnp.sum(wanted_KM, axis=1, dtype=jnp.int32) // width))
    hidden_KMD = jnp.take_along_axis(hidden_KMD, order_KM[:, :, None], axis=1)
    targets_KM = jnp.take_along_axis(targets_KM, order_KM, axis=1)
    outputs = _token_logprobs(hidden_KMD, head_VD, targets_KM, temperature, used, (width, dtype, softcap))
    back_KM = jnp.argsort(order_KM, axis=1)

    def in_place(x_KM: Array) -> Array:
        return unblocked(jnp.where(wanted_KM, jnp.take_along_axis(x_KM, back_KM, axis=1), 0.0))

    return in_place(outputs[0]), in_place(outputs[1])


_Static = tuple[int, HeadDtype, float | None]
"""(tokens of one shard in one chunk, dtype of the head's products, soft cap of the logits)"""


def _chunk(x_KM: Array, c: Array, width: int) -> Array:
    """The c-th chunk of every shard, flat: [S ...] of [K M ...]."""
    return _flat(lax.dynamic_slice_in_dim(x_KM, c * width, width, axis=1))


def _flat(x_KW: Array) -> Array:
    return x_KW.reshape(-1, *x_KW.shape[2:])


def _put(x_KM: Array, y_S: Array, c: Array, width: int) -> Array:
    y_KW = y_S.reshape(x_KM.shape[0], width, *x_KM.shape[2:])
    return lax.dynamic_update_slice_in_dim(x_KM, y_KW, c * width, axis=1)


def _is_target(targets_S: Array, vocab: int) -> Array:
    # A comparison fuses into the reductions around it and stays local when the vocabulary is sharded; a gather
    # would bring the logits together first.
    return targets_S[:, None] == jnp.arange(vocab, dtype=targets_S.dtype)[None, :]


def _forward(hidden_KMD, head_VD, targets_KM, temperature, used, static: _Static):
    """Log-probabilities, entropies and log-sum-exps [K M]; chunks from `used` on stay 0."""
    width, dtype, softcap = static
    head_VD = _rounded(head_VD, dtype)

    def one_chunk(c, outputs):
        logits_SV = project_f32(_chunk(hidden_KMD, c, width), head_VD, dtype=dtype)
        logits_SV = soft_cap(logits_SV, softcap) / temperature
        logz_S = jax.nn.logsumexp(logits_SV, axis=-1)
        logp_SV = logits_SV - logz_S[:, None]
        entropy_S = -jnp.sum(jnp.where(logp_SV > -jnp.inf, jnp.exp(logp_SV) * logp_SV, 0.0), axis=-1)
        is_target_SV = _is_target(_chunk(targets_KM, c, width), head_VD.shape[0])
        logprobs_S = jnp.sum(jnp.where(is_target_SV, logp_SV, 0.0), axis=-1)
        found = (logprobs_S, entropy_S, logz_S)
        return tuple(_put(old, new, c, width) for old, new in zip(outputs, found, strict=True))

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
    shards, _, d = hidden_KMD.shape
    vocab = head_VD.shape[0]
    rounded_VD = _rounded(head_VD, dtype)

    def one_chunk(c, carry):
        d_head_KVD, d_hidden_KMD = carry
        targets_S, entropy_S, logz_S, d_logprobs_S, d_entropy_S = (
            _chunk(x, c, width) for x in (targets_KM, entropy_KM, logz_KM, *cotangents)
        )
        # A row nobody differentiates may hold NaN (padding); 0 * NaN would spread into the head.
        live_S1 = ((d_logprobs_S != 0) | (d_entropy_S != 0))[:, None]
        hidden_SD = jnp.where(live_S1, _chunk(hidden_KMD, c, width).astype(jnp.float32), 0.0)
        capped_SV = soft_cap(project_f32(hidden_SD, rounded_VD, dtype=dtype), softcap)
        logits_SV = capped_SV / temperature
        logp_SV = logits_SV - logz_S[:, None]
        p_SV = jnp.exp(logp_SV)
        plogp_SV = jnp.where(logp_SV > -jnp.inf, p_SV * logp_SV, 0.0)
        is_target_SV = _is_target(targets_S, vocab)
        # d logp / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
        d_logits_SV = d_logprobs_S[:, None] * (is_target_SV - p_SV)
        d_logits_SV -= d_entropy_S[:, None] * (plogp_SV + p_SV * entropy_S[:, None])
        d_logits_SV = jnp.where(live_S1, d_logits_SV / temperature, 0.0)
        if softcap is not None:
            d_logits_SV *= 1 - (capped_SV / softcap) ** 2  # d tanh = 1 - tanh^2
        # Each shard adds up its own tokens; a plain dot would have all devices agree on [V, D] after every chunk.
        by_shard = [x.reshape(shards, -1, x.shape[-1]) for x in (d_logits_SV, hidden_SD)]
        d_head_KVD += jax.vmap(lambda d, h: _dot(d, h, (0, 0), dtype))(*by_shard)
        d_hidden_SD = _dot(d_logits_SV, rounded_VD, (1, 0), dtype).astype(hidden_KMD.dtype)
        return d_head_KVD, _put(d_hidden_KMD, d_hidden_SD, c, width)

    nothing = (jnp.zeros((shards, vocab, d), jnp.float32), jnp.zeros_like(hidden_KMD))
    d_head_KVD, d_hidden_KMD = lax.fori_loop(0, used, one_chunk, nothing)
    return d_hidden_KMD, d_head_KVD.sum(axis=0).astype(head_VD.dtype), None, jnp.zeros_like(temperature), None


_token_logprobs.defvjp(_token_logprobs_fwd, _token_logprobs_bwd)
