"""Weights that a run keeps once beside its checkpoints and reads back when it goes on."""

from pathlib import Path

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.assemble import Setup
from jaxrl_llm.sharding import param_shardings, placed
from jaxrl_llm.types import Params, UserError


def keep(path: Path, setup: Setup, params: Params) -> None:
    """Save `params` under `path`, a folder of the run directory."""
    CheckpointStore(path, keep=1, world=setup.world).save(0, {"params": params}, {}, setup.fingerprints)


def on_trainer(setup: Setup, declared: tuple[Params, Params]) -> Params:
    """An abstract tree, given with the names of its axes, with its shardings on the trainer's mesh."""
    abstract, axes = declared
    return placed(abstract, param_shardings(setup.trainer_mesh, axes, abstract))


def kept(path: Path, setup: Setup, declared: tuple[Params, Params], what: str) -> Params:
    """What `keep` saved, on the trainer's mesh; `declared` is its abstract tree and the names of its axes.

    Raises UserError, saying `what` it holds, if it is gone, damaged, or another run's.
    """
    wanted = {"params": on_trainer(setup, declared)}
    restored = CheckpointStore(path, keep=1, world=setup.world).restore_latest(wanted, fingerprints=setup.fingerprints)
    if restored is None:
        raise UserError(
            f"{path} is missing: it holds {what}; restore it from a copy, or start again in another --run-dir"
        )
    return restored.state["params"]
