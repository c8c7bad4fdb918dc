"""Flat tokens in chunks: how the head's work is laid out so that [N, V] never exists at once.

Suffixes: N flat tokens, D model width, K shards of N, M tokens of one shard, S tokens of one chunk (of all shards).
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

_TOKENS, _LOGITS = 512, 24 * 2**20


def default_chunk(vocab: int, *, shards: int = 1, vocab_shards: int = 1) -> int:
    """512 tokens of each device, or where that is fewer as many as make 24 Mi logits (96 MiB in float32) there.

    `shards` and `vocab_shards` are the numbers of devices that tokens and vocabulary are split over. Not more for a
    small vocabulary: the loop over chunks skips whole chunks of what is not wanted.
    """
    return min(_TOKENS, max(1, _LOGITS * vocab_shards // vocab)) * shards


@dataclass(frozen=True)
class Chunks:
    """Tokens with a row per shard, padded to whole chunks of `width`; the first `used` hold all that are wanted."""

    n: int
    shards: int
    width: int
    used: Int[Array, ""]
    wanted_KM: Bool[Array, "K M"] | None = None
    order_KM: Int[Array, "K M"] | None = None

    @classmethod
    def of(cls, n: int, *, chunk: int, shards: int, wanted_N: Bool[Array, " N"] | None = None) -> "Chunks":
        """`n` tokens, at most `chunk` of all shards together in one chunk (rounded up to a multiple of `shards`).

        Raises ValueError if `chunk` or `shards` is not positive.
        """
        if chunk < 1:
            raise ValueError(
                f"chunk is {chunk}; it counts the tokens whose logits exist at once and must be at least 1"
            )
        if shards < 1:
            raise ValueError(f"shards is {shards}; it counts the blocks that N is sharded into and must be at least 1")
        per_shard = max(1, -(-n // shards))
        width = -(-per_shard // -(-per_shard // -(-chunk // shards)))  # chunks as even as they can be
        every = cls(n, shards, width, jnp.int32(-(-per_shard // width)))
        if wanted_N is None:
            return every
        wanted_KM = every.lay(wanted_N)
        used = jnp.max(-(-jnp.sum(wanted_KM, axis=1, dtype=jnp.int32) // width))
        return cls(n, shards, width, used, wanted_KM, jnp.argsort(~wanted_KM, axis=1, stable=True))

    def lay(self, x_N: Array) -> Array:
        """[N ...] -> [K M ...], in the order of the chunks, zeros behind."""
        per_shard, others = -(-self.n // self.shards), [(0, 0)] * (x_N.ndim - 1)
        x_KM = jnp.pad(x_N, [(0, per_shard * self.shards - self.n), *others])
        x_KM = x_KM.reshape(self.shards, per_shard, *x_N.shape[1:])
        x_KM = jnp.pad(x_KM, [(0, 0), (0, -per_shard % self.width), *others])
        if self.order_KM is None:
            return x_KM
        return jnp.take_along_axis(x_KM, jnp.expand_dims(self.order_KM, range(2, x_KM.ndim)), axis=1)

    def back(self, x_KM: Array) -> Array:
        """[K M] -> [N], 0 for tokens that are not wanted."""
        if self.order_KM is not None and self.wanted_KM is not None:
            x_KM = jnp.take_along_axis(x_KM, jnp.argsort(self.order_KM, axis=1), axis=1)
            x_KM = jnp.where(self.wanted_KM, x_KM, 0.0)
        return x_KM[:, : -(-self.n // self.shards)].reshape(-1)[: self.n]


def chunk_of(x_KM: Array, c: Array, width: int) -> Array:
    """The c-th chunk of every shard, flat: [S ...] of [K M ...]."""
    x_KW = lax.dynamic_slice_in_dim(x_KM, c * width, width, axis=1)
    return x_KW.reshape(-1, *x_KW.shape[2:])


def put_chunk(x_KM: Array, y_S: Array, c: Array, width: int) -> Array:
    """[K M ...] with its c-th chunk replaced by `y_S`."""
    y_KW = y_S.reshape(x_KM.shape[0], width, *x_KM.shape[2:])
    return lax.dynamic_update_slice_in_dim(x_KM, y_KW, c * width, axis=1)
