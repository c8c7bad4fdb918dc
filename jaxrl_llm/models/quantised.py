"""int8 copies of a layer's matrices for the sampler: half of bfloat16's memory, and a declared loss of exactness."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.types import Params


@flax.struct.dataclass
class Int8Weight:
    """`values * scale` is the matrix; `scale` float32 has one number per output channel (1 on the input axes)."""

    values: Array
    scale: Array


def is_matrix(names: tuple[str, ...]) -> bool:
    """Whether a layer's leaf multiplies the residual stream; biases [heads, C] and norms do not. The router is none of
    them: it stays in float32, since a choice between experts jumps where its logits cross."""
    return "embed" in names and "router" not in names


def input_axes(names: tuple[str, ...]) -> tuple[int, ...]:
    """Which axes of a layer's matrix are summed over, from the logical names of its axes."""
    if names[0] == "experts":
        return (1,)
    return (0,) if names[0] == "embed" else tuple(range(len(names) - 1))


def quantise(weight: Array, names: tuple[str, ...]) -> Int8Weight:
    """The nearest int8 matrix with one scale per output channel, whose largest weight becomes 127."""
    weight = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weight), axis=input_axes(names), keepdims=True) / 127
    return Int8Weight(jnp.round(weight / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale)


def dequantise(tree: Params, dtype: Any) -> Params:
    """The tree with every Int8Weight as a plain array of `dtype`; other leaves as they are."""

    def one(leaf):
        if not isinstance(leaf, Int8Weight):
            return leaf
        return (leaf.values.astype(jnp.float32) * leaf.scale).astype(dtype)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Int8Weight))
