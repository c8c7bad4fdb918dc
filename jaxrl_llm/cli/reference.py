"""The frozen policy that a KL penalty is taken to: the weights RL started from, kept in the run directory."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_llm.cli.assemble import Setup
from jaxrl_llm.cli.kept import keep, kept, on_trainer
from jaxrl_llm.models.lora import trainable
from jaxrl_llm.types import Params


def reference_policy(run_dir: Path, setup: Setup, starting: Params | None) -> Params | None:
    """A copy of the weights RL starts from, sharded like the policy, in `kl.reference_dtype`; None if nobody asks.

    With LoRA these are the adapters it starts from: the base is one and the same.
    `starting` are these weights in a new run, which saves them; a resumed run passes None and reads them back.
    Raises UserError if they are gone or damaged.
    """
    kl, path = setup.config.algorithm.kl, run_dir / "reference"
    if kl.place == "none":
        return None
    if starting is not None:
        keep(path, setup, starting)
    else:
        declared = trainable(setup.config.model, setup.config.adapters)
        starting = kept(path, setup, declared, "the weights that algorithm.kl compares with")
    dtype = jnp.dtype(kl.reference_dtype)
    # A copy: the train step donates the policy's own arrays.
    return jax.tree.map(lambda x: jax.device_put(x.astype(dtype), x.sharding, may_alias=False), starting)


def abstract_reference(setup: Setup) -> Params | None:
    """`reference_policy` as `jax.ShapeDtypeStruct`s with their shardings."""
    kl = setup.config.algorithm.kl
    if kl.place == "none":
        return None
    dtype = jnp.dtype(kl.reference_dtype)
    declared = on_trainer(setup, trainable(setup.config.model, setup.config.adapters))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), declared)
