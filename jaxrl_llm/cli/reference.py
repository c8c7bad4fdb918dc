"""The frozen policy that a KL penalty is taken to: the weights RL started from, kept in the run directory."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.assemble import Setup
from jaxrl_llm.models.transformer import abstract_params, logical_axes
from jaxrl_llm.sharding import param_shardings
from jaxrl_llm.types import Params, UserError


def reference_policy(run_dir: Path, setup: Setup, starting: Params | None) -> Params | None:
    """A copy of the weights RL starts from, sharded like the policy, in `kl.reference_dtype`; None if nobody asks.

    `starting` are these weights in a new run, which saves them; a resumed run passes None and reads them back.
    Raises UserError if they are gone or damaged.
    """
    kl = setup.config.algorithm.kl
    if kl.place == "none":
        return None
    store = CheckpointStore(run_dir / "reference", keep=1)
    if starting is not None:
        store.save(0, {"params": starting}, {}, setup.fingerprints)
    else:
        restored = store.restore_latest({"params": _abstract(setup)}, fingerprints=setup.fingerprints)
        if restored is None:
            raise UserError(
                f"{run_dir / 'reference'} is missing: it holds the weights that algorithm.kl compares with; "
                "restore it from a copy, or start again in another --run-dir"
            )
        starting = restored.state["params"]
    dtype = jnp.dtype(kl.reference_dtype)
    # A copy: the train step donates the policy's own arrays.
    return jax.tree.map(lambda x: jax.device_put(x.astype(dtype), x.sharding, may_alias=False), starting)


def abstract_reference(setup: Setup) -> Params | None:
    """`reference_policy` as `jax.ShapeDtypeStruct`s with their shardings."""
    kl = setup.config.algorithm.kl
    if kl.place == "none":
        return None
    dtype = jnp.dtype(kl.reference_dtype)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), _abstract(setup))


def _abstract(setup: Setup) -> Params:
    abstract = abstract_params(setup.config.model)
    placed = param_shardings(setup.trainer_mesh, logical_axes(setup.config.model), abstract)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, placed)
