"""Attention of packed rows in blocks of queries, each over the keys that its tokens can reach: exact, by XLA alone.

A row of many short documents allows few of its T x T pairs. Where it is known how far a document reaches (types.Reach),
a block of queries needs the keys of so many places before it, and the prompt that it shares, which stands at the start
of its family: a shared prompt and the documents that go on from it lie next to one another (data/packing.shared_fit).

Suffixes: B rows, T tokens, n blocks of a row, b queries of a block, u keys of a block, P places of a shared prompt.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import attend
from jaxrl_llm.types import Reach

_BLOCK = 64  # queries; larger ones look at more keys in vain, smaller ones make small products


def keys_reached(reach: Reach) -> int:
    """Keys that a block of queries looks at."""
    return reach.shared + _before(reach) + _BLOCK


def pays(reach: Reach | None, length: int) -> bool:
    """Whether blocks look at clearly fewer keys than the whole row of `length` has."""
    return reach is not None and keys_reached(reach) <= 0.75 * length


def _before(reach: Reach) -> int:
    """Places before a block that its first query may see, in whole blocks."""
    return -(-(reach.own - 1) // _BLOCK) * _BLOCK


def families(segment_ids_BT: Int[Array, "B T"], prefix_ids_BT: Int[Array, "B T"] | None) -> Int[Array, "B T"]:
    """Where the family of each token begins: at its shared prompt, or at its own document if it shares none."""
    ids = segment_ids_BT
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    if prefix_ids_BT is not None:
        begins &= prefix_ids_BT == 0
    return lax.cummax(jnp.where(begins, jnp.arange(ids.shape[1]), 0), axis=1)


def attend_near(
    q_BTHC: Float[Array, "B T H C"],
    k_BTKC: Float[Array, "B T K C"],
    v_BTKC: Float[Array, "B T K C"],
    families_BT: Int[Array, "B T"],
    mask_BnbU: Bool[Array, "B n b u"],
    *,
    reach: Reach,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B T H C"]:
    """`attention.attend` where no token looks further than `reach`; `mask` is `block_mask`'s, for the same rows."""
    B, T, H, C = q_BTHC.shape
    (q,) = _blocks(q_BTHC)
    keys, values = (_reached(x, families_BT, reach) for x in (k_BTKC, v_BTKC))
    n = q.shape[1]
    rows = [x.reshape(B * n, *x.shape[2:]) for x in (q, keys, values, mask_BnbU)]
    return attend(*rows, scale=scale, softcap=softcap).reshape(B, n * _BLOCK, H, C)[:, :T]


def block_mask(
    allowed: Callable[..., Array], fields: tuple[Array, ...], families_BT: Int[Array, "B T"], reach: Reach
) -> Bool[Array, "B n b u"]:
    """What each block may look at of the keys it is given.

    `allowed(query fields, key fields) -> [B n b u]` is called with `fields` (segment ids first) as [B n b] and [B n u].
    Causality is added here.
    """
    B, T = fields[0].shape
    places_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    queries = _blocks(*fields, places_BT)
    keys = [_reached(x, families_BT, reach) for x in (*fields, places_BT)]
    mask = allowed(queries[:-1], keys[:-1]) & (keys[-1][:, :, None, :] <= queries[-1][:, :, :, None])
    if reach.shared:
        # A place that the block reaches both ways is looked at once.
        first = jnp.arange(queries[0].shape[1]) * _BLOCK - _before(reach)
        twice = (jnp.arange(keys[0].shape[2]) < reach.shared)[None, None] & (keys[-1] >= first[None, :, None])
        mask &= ~twice[:, :, None, :]
    return mask


def _blocks(*arrays: Array) -> list[Array]:
    """[B T ...] -> [B n b ...], zeros behind."""
    behind = -arrays[0].shape[1] % _BLOCK
    padded = [jnp.pad(x, [(0, 0), (0, behind)] + [(0, 0)] * (x.ndim - 2)) for x in arrays]
    return [x.reshape(x.shape[0], -1, _BLOCK, *x.shape[2:]) for x in padded]


def _reached(x_BT: Array, families_BT: Int[Array, "B T"], reach: Reach) -> Array:
    """[B T ...] -> [B n u ...]: the places at the start of the family that each block begins in, then those next to it.

    Zeros stand where a row has no place; a segment id of 0 is padding.
    """
    (blocks,) = _blocks(x_BT)
    n, before = blocks.shape[1], _before(reach) // _BLOCK
    padded = jnp.pad(blocks, [(0, 0), (before, 0)] + [(0, 0)] * (blocks.ndim - 2))
    near = jnp.concatenate([padded[:, j : j + n] for j in range(before + 1)], axis=2)
    if not reach.shared:
        return near
    # A slice that would pass the row's end begins earlier instead: it still holds all of the prompt.
    piece = partial(lax.dynamic_slice_in_dim, slice_size=reach.shared)
    starts_Bn = families_BT[:, ::_BLOCK]
    far = jax.vmap(jax.vmap(piece, in_axes=(None, 0)))(x_BT, starts_Bn)
    return jnp.concatenate([far, near], axis=2)
