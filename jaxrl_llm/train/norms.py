"""Norms of the parts of a policy: what kind of layer a number belongs to, and how deep it stands."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.types import Params

_ATTENTION = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias")
_THIRDS = ("first_third", "middle_third", "last_third")


def _kind(keys: list[str]) -> str:
    if "lora" in keys:
        return "adapters"
    if keys[-1].endswith("norm"):
        return "norms"
    if "layers" not in keys:
        return keys[-1]
    return "attention" if keys[-1] in _ATTENTION else "mlp"


def part_norms(tree: Params) -> dict[str, Float[Array, ""]]:
    """Euclidean norms, float32, of a tree like the parameters or the adapters: `all` of it; its kinds `embed`, `head`,
    `attention`, `mlp` (experts and routers too), `norms` and `adapters`, those there are; and of three layers or more
    `first_third`, `middle_third` and `last_third`, layer l of L being in third floor(3 l / L).

    The squares of the kinds add up to that of all.
    """
    kinds: dict[str, Array] = {}
    thirds: dict[str, Array] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        keys = [key.key for key in path]
        squares = jnp.square(leaf.astype(jnp.float32))
        if {"layers", "lora"} & set(keys) and (depth := len(leaf)) >= 3:
            # One sum of each layer for both uses: of two sums XLA on CPU would write the squares down that they share.
            squares_L = jnp.sum(squares, axis=tuple(range(1, leaf.ndim)))
            of = [3 * layer // depth for layer in range(depth)]
            parts = {
                name: jnp.sum(squares_L[of.index(n) : depth - of[::-1].index(n)]) for n, name in enumerate(_THIRDS)
            }
            thirds = {name: thirds.get(name, 0.0) + part for name, part in parts.items()}
            total = sum(parts.values(), jnp.float32(0.0))
        else:
            total = jnp.sum(squares)
        kinds[_kind(keys)] = kinds.get(_kind(keys), jnp.float32(0.0)) + total
    found = kinds | {"all": sum(kinds.values(), jnp.float32(0.0))} | thirds
    return {name: jnp.sqrt(square) for name, square in found.items()}
