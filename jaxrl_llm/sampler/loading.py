"""The engine's own copy of a policy's weights: checked, placed, cast, cut up or quantised."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.quantised import Int8Weight, input_axes, is_matrix, quantise
from jaxrl_llm.models.transformer import abstract_params, logical_axes
from jaxrl_llm.types import Params, UserError

_TOGETHER = 4  # layers, at most, that one program cuts out of the stack


class WeightLoader:
    """Copies weights of `model` to `mesh` in `dtype`.

    With `unstack` each layer's weights get buffers of their own (a tuple of layers instead of a stack). With `int8` the
    layers' matrices are quantised; embedding, head, norms and biases never are. A router is float32 whatever `dtype`.
    """

    def __init__(self, model: ModelConfig, mesh: Mesh, *, dtype: Any, int8: bool, unstack: bool):
        self._dtype, self._int8, self._unstack, self._layers = jnp.dtype(dtype), int8, unstack, model.layers
        self._abstract, axes = abstract_params(model), logical_axes(model)
        self._shardings = sharding.param_shardings(mesh, axes, self._abstract, whose="sampler.mesh")
        self._layer_axes = {name: names[1:] for name, names in axes["layers"].items()}
        stacked = {name: self._copied(s, axes["layers"][name][1:], 1) for name, s in self._shardings["layers"].items()}
        one = {
            # Layers stay whole on their stacking axis, so one layer's partition is the rest of the stack's.
            name: self._copied(NamedSharding(mesh, PartitionSpec(*s.spec[1:])), self._layer_axes[name], 0)
            for name, s in self._shardings["layers"].items()
        }
        self._top_shardings = {name: s for name, s in self._shardings.items() if name != "layers"}
        self._top_jits = {name: jax.jit(self._cast, out_shardings=s) for name, s in self._top_shardings.items()}
        self._placed_layers, self._stacked = one if unstack else stacked, stacked
        self._stack_jit = jax.jit(jax.vmap(self._layer), out_shardings=stacked)
        self._together = max(n for n in range(1, _TOGETHER + 1) if self._layers % n == 0)
        self._layers_jit = jax.jit(self._some_layers, out_shardings=(one,) * self._together)

    def load(self, params: Params) -> Params:
        """The copy; it never shares a buffer with `params`, which may live anywhere in this process and be donated as
        soon as the result is ready. A pure function: any thread may call it while another one decodes.

        With `int8`, layers' matrices that were quantised elsewhere are taken as they are.
        Raises UserError naming the first leaf that is missing, unknown or of another shape.
        """
        sent_int8 = self._int8 and any(isinstance(leaf, Int8Weight) for leaf in params.get("layers", {}).values())
        self._check(params, self._sent if sent_int8 else self._abstract)
        places = {**self._shardings, "layers": self._stacked} if sent_int8 else self._shardings
        # device_put shares buffers where it can, even with may_alias=False (a replicated array and one of its
        # shards); the trainer donates its buffers, so the copy is made by a program.
        placed = jax.device_put(params, places)
        copied = {name: copy(placed[name]) for name, copy in self._top_jits.items()}
        if self._unstack:
            # A few layers per program: a single one of so many outputs takes seconds to compile, and one for each
            # layer, all waiting for the same copy, took half as long again.
            starts = range(0, self._layers, self._together)
            layers = sum((self._layers_jit(placed["layers"], np.int32(start)) for start in starts), ())
        else:
            layers = self._stack_jit(placed["layers"])
        return {**copied, "layers": layers}

    def abstract(self) -> Params:
        """What `load` returns, as `jax.ShapeDtypeStruct`s with their shardings."""

        stack = self._abstract["layers"]
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stack)
        copied = jax.eval_shape(self._layer, one) if self._unstack else jax.eval_shape(jax.vmap(self._layer), stack)
        layers = sharding.placed(copied, self._placed_layers)
        top = {name: x for name, x in self._abstract.items() if name != "layers"}
        top = sharding.placed(jax.eval_shape(lambda tree: jax.tree.map(self._cast, tree), top), self._top_shardings)
        return {**top, "layers": (layers,) * self._layers if self._unstack else layers}

    @property
    def _sent(self) -> Params:
        """What quantised weights look like before they are cut up."""
        return {**self._abstract, "layers": jax.eval_shape(jax.vmap(self._layer), self._abstract["layers"])}

    def _check(self, params: Params, abstract: Params) -> None:
        wanted, given = _leaves(abstract), _leaves(params)
        if missing := sorted(set(wanted) - set(given)):
            raise UserError(f"weights lack the leaf {missing[0]} (and {len(missing) - 1} more) of this model")
        if unknown := sorted(set(given) - set(wanted)):
            raise UserError(f"weights have a leaf {unknown[0]} (and {len(unknown) - 1} more) that this model has not")
        for name, leaf in wanted.items():
            if (shape := np.shape(given[name])) != leaf.shape:
                raise UserError(f"weights leaf {name} has shape {shape}; this model needs {leaf.shape}")

    def _quantised(self, names: tuple[str, ...]) -> bool:
        return self._int8 and is_matrix(names)

    def _copied(self, place: NamedSharding, names: tuple[str, ...], leading: int) -> Any:
        """Where the copy of a layer's leaf lives; a scale is whole along the axes that its matrix sums over."""
        if not self._quantised(names):
            return place
        spec = [*place.spec, *[None] * (leading + len(names) - len(place.spec))]
        for axis in input_axes(names):
            spec[leading + axis] = None
        places: Any = place, NamedSharding(place.mesh, PartitionSpec(*spec))
        return Int8Weight(*places)

    def _cast(self, x: Array, names: tuple[str, ...] = ()) -> Array:
        return jnp.array(x, jnp.float32 if "router" in names else self._dtype, copy=True)

    def _layer(self, layer: Params) -> Params:
        axes = self._layer_axes

        def one(name: str, x: Any) -> Any:
            if isinstance(x, Int8Weight):
                return jax.tree.map(partial(jnp.array, copy=True), x)
            return quantise(x, axes[name]) if self._quantised(axes[name]) else self._cast(x, axes[name])

        return {name: one(name, x) for name, x in layer.items()}

    def _some_layers(self, stacked: Params, start: Array) -> tuple[Params, ...]:
        def one(index: Array) -> Params:
            return self._layer(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked))

        return tuple(one(start + place) for place in range(self._together))


def _leaves(tree: Params) -> dict[str, Any]:
    keystr = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
