"""What turns gradients into updates, its rate a pure function of the step number."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.types import Params


def learning_rate(config: OptimizerConfig, step: int | jax.Array, *, total_steps: int) -> jax.Array | np.ndarray:
    """The rate (float32 []) of the `step`-th update, counted from 1 as `TrainState.step` reads after it.

    Of an int it is worked out on the host, where a record need not wait for the step that the device is at.

    Warm-up over w steps: update n has n/w of `lr`, so the first has lr/w (not 0) and the w-th the whole of it.
    Decay over the last d of `total_steps` mirrors it: the last update has lr/d, one more would have 0; with the shape
    cosine, x of the way down from 1 to 0 is (1 + cos(pi (1 - x))) / 2. A floor f makes x into f + (1 - f) x.
    Where the two overlap the smaller counts.
    Raises ValueError where `lr_batch` is still to be worked in; see `for_batch`.
    """
    if config.lr_batch is not None:
        raise ValueError(f"lr {config.lr} is meant for {config.lr_batch} completions; scale it with for_batch first")
    where: Any = np if isinstance(step, int) else jnp
    at = where.asarray(step, where.float32)
    factor = where.float32(1.0)
    if config.warmup_steps:
        factor = where.minimum(factor, at / config.warmup_steps)
    if config.decay_steps:
        left = where.clip((total_steps + 1 - at) / config.decay_steps, 0.0, 1.0)
        if config.decay_shape == "cosine":
            left = (1 + where.cos(math.pi * (1 - left))) / 2
        factor = where.minimum(factor, config.lr_floor + (1 - config.lr_floor) * left)
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


_MATRICES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
_MATRICES |= {f"{kind}_{name}": 1 for kind in ("expert", "shared") for name in ("gate", "up", "down")}
"""How many axes of a layer's matrix, from its input axes on, are inputs; those behind them are outputs."""


def matrix_axes(params: Params) -> Params:
    """Which axes of each leaf are a matrix's inputs and outputs, for Muon; None for what is no layer's matrix.

    Embedding and head are left out as published: each of their rows is a token's own.
    """

    def axes(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if "layers" not in jax.tree_util.keystr(path) or name not in _MATRICES:
            return None
        # Axes in front of the matrix (layers, experts) count copies of it.
        outputs = {"q": 2, "k": 2, "v": 2}.get(name, 1)
        first = leaf.ndim - _MATRICES[name] - outputs
        middle = first + _MATRICES[name]
        return contrib.MuonDimensionNumbers(tuple(range(first, middle)), tuple(range(middle, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(axes, params)


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=config.moment_dtype)


def _adafactor() -> optax.GradientTransformation:
    # Without its rates relative to the weights' own size: the schedule here says the rate.
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


def _at_adamws_size(updates: Any, _: Any) -> Any:
    """Orthogonal updates at a root mean square of .2, as AdamW's usually have, so that one rate serves both
    (arXiv:2502.16982)."""

    def scaled(update, axes):
        inputs, outputs = (math.prod(update.shape[a] for a in side) for side in axes)
        return update * (0.2 * math.sqrt(max(inputs, outputs)))

    return jax.tree.map(scaled, updates, matrix_axes(updates))


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    orthogonal = optax.chain(
        contrib.scale_by_muon(beta=config.momentum, mu_dtype=config.moment_dtype, weight_dimension_numbers=matrix_axes),
        optax.stateless(_at_adamws_size),
    )

    def kinds(params: Params) -> Params:
        axes = matrix_axes(params)
        return jax.tree.map(
            lambda _, dims: "adam" if dims is None else "muon", params, axes, is_leaf=lambda x: x is None
        )

    return optax.partition({"muon": orthogonal, "adam": _adam(config)}, kinds)


def for_batch(config: OptimizerConfig, completions: int) -> OptimizerConfig:
    """The same with the rate for updates on so many completions: lr sqrt(completions / lr_batch), if that is set."""
    if config.lr_batch is None:
        return config
    scale = math.sqrt(completions / config.lr_batch)
    return config.model_copy(update={"lr": config.lr * scale, "lr_batch": None})


def make_optimizer(config: OptimizerConfig, *, total_steps: int) -> optax.GradientTransformationExtraArgs:
    """p -= rate * (direction + weight_decay * p), decay on matrices only (arXiv:1711.05101).

    The direction is AdamW's m_hat / (sqrt(v_hat) + eps), Adafactor's (arXiv:1804.04235, clipped to a root mean square
    of 1, no momentum) or Muon's (momentum orthogonalised by five Newton-Schulz steps, for the layers' matrices; AdamW's
    for the rest). Gradients are clipped to `clip_norm` first if it is set. `update` takes the number of the update,
    counted from 1, as the keyword `step`; see `learning_rate`.
    """
    clip = () if config.clip_norm is None else (optax.clip_by_global_norm(config.clip_norm),)
    directions = {"adamw": lambda: _adam(config), "adafactor": _adafactor, "muon": lambda: _muon(config)}
    return optax.chain(
        *clip,
        directions[config.kind](),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        _scale_by_rate(config, total_steps),
    )
