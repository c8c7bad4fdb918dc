"""Supervised warm-up: the train step with advantage 1 on given completions."""

import time
from collections.abc import Callable

import jax

from jaxrl_llm.cli.adapters import starting_params
from jaxrl_llm.cli.assemble import Setup, supervised_examples
from jaxrl_llm.cli.console import Progress
from jaxrl_llm.cli.join import build_train_step, packed_shape
from jaxrl_llm.losses.algorithms import bind
from jaxrl_llm.metrics import RunLog
from jaxrl_llm.rollout.batching import supervised
from jaxrl_llm.rollout.rows import pack
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.loop import plain
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.train.state import random_state, state_from_params
from jaxrl_llm.types import Params, RunFailedError

_SAY_EVERY_S = 5.0


def warm_up(
    setup: Setup, base: Params | None, log: RunLog, progress: Progress, stop_requested: Callable[[], bool]
) -> Params | None:
    """The weights RL starts from, after `sft.steps` supervised steps; None if asked to stop on the way.

    With `base`, these are its adapters.

    REINFORCE with advantage 1 and a token average is the mean negative log-likelihood of the given tokens.
    """
    config = setup.config
    steps = config.sft.steps
    rates = config.optimizer.model_copy(
        update={
            "lr": config.sft.lr,
            "warmup_steps": config.sft.warmup_steps,
            "decay_steps": 0,
            "skip_norm_factor": None,
        }
    )
    optimizer = make_optimizer(rates, total_steps=steps)
    given, how = starting_params(setup), {"mesh": setup.trainer_mesh, "lora": config.adapters}
    if given is None:
        state = random_state(config.model, optimizer, seed=config.seed, **how)
    else:
        state = state_from_params(config.model, optimizer, params=given, **how)
        del given
    if not steps:
        return state.params
    draw, shape = supervised_examples(setup), packed_shape(config, config.sft.examples_per_step)
    likelihood = Algorithm(bind("reinforce"), token_level=True)
    step_function = build_train_step(setup, rates, likelihood, total_steps=steps, shape=shape, base=base)
    setup.world.gather(
        "compiling", ""
    )  # whoever compiled fast would give up on a collective that others have not begun
    said = time.monotonic()
    for step in range(1, steps + 1):
        state, metrics = step_function(state, pack(supervised(*draw(step)), shape))
        found = jax.device_get({name: metrics[name] for name in ("skipped", "loss", "grad_norm")})
        if found["skipped"]:
            raise RunFailedError(f"warm-up step {step}: the loss or the gradient is not finite; lower sft.lr")
        record = {"step": step, "loss": plain(found["loss"]), "grad_norm": plain(found["grad_norm"])}
        log.supervised(record)
        if step == steps or time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            progress.say(f"warm-up step {step} of {steps}: loss {record['loss']:.4f}")
        if stop_requested():
            return None
    return state.params
