"""What an optimizer step reads and writes, and how it is born on a mesh."""

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm.config import LoraConfig, ModelConfig
from jaxrl_llm.global_arrays import place
from jaxrl_llm.models.lora import init_adapters, trainable
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.sharding import param_shardings, placed, replicated
from jaxrl_llm.train.spikes import NormRecord, no_norms
from jaxrl_llm.types import Params, UserError


@flax.struct.dataclass
class CriticState:
    """The value head {"weight": float32 [D], "bias": float32 []} and its optimizer's state, whole on every device."""

    head: Params
    opt_state: Any


@flax.struct.dataclass
class EntropyControl:
    """An adaptive entropy coefficient, and the mean entropy (nats) of the last applied update. Both float32 []."""

    coefficient: jax.Array
    entropy: jax.Array


@flax.struct.dataclass
class TrainState:
    """`step` int32 [] counts steps, applied or not; `opt_state` is float32 and sharded like `params`.

    `params` are what is trained: the policy, or with LoRA the adapters alone (models/lora.py). `critic` and `entropy`
    are None unless the algorithm has them, `norms` unless spikes are left out. `ema`, an average of `params` in float32
    and sharded like them, is None unless it is asked for.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    critic: CriticState | None = None
    entropy: EntropyControl | None = None
    norms: NormRecord | None = None
    ema: Params | None = None


def as_float32(tree: Params) -> Params:
    """The tree in float32: the optimizer works on it whatever the parameters' dtype."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def abstract_state(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh,
    critic: optax.GradientTransformation | None = None,
    adapts_entropy: bool = False,
    watches_norms: bool = False,
    averages: bool = False,
    lora: LoraConfig | None = None,
) -> TrainState:
    """The state as `jax.ShapeDtypeStruct`s that carry their shardings; nothing is allocated. Restores start here.

    With `critic`, the optimizer of a value head, there is one; with `adapts_entropy` a coefficient that adapts; with
    `watches_norms` a record of gradient norms; with `averages` an average of the parameters; with `lora` the parameters
    are adapters. Raises UserError if the mesh does not divide the model.
    """
    params, axes = trainable(model, lora)
    places = param_shardings(mesh, axes, params)
    whole: Any = replicated(mesh)
    opt_state = jax.eval_shape(lambda p: optimizer.init(as_float32(p)), params)
    opt_places = _beside_params(opt_state, params, places, whole)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
    beside = jax.eval_shape(lambda: _beside(model, critic, adapts_entropy, watches_norms))
    average = jax.eval_shape(as_float32, params) if averages else None
    abstract = TrainState(step, params, opt_state, *beside, ema=average)
    others = jax.tree.map(lambda _: whole, beside)
    return placed(abstract, TrainState(whole, places, opt_places, *others, ema=places if averages else None))


def _beside_params(opt_state: Any, params: Params, places: Params, whole: Any) -> Any:
    """Optimizer leaves that have a parameter's name and shape live where it lives; counts, factors and the like are on
    every device."""

    def name(path):
        return jax.tree_util.keystr(tuple(key for key in path if isinstance(key, jax.tree_util.DictKey)))

    leaves = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(places), strict=True)
    homes = {(name(path), x.shape): sharding for (path, x), sharding in leaves}

    def home(path, x):
        # A partition of optimizers has names of its own in front.
        names = (name(path[start:]) for start in range(len(path)))
        return next((homes[each, x.shape] for each in names if (each, x.shape) in homes), whole)

    return jax.tree_util.tree_map_with_path(home, opt_state)


def _beside(
    model: ModelConfig, critic: optax.GradientTransformation | None, adapts_entropy: bool, watches_norms: bool
) -> tuple[CriticState | None, EntropyControl | None, NormRecord | None]:
    """What stands beside the policy at step 0: a value head that says 0 everywhere, a coefficient of 0, no norms."""
    head = {"weight": jnp.zeros(model.d_model, jnp.float32), "bias": jnp.zeros((), jnp.float32)}
    return (
        CriticState(head=head, opt_state=critic.init(head)) if critic is not None else None,
        EntropyControl(coefficient=jnp.zeros((), jnp.float32), entropy=jnp.zeros((), jnp.float32))
        if adapts_entropy
        else None,
        no_norms() if watches_norms else None,
    )


def shardings_of(abstract: Any) -> Any:
    """The tree of shardings inside a tree of `jax.ShapeDtypeStruct`s or arrays."""
    return jax.tree.map(lambda x: x.sharding, abstract)


def _with_optimizer(params: Params, optimizer: optax.GradientTransformation, abstract: TrainState) -> TrainState:
    init = jax.jit(lambda p: optimizer.init(as_float32(p)), out_shardings=shardings_of(abstract.opt_state))
    step = place(np.zeros((), np.int32), abstract.step.sharding)
    return TrainState(step=step, params=params, opt_state=init(params))


def random_state(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh,
    seed: int,
    lora: LoraConfig | None = None,
) -> TrainState:
    """A state at step 0 with random parameters (or adapters), the same for one seed on every mesh."""
    abstract = abstract_state(model, optimizer, mesh=mesh, lora=lora)
    places = shardings_of(abstract.params)
    drawn = init_params(model, seed, places) if lora is None else init_adapters(model, lora, seed, places)
    return _with_optimizer(drawn, optimizer, abstract)


def state_from_params(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh,
    params: Params,
    critic: optax.GradientTransformation | None = None,
    adapts_entropy: bool = False,
    watches_norms: bool = False,
    averages: bool = False,
    lora: LoraConfig | None = None,
) -> TrainState:
    """A state at step 0 with copies of the given parameters or adapters (numpy or jax arrays), cast to their dtype.

    What stands beside them starts from zero, an average from the parameters; see `abstract_state`.
    Copies, because the train step donates its state and would otherwise delete the caller's arrays.
    Raises UserError naming the leaf if the tree or a shape is not the model's.
    """
    beside = {"critic": critic, "adapts_entropy": adapts_entropy, "watches_norms": watches_norms}
    abstract = abstract_state(model, optimizer, mesh=mesh, averages=averages, lora=lora, **beside)
    given = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(params)}
    wanted = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(abstract.params)}
    if given.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
        raise UserError(f"the given weights are not this model's: missing {missing}, unknown {extra}; check `model`")
    for name, x in wanted.items():
        if given[name].shape != x.shape:
            raise UserError(f"weight {name} has shape {given[name].shape}, the model wants {x.shape}; check `model`")

    def copied(tree: Params, like: Params) -> Params:
        return place(jax.tree.map(lambda x, a: x.astype(a.dtype), tree, like), shardings_of(like))

    copies = copied(params, abstract.params)
    state = _with_optimizer(copies, optimizer, abstract)
    places = shardings_of((abstract.critic, abstract.entropy, abstract.norms))
    others = place(_beside(model, **beside), places)
    average = copied(copies, abstract.ema) if averages else None
    return replace(state, critic=others[0], entropy=others[1], norms=others[2], ema=average)
