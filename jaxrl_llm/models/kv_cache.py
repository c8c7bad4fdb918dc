"""Keys and values of decoded sequences, a row per slot."""

import flax.struct
import jax.numpy as jnp
from jax import Array


@flax.struct.dataclass
class KVCache:
    """`k` and `v` are [layers, S, N, K, C]: S slots of N positions each."""

    k: Array
    v: Array


def empty_cache(*, layers: int, slots: int, length: int, kv_heads: int, head_dim: int, dtype) -> KVCache:
    """A cache of zeros; `length` is the longest prompt plus completion a slot can hold."""
    shape = (layers, slots, length, kv_heads, head_dim)
    return KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
