"""What an optimizer step reads and writes, and how it is born on a mesh."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.transformer import abstract_params, init_params, logical_axes
from jaxrl_llm.sharding import param_shardings, replicated
from jaxrl_llm.types import Params, UserError


@flax.struct.dataclass
class TrainState:
    """`step` int32 [] counts optimizer batches, applied or not; `opt_state` is float32 and sharded like `params`."""

    step: jax.Array
    params: Params
    opt_state: Any


def as_float32(tree: Params) -> Params:
    """The tree in float32: the optimizer works on it whatever the parameters' dtype."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def abstract_state(model: ModelConfig, optimizer: optax.GradientTransformation, *, mesh: Mesh) -> TrainState:
    """The state as `jax.ShapeDtypeStruct`s that carry their shardings; nothing is allocated. Restores start here.

    Raises UserError if the mesh does not divide the model.
    """
    params = abstract_params(model)
    placed = param_shardings(mesh, logical_axes(model), params)
    whole: Any = replicated(mesh)
    opt_state = jax.eval_shape(lambda p: optimizer.init(as_float32(p)), params)
    # Optimizer leaves shaped like parameters live where these live; counts and the like are on every device.
    opt_placed = optax.tree.map_params(
        optimizer.init, lambda _, sharding: sharding, opt_state, placed, transform_non_params=lambda _: whole
    )
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
    abstract = TrainState(step=step, params=params, opt_state=opt_state)
    shardings = TrainState(step=whole, params=placed, opt_state=opt_placed)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def shardings_of(abstract: Any) -> Any:
    """The tree of shardings inside a tree of `jax.ShapeDtypeStruct`s or arrays."""
    return jax.tree.map(lambda x: x.sharding, abstract)


def _with_optimizer(params: Params, optimizer: optax.GradientTransformation, abstract: TrainState) -> TrainState:
    init = jax.jit(lambda p: optimizer.init(as_float32(p)), out_shardings=shardings_of(abstract.opt_state))
    step = jax.device_put(np.zeros((), np.int32), abstract.step.sharding)
    return TrainState(step=step, params=params, opt_state=init(params))


def random_state(model: ModelConfig, optimizer: optax.GradientTransformation, *, mesh: Mesh, seed: int) -> TrainState:
    """A state at step 0 with random parameters, the same for one seed on every mesh."""
    abstract = abstract_state(model, optimizer, mesh=mesh)
    return _with_optimizer(init_params(model, seed, shardings_of(abstract.params)), optimizer, abstract)


def state_from_params(
    model: ModelConfig, optimizer: optax.GradientTransformation, *, mesh: Mesh, params: Params
) -> TrainState:
    """A state at step 0 with copies of the given parameters (numpy or jax arrays), cast to `param_dtype`.

    Copies, because the train step donates its state and would otherwise delete the caller's arrays.
    Raises UserError naming the leaf if the tree or a shape is not the model's.
    """
    abstract = abstract_state(model, optimizer, mesh=mesh)
    given = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(params)}
    wanted = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(abstract.params)}
    if given.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
        raise UserError(f"the given weights are not this model's: missing {missing}, unknown {extra}; check `model`")
    for name, x in wanted.items():
        if given[name].shape != x.shape:
            raise UserError(f"weight {name} has shape {given[name].shape}, the model wants {x.shape}; check `model`")
    placed = jax.tree.map(
        lambda x, a: jax.device_put(x.astype(a.dtype), a.sharding, may_alias=False), params, abstract.params
    )
    return _with_optimizer(placed, optimizer, abstract)
