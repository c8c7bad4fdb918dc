"""The two halves of a LoRA run: the frozen base, kept once in RUN/base, and adapters in the checkpoints."""

from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.checkpoints.peft import adapter_folder, read_peft
from jaxrl_llm.cli.assemble import SamplerSetup, Setup, initial_params
from jaxrl_llm.cli.kept import keep, kept, on_trainer
from jaxrl_llm.config import RunConfig
from jaxrl_llm.global_arrays import place
from jaxrl_llm.models.lora import merge
from jaxrl_llm.models.transformer import abstract_params, init_params, logical_axes
from jaxrl_llm.train.state import shardings_of
from jaxrl_llm.types import Params, UserError

_BASE = "base"


def frozen_base(run_dir: Path, setup: Setup, *, resumed: bool) -> Params | None:
    """The weights under the adapters, on the trainer's mesh; None where the whole policy is trained.

    A new run takes them from `model.init` or draws them, and saves them; a resumed one reads them back.
    Raises UserError if they are gone or damaged.
    """
    config = setup.config
    if config.adapters is None:
        return None
    model, path = config.model, run_dir / _BASE
    declared = abstract_params(model), logical_axes(model)
    if resumed:
        return kept(path, setup, declared, "the frozen weights under this run's adapters")
    places = shardings_of(on_trainer(setup, declared))
    given = initial_params(setup)
    base = init_params(model, config.seed, places) if given is None else place(given, places, may_alias=True)
    keep(path, setup, base)
    return base


def abstract_base(setup: Setup) -> Params | None:
    """`frozen_base` as `jax.ShapeDtypeStruct`s with their shardings."""
    model = setup.config.model
    return None if setup.config.adapters is None else on_trainer(setup, (abstract_params(model), logical_axes(model)))


def starting_params(setup: SamplerSetup) -> Params | None:
    """What training starts from: `model.init`, with LoRA `lora.init`; None for a random start."""
    config = setup.config
    if config.adapters is None:
        return initial_params(setup)
    init = config.lora.init
    return None if init is None else read_peft(adapter_folder(init), config.model)[1]


def initial_policy(setup: SamplerSetup) -> Params | None:
    """The plain weights a run would start from; None where `model.init` names none."""
    base, adapters = initial_params(setup), setup.config.adapters
    if base is None or adapters is None or (trained := starting_params(setup)) is None:
        return base
    return merge(base, trained, adapters)


def merged_params(run_dir: Path, config: RunConfig, params: Params, dtype: Any = None) -> Params:
    """The plain weights of a checkpoint's `params` on the host: a LoRA run's merged, in `dtype` (None: the base's).

    Raises UserError if the base is gone or damaged.
    """
    return params if config.adapters is None else merge(_base_of(run_dir), params, config.adapters, dtype)


def _base_of(run_dir: Path) -> Params:
    store = CheckpointStore(run_dir / _BASE, keep=1)
    if not store.steps():
        raise UserError(
            f"{run_dir / _BASE} is missing: it holds the frozen weights under this run's adapters; restore it from a "
            "copy, or export the adapters alone with `jaxrl convert --adapter`"
        )
    return store.read_params(0)
