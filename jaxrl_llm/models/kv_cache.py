"""Keys and values of decoded sequences, a row per slot, as they are or in int8 with a scale per head and position.

Suffixes: L layers, S slots, K key/value heads, N positions of a slot, C head width.
"""

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax


@flax.struct.dataclass
class KVCache:
    """`k` and `v` are [L S K N C]. In int8, `k_scale` and `v_scale` are float32 [L S K N 1] and a key is `k * k_scale`;
    otherwise they are None.

    Heads stand before positions, so that a head's keys are one matrix in memory. For a model whose layers are a tuple,
    the cache is a tuple too: a KVCache of [S K N C] per layer. XLA on CPU copies a layer out of a stack before it
    multiplies with it, which took two thirds of attention's time.
    """

    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None


Cache = KVCache | tuple[KVCache, ...]


def empty_cache(
    *, layers: int, slots: int, length: int, kv_heads: int, head_dim: int, dtype: Any, unstack: bool = False
) -> Cache:
    """A cache of zeros; `length` is the longest prompt plus completion a slot can hold."""
    shape = (slots, kv_heads, length, head_dim)
    if unstack:
        return tuple(_zeros(shape, dtype) for _ in range(layers))
    return _zeros((layers, *shape), dtype)


def _zeros(shape: tuple[int, ...], dtype: Any) -> KVCache:
    zeros = KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
    if jnp.dtype(dtype) != jnp.int8:
        return zeros
    scale = jnp.zeros((*shape[:-1], 1), jnp.float32)
    return replace(zeros, k_scale=scale, v_scale=scale)


def positions(cache: Cache) -> int:
    """N, the positions of a slot."""
    return jax.tree.leaves(cache)[0].shape[-2]


def slot_axis(leaf: Any) -> int:
    """Which axis of a cache's array counts slots."""
    return leaf.ndim - 4


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


def _put(cache: Cache, layer: Any, k: Array, v: Array, stacked, alone) -> Cache:
    """Write into one layer: `stacked` and `alone` are (old, new) -> updated for an array with and without [L]."""
    if isinstance(cache, KVCache):
        return jax.tree.map(stacked, cache, _stored(cache, k, v))
    changed = jax.tree.map(alone, cache[layer], _stored(cache[layer], k, v))
    return (*cache[:layer], changed, *cache[layer + 1 :])


def write_tokens(cache: Cache, layer: Any, positions_S: Array, k_SKC: Array, v_SKC: Array) -> Cache:
    """One token per slot at the slot's own position; a position beyond the cache is dropped."""
    slots = jnp.arange(positions_S.shape[0])

    def stacked(old, new):
        return old.at[layer, slots, :, positions_S].set(new, mode="drop")

    def alone(old, new):
        return old.at[slots, :, positions_S].set(new, mode="drop")

    return _put(cache, layer, k_SKC, v_SKC, stacked, alone)


def write_span(cache: Cache, layer: Any, start: Any, k_BTKC: Array, v_BTKC: Array) -> Cache:
    """T tokens of every row at positions start ... start + T - 1, which must lie inside the cache."""

    def stacked(old, new):
        return lax.dynamic_update_slice(old, new.swapaxes(1, 2)[None], (layer, 0, 0, start, 0))

    def alone(old, new):
        return lax.dynamic_update_slice(old, new.swapaxes(1, 2), (0, 0, start, 0))

    return _put(cache, layer, k_BTKC, v_BTKC, stacked, alone)


def read_layer(cache: Cache, layer: Any, dtype: Any) -> tuple[Array, Array]:
    """Keys and values [S K N C] of one layer."""
    if isinstance(cache, KVCache):
        at = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), cache)
    else:
        at = cache[layer]
    if at.k_scale is None:
        return at.k.astype(dtype), at.v.astype(dtype)
    return tuple((x.astype(jnp.float32) * scale).astype(dtype) for x, scale in ((at.k, at.k_scale), (at.v, at.v_scale)))


def copy_row(cache: Cache, slot: Any, source: Cache, row: Any) -> Cache:
    """The source's row into a slot, as many of its positions as the slot has; the slot's others stay as they are."""
    room = positions(cache)

    def put(old, new):
        one = lax.dynamic_slice_in_dim(new[..., :room, :], row, 1, axis=slot_axis(new))
        return lax.dynamic_update_slice_in_dim(old, one, slot, axis=slot_axis(old))

    return jax.tree.map(put, cache, source)


def copy_rows(cache: Cache, first: Any, source: Cache) -> Cache:
    """All rows of a source of equal length into the slots from `first` on."""
    return jax.tree.map(
        lambda old, new: lax.dynamic_update_slice_in_dim(old, new, first, axis=slot_axis(old)), cache, source
    )
