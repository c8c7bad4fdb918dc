"""Low-rank adapters (LoRA, arXiv:2106.09685): a frozen matrix W acts as W + s A B, and only A and B are trained.

    {"lora": {"q": {"a": [L D r], "b": [L r H C]}, "o": {"a": [L H C r], "b": [L r D]}, "gate": ..., ...}}

A has the input axes of its matrix and B the output axes, so both live on the mesh as the matrix does. They are float32
whatever the dtype of the base.

`trained` below is what an optimizer moves: this tree, or the whole policy where `lora` is None (and `base` with it).
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxrl_llm.config import LoraConfig, ModelConfig
from jaxrl_llm.models.quantised import input_axes, is_matrix
from jaxrl_llm.models.transformer import abstract_params, logical_axes
from jaxrl_llm.types import Params, UserError


def trainable(model: ModelConfig, lora: LoraConfig | None) -> tuple[Params, Params]:
    """What is trained, as `jax.ShapeDtypeStruct`s, and the logical names of its axes.

    Raises UserError naming a target for which the model has no dense projection.
    """
    if lora is None:
        return abstract_params(model), logical_axes(model)
    layers, abstract, axes = abstract_params(model)["layers"], {}, {}
    for target, names in dense_projections(logical_axes(model)["layers"], lora.targets).items():
        cut = 1 + len(input_axes(names[1:]))
        inputs, outputs = layers[target].shape[1:cut], layers[target].shape[cut:]
        a, b = (model.layers, *inputs, lora.rank), (model.layers, lora.rank, *outputs)
        abstract[target] = {"a": jax.ShapeDtypeStruct(a, jnp.float32), "b": jax.ShapeDtypeStruct(b, jnp.float32)}
        axes[target] = {"a": (*names[:cut], "rank"), "b": (names[0], "rank", *names[cut:])}
    return {"lora": abstract}, {"lora": axes}


def dense_projections(layer_axes: Mapping[str, Any], targets: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The logical axes (layers first) of each target. Raises UserError for one that is no dense projection here."""
    found = {}
    for target in targets:
        names = layer_axes.get(target)
        if not isinstance(names, tuple) or not is_matrix(names[1:]) or any("expert" in name for name in names):
            dense = [t for t in ("q", "k", "v", "o", "gate", "up", "down") if t in layer_axes and t not in targets]
            raise UserError(
                f"lora.targets has {target}, but this model's layers have no dense projection of that name (experts "
                f"take no adapters); leave it out{f', or take one of {dense}' if dense else ''}"
            )
        found[target] = names
    return found


def init_adapters(model: ModelConfig, lora: LoraConfig, seed: int, shardings: Params | None = None) -> Params:
    """Adapters that change nothing yet: B is zero, A uniform within +-1/sqrt(inputs), as PEFT draws it.

    The same for one seed wherever `shardings` puts them. That uniform is Kaiming's with a = sqrt(5): bound
    sqrt(6 / ((1 + 5) inputs)).
    """
    abstract = trainable(model, lora)[0]["lora"]

    def build(key):
        made = {}
        for index, (target, pair) in enumerate(sorted(abstract.items())):
            a, b = pair["a"].shape, pair["b"].shape
            bound = math.prod(a[1:-1]) ** -0.5
            drawn = jax.random.uniform(jax.random.fold_in(key, index), a, jnp.float32, -bound, bound)
            made[target] = {"a": drawn, "b": jnp.zeros(b, jnp.float32)}
        return {"lora": made}

    # Folded, because the base's own parameters are drawn from key(seed).
    key = jax.random.fold_in(jax.random.key(seed), int.from_bytes(b"lora", "big"))
    return jax.jit(build, out_shardings=shardings)(key)


def attach(base: Params | None, trained: Params, lora: LoraConfig | None) -> Params:
    """The tree that the forward pass takes: the base's, its layers with (A, s B) beside their matrices.

    Differentiable in `trained`; no gradient of a matrix of the base is ever formed.
    """
    if base is None or lora is None:
        return trained
    # The scale goes into B, so that the forward pass knows of no setting.
    scaled = {name: {"a": pair["a"], "b": lora.scale * pair["b"]} for name, pair in trained["lora"].items()}
    return {**base, "layers": {**base["layers"], "lora": scaled}}


def merge(base: Params | None, trained: Params, lora: LoraConfig | None, dtype: Any = None) -> Params:
    """Plain weights, W + s A B: added up in float32, the adapted matrices then cast to `dtype` (None: the base's).

    What has no adapter is the base's own array. Numpy arrays give numpy arrays, without a look at any device.
    """
    if base is None or lora is None:
        return trained
    matrices = {name: base["layers"][name] for name in trained["lora"]}
    on_host = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((matrices, trained)))
    add = _merged_on_host if on_host else _merged
    merged = add(matrices, trained["lora"], lora.scale, None if dtype is None else jnp.dtype(dtype))
    return {**base, "layers": {**base["layers"], **merged}}


@functools.partial(jax.jit, static_argnums=(2, 3))
def _merged(matrices: Params, adapters: Params, scale: float, dtype: Any) -> Params:
    def one(w: Float[Array, "L *io"], a: Array, b: Array) -> Array:
        product = jax.vmap(functools.partial(jnp.tensordot, axes=1, precision=lax.Precision.HIGHEST))(a, scale * b)
        return (w.astype(jnp.float32) + product).astype(dtype or w.dtype)

    return {name: one(w, **adapters[name]) for name, w in matrices.items()}


def _merged_on_host(matrices: Params, adapters: Params, scale: float, dtype: Any) -> Params:
    merged = {}
    for name, w in matrices.items():
        a, b = adapters[name]["a"], np.float32(scale) * adapters[name]["b"]
        merged[name] = np.empty(w.shape, dtype or w.dtype)
        for layer in range(len(w)):  # one layer's float32 copy at a time
            merged[name][layer] = w[layer].astype(np.float32) + np.tensordot(a[layer], b[layer], axes=1)
    return merged
