"""AdamW with warm-up, its rate a pure function of the step number."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.types import Params


def learning_rate(config: OptimizerConfig, step: int | jax.Array, *, total_steps: int) -> jax.Array:
    """The rate (float32 []) of the `step`-th update, counted from 1 as `TrainState.step` reads after it.

    Warm-up over w steps: update n has n/w of `lr`, so the first has lr/w (not 0) and the w-th the whole of it.
    Decay over the last d of `total_steps` mirrors it: the last update has lr/d, one more would have 0.
    Where the two overlap the smaller counts.
    """
    step = jnp.asarray(step, jnp.float32)
    factor = jnp.float32(1.0)
    if config.warmup_steps:
        factor = jnp.minimum(factor, step / config.warmup_steps)
    if config.decay_steps:
        factor = jnp.minimum(factor, jnp.maximum(total_steps + 1 - step, 0.0) / config.decay_steps)
    return config.lr * factor


def _scale_by_rate(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformationExtraArgs:
    # Taken from the run's step instead of a count of its own: a skipped update must not shift the schedule, and there
    # is one number less to checkpoint.
    def update(updates: Any, state: Any, params: Params = None, **extra: Any) -> tuple[Any, Any]:
        rate = learning_rate(config, extra["step"], total_steps=total_steps)
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def decayed(params: Params) -> Params:
    """True for the leaves that weight decay shrinks: matrices, not scales of norms (`*norm`) and biases (`*bias`).

    Names decide, because stacked layers and heads give these more than one dimension.
    """

    def is_matrix(path, _):
        return not jax.tree_util.keystr(path[-1:], simple=True).endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(config: OptimizerConfig, *, total_steps: int) -> optax.GradientTransformationExtraArgs:
    """AdamW (arXiv:1711.05101): p -= rate * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p), decay on matrices only.

    Gradients are clipped to `clip_norm` first if it is set. `update` takes the number of the update, counted from 1,
    as the keyword `step`; see `learning_rate`.
    """
    clip = () if config.clip_norm is None else (optax.clip_by_global_norm(config.clip_norm),)
    return optax.chain(
        *clip,
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        _scale_by_rate(config, total_steps),
    )
