"""Losses of a mixture of experts' router, token by token, so that any split of a batch adds up to the same number."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def balance_terms(
    logits_BTE: Float[Array, "B T E"], chosen_BTK: Int[Array, "B T K"], segment_ids_BT: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """E sum_e f_e p_e(t): f_e the share of its document's choices that fell on expert e, p the router's softmax.

    Its mean over a document is the load-balancing loss of Switch Transformers (arXiv:2101.03961, eqs. 4 to 6) with
    DeepSeek-V3's sequence as its scope (arXiv:2412.19437, eqs. 17 to 20): 1 if choices or probabilities are even. Over
    a whole batch it would depend on how the batch is cut up. f has no gradient. 0 in segment 0 (padding).
    """
    E, K = logits_BTE.shape[-1], chosen_BTK.shape[-1]
    same_BTU = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & (segment_ids_BT != 0)[:, :, None]
    chose_BUE = jnp.sum(jax.nn.one_hot(chosen_BTK, E, dtype=jnp.float32), axis=2)
    counts_BTE = jnp.einsum("btu,bue->bte", same_BTU.astype(jnp.float32), chose_BUE)
    length_BT1 = jnp.sum(same_BTU, axis=2, keepdims=True)
    share_BTE = counts_BTE / (K * jnp.maximum(length_BT1, 1))
    return E * jnp.sum(share_BTE * jax.nn.softmax(logits_BTE, axis=-1), axis=-1)


def z_terms(logits_BTE: Float[Array, "B T E"]) -> Float[Array, "B T"]:
    """The square of the logits' logsumexp (ST-MoE, arXiv:2202.08906, eq. 5), which keeps them small."""
    return jax.nn.logsumexp(logits_BTE, axis=-1) ** 2
