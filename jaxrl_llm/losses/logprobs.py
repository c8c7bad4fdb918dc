"""The float32 head: logits, and log-probabilities with entropy that never hold [N, V] at once.

Suffixes: N flat tokens, D model width, V vocabulary, C chunks, S tokens of one chunk, K shards of N.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

HIGHEST = lax.Precision.HIGHEST
Precision = lax.Precision | lax.DotAlgorithmPreset


def _dot_f32(left: Array, right: Array, contract: tuple[int, int], precision: Precision) -> Array:
    """Contract one axis of each matrix in float32; on TPU and GPU the default precision would be bf16 or TF32."""
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def project_f32(
    hidden_ND: Float[Array, "N D"], head_VD: Float[Array, "V D"], *, precision: Precision = HIGHEST
) -> Float[Array, "N V"]:
    """Logits of the output head, float32 whatever the dtype of its arguments.

    Sampler and trainer both call this one function, because a head that is float32 on one side only makes their
    log-probabilities differ (ScaleRL section on the FP32 head).
    """
    return _dot_f32(hidden_ND.astype(jnp.float32), head_VD.astype(jnp.float32), (1, 1), precision)


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
    precision: Precision = HIGHEST,
    softcap: float | None = None,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Log-probability of each target and entropy of its distribution: two float32 [N], in nats.

    The distribution is softmax(soft_cap(hidden head^T, softcap) / temperature) over the full vocabulary; the sampler
    must cap its logits alike. Logits exist for at most `chunk`
    tokens at a time, in the backward pass too, which computes them again. Both outputs are differentiable in `hidden`
    and `head` (the head's gradient is accumulated in float32); `temperature` has no gradient. A token whose two
    outputs are not used adds nothing to any gradient, even if its hidden state is NaN.

    Chunks are strided, so that N sharded in contiguous blocks stays where it is: every device works on its part of
    every chunk. `chunk` therefore counts the tokens of all devices together. `shards` is the number of blocks N is
    sharded into (product of its mesh axes): with it, devices add up the head's gradient once instead of once per chunk.
    It changes no result. A chunk is rounded up to a multiple of it.

    Raises ValueError if `chunk` or `shards` is not positive.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it counts the tokens whose logits exist at once and must be at least 1")
    if shards < 1:
        raise ValueError(f"shards is {shards}; it counts the blocks that N is sharded into and must be at least 1")
    temperature = lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    return _token_logprobs(hidden_ND, head_VD, targets_N, temperature, (chunk, shards), precision, softcap)


def _chunked(x_N: Array, chunking: tuple[int, int]) -> Array:
    """[N, ...] -> [S, C, ...], padded with zeros; chunk c is [:, c]. S is a multiple of the shards."""
    (chunk, shards), n = chunking, x_N.shape[0]
    chunks = max(1, -(-n // chunk))
    size = -(-n // (chunks * shards)) * shards
    padded = jnp.pad(x_N, [(0, size * chunks - n)] + [(0, 0)] * (x_N.ndim - 1))
    return padded.reshape(size, chunks, *x_N.shape[1:])


def _pick(x_SC: Array, c: Array) -> Array:
    return lax.dynamic_index_in_dim(x_SC, c, axis=1, keepdims=False)


def _unchunked(y_CS: Array, n: int) -> Array:
    """Undo `_chunked` on a scan's stacked output [C, S, ...]."""
    return jnp.swapaxes(y_CS, 0, 1).reshape(-1, *y_CS.shape[2:])[:n]


def _is_target(targets_S: Array, vocab: int) -> Array:
    # A comparison fuses into the reductions around it and stays local when the vocabulary is sharded; a gather
    # would bring the logits together first.
    return targets_S[:, None] == jnp.arange(vocab, dtype=targets_S.dtype)[None, :]


def _forward(hidden_ND, head_VD, targets_N, temperature, chunking, precision, softcap):
    n, vocab = hidden_ND.shape[0], head_VD.shape[0]
    head_VD = head_VD.astype(jnp.float32)
    hidden_SCD, targets_SC = _chunked(hidden_ND, chunking), _chunked(targets_N, chunking)

    def one_chunk(_, c):
        logits_SV = soft_cap(project_f32(_pick(hidden_SCD, c), head_VD, precision=precision), softcap) / temperature
        logz_S = jax.nn.logsumexp(logits_SV, axis=-1)
        logp_SV = logits_SV - logz_S[:, None]
        entropy_S = -jnp.sum(jnp.where(logp_SV > -jnp.inf, jnp.exp(logp_SV) * logp_SV, 0.0), axis=-1)
        logprobs_S = jnp.sum(jnp.where(_is_target(_pick(targets_SC, c), vocab), logp_SV, 0.0), axis=-1)
        return None, (logprobs_S, entropy_S, logz_S)

    _, outputs = lax.scan(one_chunk, None, jnp.arange(hidden_SCD.shape[1]))
    return tuple(_unchunked(y_CS, n) for y_CS in outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _token_logprobs(hidden_ND, head_VD, targets_N, temperature, chunking, precision, softcap):
    logprobs_N, entropy_N, _ = _forward(hidden_ND, head_VD, targets_N, temperature, chunking, precision, softcap)
    return logprobs_N, entropy_N


def _token_logprobs_fwd(hidden_ND, head_VD, targets_N, temperature, chunking, precision, softcap):
    logprobs_N, entropy_N, logz_N = _forward(hidden_ND, head_VD, targets_N, temperature, chunking, precision, softcap)
    return (logprobs_N, entropy_N), (hidden_ND, head_VD, targets_N, temperature, entropy_N, logz_N)


def _token_logprobs_bwd(chunking, precision, softcap, saved, cotangents):
    hidden_ND, head_VD, targets_N, temperature, entropy_N, logz_N = saved
    (n, d), vocab, shards = hidden_ND.shape, head_VD.shape[0], chunking[1]
    head_f32_VD = head_VD.astype(jnp.float32)
    hidden_SCD = _chunked(hidden_ND, chunking)
    by_chunk = [_chunked(x, chunking) for x in (targets_N, entropy_N, logz_N, *cotangents)]

    def one_chunk(d_head_KVD, c):
        targets_S, entropy_S, logz_S, d_logprobs_S, d_entropy_S = (_pick(x, c) for x in by_chunk)
        # A row nobody differentiates may hold NaN (padding); 0 * NaN would spread into the head.
        live_S1 = ((d_logprobs_S != 0) | (d_entropy_S != 0))[:, None]
        hidden_SD = jnp.where(live_S1, _pick(hidden_SCD, c).astype(jnp.float32), 0.0)
        capped_SV = soft_cap(project_f32(hidden_SD, head_f32_VD, precision=precision), softcap)
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
        d_head_KVD += jax.vmap(lambda d, h: _dot_f32(d, h, (0, 0), precision))(*by_shard)
        return d_head_KVD, _dot_f32(d_logits_SV, head_f32_VD, (1, 0), precision).astype(hidden_ND.dtype)

    nothing_KVD = jnp.zeros((shards, vocab, d), jnp.float32)
    d_head_KVD, d_hidden_CSD = lax.scan(one_chunk, nothing_KVD, jnp.arange(hidden_SCD.shape[1]))
    d_head_VD = d_head_KVD.sum(axis=0).astype(head_VD.dtype)
    return _unchunked(d_hidden_CSD, n), d_head_VD, None, jnp.zeros_like(temperature)


_token_logprobs.defvjp(_token_logprobs_fwd, _token_logprobs_bwd)
