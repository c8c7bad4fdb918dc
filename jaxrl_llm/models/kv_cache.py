"""Keys and values of decoded sequences, a row per slot, as they are or in int8 with a scale per head and position."""

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax


@flax.struct.dataclass
class KVCache:
    """`k` and `v` are [layers, S, K, N, C]: S slots of N positions. In int8, `k_scale` and `v_scale` are float32
    [layers, S, K, N, 1] and a key is `k * k_scale`; otherwise they are None.

    Heads stand before positions, so that a head's keys are one matrix in memory.
    """

    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None


def empty_cache(*, layers: int, slots: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> KVCache:
    """A cache of zeros; `length` is the longest prompt plus completion a slot can hold."""
    shape = (layers, slots, kv_heads, length, head_dim)
    zeros = KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
    if jnp.dtype(dtype) != jnp.int8:
        return zeros
    scale = jnp.zeros((*shape[:-1], 1), jnp.float32)
    return replace(zeros, k_scale=scale, v_scale=scale)


def _encode(x: Array) -> tuple[Array, Array]:
    """int8 values and the float32 scale of each vector: the largest entry becomes 127."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale


def _stored(cache: KVCache, k: Array, v: Array) -> KVCache:
    """New keys and values as the cache keeps them."""
    if cache.k_scale is None:
        return KVCache(k=k.astype(cache.k.dtype), v=v.astype(cache.v.dtype))
    (k, k_scale), (v, v_scale) = _encode(k), _encode(v)
    return KVCache(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def write_tokens(cache: KVCache, layer: Any, positions_S: Array, k_SKC: Array, v_SKC: Array) -> KVCache:
    """One token per slot at the slot's own position; a position beyond the cache is dropped."""
    slots = jnp.arange(positions_S.shape[0])

    def put(old, new):
        return old.at[layer, slots, :, positions_S].set(new, mode="drop")

    return jax.tree.map(put, cache, _stored(cache, k_SKC, v_SKC))


def write_span(cache: KVCache, layer: Any, start: Any, k_BTKC: Array, v_BTKC: Array) -> KVCache:
    """T tokens of every row at positions start ... start + T - 1, which must lie inside the cache."""

    def put(old, new):
        return lax.dynamic_update_slice(old, new.swapaxes(1, 2)[None], (layer, 0, 0, start, 0))

    return jax.tree.map(put, cache, _stored(cache, k_BTKC, v_BTKC))


def read_layer(cache: KVCache, layer: Any, dtype: Any) -> tuple[Array, Array]:
    """Keys and values [S K N C] of one layer."""
    at = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), cache)
    if at.k_scale is None:
        return at.k.astype(dtype), at.v.astype(dtype)
    return tuple((x.astype(jnp.float32) * scale).astype(dtype) for x, scale in ((at.k, at.k_scale), (at.v, at.v_scale)))


def copy_row(cache: KVCache, slot: Any, source: KVCache, row: Any) -> KVCache:
    """The source's row into a slot; the slot's positions beyond the source's length stay as they are."""

    def put(old, new):
        return lax.dynamic_update_slice(old, lax.dynamic_slice_in_dim(new, row, 1, axis=1), (0, slot, 0, 0, 0))

    return jax.tree.map(put, cache, source)
