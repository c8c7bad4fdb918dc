"""A run directory with checkpoints of known weights, without training."""

import jax
import numpy as np
import yaml

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.assemble import assemble
from jaxrl_llm.config import dump, load
from jaxrl_llm.models.transformer import init_params


def make_run(config_path, run_dir, *, steps=(2, 4)):
    """The step of a checkpoint is the seed of its weights. Returns the assembled setup."""
    setup = assemble(load(config_path))
    store = CheckpointStore(run_dir / "checkpoints", keep=len(steps))
    for step in steps:
        store.save(step, {"params": weights(setup, step), "count": np.int32(step)}, {}, setup.fingerprints)
    (run_dir / "config.yaml").write_text(dump(setup.config))
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["sampler"]["slots"] == setup.config.sampler.slots
    return setup


def weights(setup, step):
    return jax.tree.map(np.asarray, init_params(setup.config.model, step))
