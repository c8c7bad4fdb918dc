"""`jaxrl aot`: the train step and the decode step of a configuration, compiled for devices that are not there."""

import os
from collections.abc import Iterator

from jaxrl_llm import aot
from jaxrl_llm.cli.adapters import abstract_base
from jaxrl_llm.cli.assemble import assemble
from jaxrl_llm.cli.devices import configure_jax
from jaxrl_llm.cli.join import make_step, rl_algorithm, rl_shape
from jaxrl_llm.cli.reference import abstract_reference
from jaxrl_llm.config import RunConfig
from jaxrl_llm.rollout.rows import pack

_SMALLER_STEP = (
    "give train.mesh more fsdp or tensor, set train.remat=full, or lower train.microbatch_rows or train.row_length"
)
_SMALLER_SAMPLER = "give sampler.mesh more tensor, or lower sampler.slots or the tokens of a prompt and completion"


def compile_for(config: RunConfig, topology: str) -> Iterator[aot.Program]:
    """Compile both programs as a run on this topology would, one after the other; nothing is allocated.

    Raises UserError for whatever does not fit the topology.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in aot.TPU_ENVIRONMENT.items()})
    configure_jax(config.device.model_copy(update={"platform": "cpu"}))
    where = aot.topology(topology)
    setup = assemble(config, where.devices)
    algorithm = rl_algorithm(setup)
    shape = rl_shape(setup.config, algorithm)
    step, state = make_step(
        setup,
        setup.config.optimizer,
        algorithm,
        total_steps=config.train.steps,
        reach=shape.reach,
        ema=config.train.ema,
        reference=abstract_reference(setup),
        base=abstract_base(setup),
    )
    yield aot.compile_program("train step", lambda: step.lower(state, pack([], shape)), where, _SMALLER_STEP)
    yield aot.compile_program("decode step", setup.engine.lower_generate, where, _SMALLER_SAMPLER)
