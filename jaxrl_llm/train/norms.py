"""Norms of the parts of a policy: what kind of layer a number belongs to, and how deep it stands."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
    layers_L: Any = 0.0
    for path, leaf in jax.tree.leaves_with_path(tree):
        keys = [key.key for key in path]
        squares = jnp.square(leaf.astype(jnp.float32))
        if "layers" in keys or "lora" in keys:
            # Without the barrier XLA sums the leaf twice, once for each use, and on CPU writes its squares down for it.
            squares_L = lax.optimization_barrier(jnp.sum(squares, axis=tuple(range(1, leaf.ndim))))
            layers_L, squares = layers_L + squares_L, squares_L
        kinds[_kind(keys)] = kinds.get(_kind(keys), jnp.float32(0.0)) + jnp.sum(squares)
    found = kinds | {"all": sum(kinds.values(), jnp.float32(0.0))}
    if (depth := jnp.size(layers_L)) >= 3:
        thirds = [3 * layer // depth for layer in range(depth)]
        for third, name in enumerate(_THIRDS):
            found[name] = jnp.sum(layers_L[thirds.index(third) : depth - thirds[::-1].index(third)])
    return {name: jnp.sqrt(square) for name, square in found.items()}
