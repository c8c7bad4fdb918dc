"""Rotary positions and masked grouped-query attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def rotate(x: Float[Array, "*b n C"], positions: Int[Array, "*b"], theta: float) -> Float[Array, "*b n C"]:
    """Rotary position embedding in the half-split convention (arXiv:2104.09864), computed in float32.

    Pair i is (x[i], x[i + C/2]) and turns by positions * theta**(-2 i / C) radians.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * jnp.expand_dims(frequencies, range(positions.ndim + 1))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(
    q_BTHC: Float[Array, "B T H C"],
    k_BUKC: Float[Array, "B U K C"],
    v_BUKC: Float[Array, "B U K C"],
    mask_BTU: Bool[Array, "B T U"],
) -> Float[Array, "B T H C"]:
    """Softmax attention over the keys that `mask_BTU` allows; query heads share key heads in groups of H/K.

    Scores and softmax are float32. A query that may look at nothing (padding) returns the mean of the values:
    finite, and nobody reads it.
    """
    B, T, H, C = q_BTHC.shape
    K = k_BUKC.shape[2]
    q_BTKGC = q_BTHC.reshape(B, T, K, H // K, C)
    scores = jnp.einsum("btkgc,bukc->bkgtu", q_BTKGC, k_BUKC, preferred_element_type=jnp.float32) * C**-0.5
    scores = jnp.where(mask_BTU[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BUKC.dtype)
    return jnp.einsum("bkgtu,bukc->btkgc", weights, v_BUKC).reshape(B, T, H, C)


def attend_cached(
    q_BTHC: Float[Array, "B T H C"],
    k_BKCN: Float[Array, "B K C N"],
    v_BKNC: Float[Array, "B K N C"],
    mask_BTN: Bool[Array, "B T N"],
) -> Float[Array, "B T H C"]:
    """`attend` over keys and values in the cache's layout.

    Queries of one head group stand together as the rows of one product per slot and head; with an axis of their own for
    T = 1, XLA on CPU took a fifth longer for a decode step of a small policy.
    """
    B, T, H, C = q_BTHC.shape
    K = k_BKCN.shape[1]
    G = H // K
    q_BKRC = q_BTHC.reshape(B, T, K, G, C).swapaxes(1, 2).reshape(B, K, T * G, C)
    scores = jnp.einsum("bkrc,bkcn->bkrn", q_BKRC, k_BKCN, preferred_element_type=jnp.float32) * C**-0.5
    mask_BRN = jnp.repeat(mask_BTN, G, axis=1)
    scores = jnp.where(mask_BRN[:, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BKNC.dtype)
    attended_BKRC = jnp.einsum("bkrn,bknc->bkrc", weights, v_BKNC)
    return attended_BKRC.reshape(B, K, T, G, C).swapaxes(1, 2).reshape(B, T, H, C)


def document_mask(segment_ids_BT: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Causal attention inside one document of a packed row; segment 0 (padding) sees and is seen by nothing.

    Comes from segment ids, never from token ids: a sampled pad id is a token like any other.
    """
    T = segment_ids_BT.shape[1]
    same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    return same & causal & (segment_ids_BT != 0)[:, :, None]
