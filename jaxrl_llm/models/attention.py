"""Masked grouped-query attention, over a row's own keys or over a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.logprobs import soft_cap


def attend(
    q_BTHC: Float[Array, "B T H C"],
    k_BUKC: Float[Array, "B U K C"],
    v_BUKC: Float[Array, "B U K C"],
    mask_BTU: Bool[Array, "B T U"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T H C"]:
    """Softmax attention over the keys that `mask_BTU` allows; query heads share key heads in groups of H/K.

    Scores (times `scale`, then soft-capped) and softmax are float32. A query that may look at nothing (padding) returns
    the mean of the values: finite, and nobody reads it.
    """
    B, T, H, C = q_BTHC.shape
    K = k_BUKC.shape[2]
    q_BTKGC = q_BTHC.reshape(B, T, K, H // K, C)
    scores = jnp.einsum("btkgc,bukc->bkgtu", q_BTKGC, k_BUKC, preferred_element_type=jnp.float32)
    weights = _weights(scores, mask_BTU[:, None, None], scale, softcap).astype(v_BUKC.dtype)
    return jnp.einsum("bkgtu,bukc->btkgc", weights, v_BUKC).reshape(B, T, H, C)


def attend_cached(
    q_BTHC: Float[Array, "B T H C"],
    k_BKCN: Float[Array, "B K C N"],
    v_BKNC: Float[Array, "B K N C"],
    mask_BTN: Bool[Array, "B T N"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T H C"]:
    """`attend` over keys and values in the cache's layout.

    Queries of one head group stand together as the rows of one product per slot and head; with an axis of their own for
    T = 1, XLA on CPU took a fifth longer for a decode step of a small policy.
    """
    B, T, H, C = q_BTHC.shape
    K = k_BKCN.shape[1]
    G = H // K
    q_BKRC = q_BTHC.reshape(B, T, K, G, C).swapaxes(1, 2).reshape(B, K, T * G, C)
    scores = jnp.einsum("bkrc,bkcn->bkrn", q_BKRC, k_BKCN, preferred_element_type=jnp.float32)
    mask_BRN = jnp.repeat(mask_BTN, G, axis=1)
    weights = _weights(scores, mask_BRN[:, None], scale, softcap).astype(v_BKNC.dtype)
    attended_BKRC = jnp.einsum("bkrn,bknc->bkrc", weights, v_BKNC)
    return attended_BKRC.reshape(B, K, T, G, C).swapaxes(1, 2).reshape(B, T, H, C)


def _weights(scores: Array, mask: Array, scale: float, softcap: float | None) -> Array:
    """Softmax over the last axis where `mask`, which has the scores' axes or ones, allows."""
    scores = soft_cap(scores * scale, softcap)
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)


def document_mask(
    segment_ids_BT: Int[Array, "B T"], prefix_ids_BT: Int[Array, "B T"] | None = None
) -> Bool[Array, "B T T"]:
    """Causal attention inside one document of a packed row; segment 0 (padding) sees and is seen by nothing.

    A token with a prefix id also sees that segment, which stands before its own: the prompt that it shares.
    Comes from segment ids, never from token ids: a sampled pad id is a token like any other.
    """
    T = segment_ids_BT.shape[1]
    return same_document(segment_ids_BT, segment_ids_BT, prefix_ids_BT) & jnp.tril(jnp.ones((T, T), bool))[None]


def same_document(
    query_segments: Int[Array, "*b t"],
    key_segments: Int[Array, "*b u"],
    query_prefixes: Int[Array, "*b t"] | None = None,
) -> Bool[Array, "*b t u"]:
    """`document_mask` without causality, for queries and keys from different places of a row."""
    same = query_segments[..., :, None] == key_segments[..., None, :]
    if query_prefixes is not None:
        prefixes = query_prefixes[..., :, None]
        same |= (prefixes == key_segments[..., None, :]) & (prefixes != 0)
    return same & (query_segments != 0)[..., None]


def in_window(
    query_positions: Int[Array, "*b t"], key_positions: Int[Array, "*#b u"], window: int
) -> Bool[Array, "*b t u"]:
    """Keys at most `window` - 1 positions before the query: local attention (arXiv:2004.05150), without causality.

    Positions are those inside a document, so that a packed row gives what each of its documents gives alone.
    """
    return query_positions[..., :, None] - key_positions[..., None, :] < window


def in_chunk(
    query_positions: Int[Array, "*b t"], key_positions: Int[Array, "*#b u"], chunk: int
) -> Bool[Array, "*b t u"]:
    """Keys of the query's own chunk of `chunk` positions, counted from the document's first token (Llama 4), without
    causality."""
    return query_positions[..., :, None] // chunk == key_positions[..., None, :] // chunk
