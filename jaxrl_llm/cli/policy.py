"""A policy to sample from: a configuration, an engine, and weights whose origin is known."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm import config as config_room
from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.adapters import initial_policy, merged_params
from jaxrl_llm.cli.assemble import SamplerSetup, assemble_sampler
from jaxrl_llm.cli.devices import configure_jax
from jaxrl_llm.config import RunConfig, Section
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.types import Params, UserError

_CHECKPOINT = re.compile(r"step_(\d{8,})(?:\.\d+)?")


@dataclass(frozen=True)
class Policy:
    """`version` is the step of the checkpoint, 0 for weights that are no checkpoint's; `origin` says it in words."""

    setup: SamplerSetup
    params: Params
    version: int
    origin: str

    def scheduler(self, *, max_queue: int | None = None) -> Scheduler:
        """A scheduler with these weights, set up as in training."""
        how, setup = self.setup.config.sampler, self.setup
        return Scheduler(
            setup.engine,
            self.params,
            version=self.version,
            decode=setup.tokenizer.decode,
            max_queue=max_queue,
            refill=how.refill_slots,
            recompute_kv=how.recompute_kv,
        )


def open_policy(
    target: Path,
    overrides: Sequence[str],
    run_dir: Path | None,
    *,
    random_weights: bool,
    ema: bool = False,
    top_logprobs: int = 0,
    sections: Mapping[str, Section] | None = None,
) -> Policy:
    """The policy that `target` names: a YAML file, a run directory, or a checkpoint directory of one.

    Its weights come from the newest checkpoint that verifies of `run_dir` (or of `target`, if that is a run), from
    that very checkpoint if one is named, or else from `model.init`; random ones only if they are asked for.
    With `ema` a checkpoint's averaged weights instead. `top_logprobs` is the engine's. `sections` stand in the place of
    the configuration's own.
    Raises UserError if there are none, or if they are not those of this configuration.
    """
    recorded = target.is_dir()
    if recorded:
        if run_dir is not None:
            raise UserError(f"{target} names a run already; leave --run-dir out, or name the run's YAML file")
        run_dir = target
        target = _run_of(target)[0] / "config.yaml"
    if ema and (random_weights or run_dir is None):
        raise UserError(
            "--ema takes the averaged weights of a run's checkpoint; name the run, without --random-weights"
        )
    config = config_room.load(target, overrides, functions=recorded)
    if sections:
        config = config.model_copy(update=dict(sections))
    configure_jax(config.device)
    if ema and config.train.ema is None:
        raise UserError(f"--ema: {target} has train.ema null, so that no average was kept; leave --ema out")
    setup = assemble_sampler(config, top_logprobs=top_logprobs)
    if random_weights:
        params = jax.tree.map(np.asarray, init_params(setup.config.model, setup.config.seed))
        return Policy(setup, params, 0, f"random weights of seed {setup.config.seed}")
    if run_dir is not None:
        return _from_run(setup, run_dir, ema)
    params = initial_policy(setup)
    if params is None:
        raise UserError(
            f"{target} has no weights to sample with: model.init is not set; name a trained run with --run-dir RUN, or "
            f"ask for --random-weights"
        )
    return Policy(setup, params, 0, f"model.init {setup.config.model.init}")


def open_checkpoint(checkpoint: str, config: RunConfig, *, ema: bool = False) -> Policy:
    """The policy that `checkpoint` names, to be sampled as `config` says: a run or one of its checkpoints, with the
    model and the tokenizer of that run, or weights as `model.init` names them. Raises UserError as `open_policy` does.
    """
    path = Path(checkpoint)
    if (_run_of(path)[0] / "config.yaml").is_file():
        sections = {"rollout": config.rollout, "sampler": config.sampler, "device": config.device, "eval": config.eval}
        return open_policy(path, (), None, random_weights=False, ema=ema, sections=sections)
    if ema:
        raise UserError(f"--ema takes the averaged weights of a run's checkpoint, and {checkpoint} is no run")
    config = config.model_copy(update={"model": config.model.model_copy(update={"init": checkpoint})})
    configure_jax(config.device)
    setup = assemble_sampler(config)
    params = initial_policy(setup)
    assert params is not None  # model.init is set
    return Policy(setup, params, 0, checkpoint)


def _run_of(path: Path) -> tuple[Path, int | None]:
    """(run directory, step) of a run directory, its checkpoints folder or one checkpoint in it."""
    path = path.absolute()
    if match := _CHECKPOINT.fullmatch(path.name):
        return path.parent.parent, int(match[1])
    return (path.parent if path.name == "checkpoints" else path), None


def _from_run(setup: SamplerSetup, path: Path, ema: bool) -> Policy:
    run_dir, step = _run_of(path)
    store = CheckpointStore(run_dir / "checkpoints", keep=1)
    steps = store.steps() if step is None else [step]
    if not steps:
        raise UserError(f"{path} has no checkpoint to sample with; train it first, or name another run")
    reasons = []
    for step in reversed(steps):
        try:
            theirs = store.fingerprints(step)
            params = store.read_params(step, ema=ema)
        except UserError as error:
            reasons.append(str(error))
            logging.getLogger(__name__).warning("%s", error)
            continue
        for name in ("tokenizer", "lora"):
            if theirs.get(name) != setup.fingerprints[name]:
                raise UserError(
                    f"the checkpoint of step {step} in {run_dir} was trained with another {name} than this "
                    f"configuration builds; sample it with its own configuration, {run_dir / 'config.yaml'}"
                )
        params = merged_params(run_dir, setup.config, params)
        weights = "the averaged weights" if ema else "the checkpoint"
        return Policy(setup, params, step, f"{weights} of step {step} in {run_dir}")
    raise UserError(f"no checkpoint of {run_dir} verifies: {'; '.join(reasons)}")
