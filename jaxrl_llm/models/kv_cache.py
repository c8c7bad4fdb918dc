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
    """`k` is [L S K C N], `v` [L S K N C]. In int8, `k_scale` [L S K 1 N] and `v_scale` [L S K N 1] are float32 and a
    key is `k * k_scale`; otherwise they are None.

    Each lies the way its product reads it, along N for scores and along C for values: with both as [N C], attention on
    CPU took 1.7 times as long. For a model whose layers are a tuple, the cache is a tuple too: a KVCache without [L]
    per layer. XLA on CPU copies a layer out of a stack before it multiplies with it, two thirds of attention's time.
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
    rows = (slots, kv_heads)
    if unstack:
        return tuple(_zeros(rows, length, head_dim, dtype) for _ in range(layers))
    return _zeros((layers, *rows), length, head_dim, dtype)


def _zeros(rows: tuple[int, ...], length: int, head_dim: int, dtype: Any) -> KVCache:
    zeros = KVCache(k=jnp.zeros((*rows, head_dim, length), dtype), v=jnp.zeros((*rows, length, head_dim), dtype))
    if jnp.dtype(dtype) != jnp.int8:
        return zeros
    return replace(
        zeros,
        k_scale=jnp.zeros((*rows, 1, length), jnp.float32),
        v_scale=jnp.zeros((*rows, length, 1), jnp.float32),
    )


def positions(cache: Cache) -> int:
    """N, the positions of a slot."""
    return (cache if isinstance(cache, KVCache) else cache[0]).v.shape[-2]


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


def _write(cache: Cache, layer: Any, k: Array, v: Array, put_k, put_v) -> Cache:
    """Write into one layer; `put_k` and `put_v` are (old, leading index, new) -> updated array."""

    def put(old: KVCache, new: KVCache, leading: tuple[Any, ...]) -> KVCache:
        scales = old.k_scale is not None
        return KVCache(
            k=put_k(old.k, leading, new.k),
            v=put_v(old.v, leading, new.v),
            k_scale=put_k(old.k_scale, leading, new.k_scale) if scales else None,
            v_scale=put_v(old.v_scale, leading, new.v_scale) if scales else None,
        )

    if isinstance(cache, KVCache):
        return put(cache, _stored(cache, k, v), (layer,))
    return (*cache[:layer], put(cache[layer], _stored(cache[layer], k, v), ()), *cache[layer + 1 :])


def write_tokens(cache: Cache, layer: Any, positions_S: Array, k_SKC: Array, v_SKC: Array) -> Cache:
    """One token per slot at the slot's own position; a position beyond the cache is dropped."""
    slots = jnp.arange(positions_S.shape[0])

    def put_k(old, leading, new):
        return old.at[(*leading, slots, slice(None), slice(None), positions_S)].set(new, mode="drop")

    def put_v(old, leading, new):
        return old.at[(*leading, slots, slice(None), positions_S)].set(new, mode="drop")

    return _write(cache, layer, k_SKC, v_SKC, put_k, put_v)


def write_span(cache: Cache, layer: Any, start: Any, k_BTKC: Array, v_BTKC: Array) -> Cache:
    """T tokens of every row at positions start ... start + T - 1, which must lie inside the cache."""

    def put_k(old, leading, new):
        new = jnp.expand_dims(new.transpose(0, 2, 3, 1), range(len(leading)))
        return lax.dynamic_update_slice(old, new, (*leading, 0, 0, 0, start))

    def put_v(old, leading, new):
        new = jnp.expand_dims(new.swapaxes(1, 2), range(len(leading)))
        return lax.dynamic_update_slice(old, new, (*leading, 0, 0, start, 0))

    return _write(cache, layer, k_BTKC, v_BTKC, put_k, put_v)


def read_layer(cache: Cache, layer: Any, dtype: Any) -> tuple[Array, Array]:
    """Keys [S K C N] and values [S K N C] of one layer."""
    if isinstance(cache, KVCache):
        at = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), cache)
    else:
        at = cache[layer]
    if at.k_scale is None:
        return at.k.astype(dtype), at.v.astype(dtype)
    return tuple((x.astype(jnp.float32) * scale).astype(dtype) for x, scale in ((at.k, at.k_scale), (at.v, at.v_scale)))


def copy_row(cache: Cache, slot: Any, source: Cache, row: Any) -> Cache:
    """The source's row into a slot, as many of its positions as the slot has; the slot's others stay as they are."""

    def put(old, new):
        new = new[..., : old.shape[-2], : old.shape[-1]]
        one = lax.dynamic_slice_in_dim(new, row, 1, axis=slot_axis(new))
        return lax.dynamic_update_slice_in_dim(old, one, slot, axis=slot_axis(old))

    return jax.tree.map(put, cache, source)


def copy_rows(cache: Cache, first: Any, source: Cache) -> Cache:
    """All rows of a source of equal length into the slots from `first` on."""
    return jax.tree.map(
        lambda old, new: lax.dynamic_update_slice_in_dim(old, new, first, axis=slot_axis(old)), cache, source
    )
