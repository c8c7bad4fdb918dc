"""`jaxrl train` and `jaxrl sft`: join the rooms, warm up, train, forecast, report."""

import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.adapters import frozen_base
from jaxrl_llm.cli.agreement import check_setups, config_facts
from jaxrl_llm.cli.algorithm import adapts_entropy, critic_optimizer
from jaxrl_llm.cli.assemble import Setup, assemble
from jaxrl_llm.cli.console import Progress, ablations
from jaxrl_llm.cli.devices import configure_jax, join_processes, own_place
from jaxrl_llm.cli.join import Joined, Outlets, Saver, lag_rule, new_issuer, shared_work
from jaxrl_llm.cli.reference import reference_policy
from jaxrl_llm.cli.remote import (
    check_deployment,
    check_evaluation,
    is_remote,
    open_outlets,
    samples_here,
    without_deployment,
)
from jaxrl_llm.cli.reward import OpenedRewards, open_rewards
from jaxrl_llm.cli.run_dir import opened
from jaxrl_llm.cli.warm_up import warm_up
from jaxrl_llm.cli.worlds import wire_form
from jaxrl_llm.config import DistributedConfig, RunConfig, SamplerConfig
from jaxrl_llm.metrics import NoLog, RunLog
from jaxrl_llm.report.fitting import fit_run
from jaxrl_llm.report.html import write_report
from jaxrl_llm.report.summary import summarise
from jaxrl_llm.train.lead import Lead, follow
from jaxrl_llm.train.loop import Counters, Outcome, Schedule, run_loop
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.train.state import TrainState, abstract_state, state_from_params
from jaxrl_llm.types import UserError


def run_training(config: RunConfig, run_dir: Path, *, reinforce: bool) -> str:
    """Run (or go on with) the training that `config` describes; returns how it ended: finished or interrupted.

    With `reinforce` False only the supervised warm-up runs. Raises UserError before anything is written if the
    configuration, the files or the devices do not fit, and RunFailedError if training cannot go on.
    """
    place = own_place(config.device)
    if reinforce:
        check_evaluation(config)
        if place.count > 1:
            _check_shared_training(config, place.count)
    # What is left of the configuration is one and the same in all processes.
    deployment = config.sampler
    config, device = without_deployment(_without_processes(config)), config.device
    check_deployment(deployment)
    configure_jax(device)
    world = join_processes(device, place, config_facts(config) if place.count > 1 else {})
    with world.together("checking the configuration"):
        setup = assemble(config, world=world, samples=samples_here(deployment))
    check_setups(world, setup)
    with closing(setup.reward_processes):
        rewards = None
        with world.together("opening the rewards"):
            if reinforce and world.first:
                rewards = open_rewards(setup)
        with opened(run_dir, setup), _stop_signals() as asked:
            return _run(setup, rewards, run_dir, asked, deployment, reinforce=reinforce)


def _check_shared_training(config: RunConfig, count: int) -> None:
    """Raises UserError unless RL over `count` processes can work."""
    if samples_here(config.sampler):
        raise UserError(
            f"jaxrl train over {count} processes, which share all their devices, does not sample in any of them; start "
            "samplers with `jaxrl sampler` and name them in sampler.workers, or set sampler.remote.listen, where they "
            "register (and leave sampler.remote.local out)"
        )
    if config.sampler.remote.transfer:
        raise UserError(
            f"sampler.remote.transfer = true, but the weights of {count} processes are put together on the host of the "
            "first one; leave it out"
        )
    if "model" in config.rollout.rewards:
        raise UserError(
            f"rollout.rewards has a part model, but jaxrl train runs over {count} processes, which share all their "
            "devices; a reward model needs a trainer of one process"
        )


def _without_processes(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"device": config.device.model_copy(update={"distributed": DistributedConfig()})})


@contextmanager
def _stop_signals():
    """SIGINT and SIGTERM ask for a clean stop after the present step; a second one stops at once."""
    asked = threading.Event()

    def handle(signum, _):
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        print("\nstopping after this step and saving; once more stops at once", flush=True)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    setup: Setup,
    rewards: OpenedRewards | None,
    run_dir: Path,
    asked: Callable[[], bool],
    deployment: SamplerConfig,
    *,
    reinforce: bool,
) -> str:
    """Without `reinforce` only the warm-up runs; `rewards` are the first process's."""
    config, world = setup.config, setup.world
    store = CheckpointStore(run_dir / "checkpoints", keep=config.checkpoint.keep, world=world)
    optimizer = make_optimizer(config.optimizer, total_steps=config.train.steps)
    how = {
        "mesh": setup.trainer_mesh,
        "critic": critic_optimizer(config),
        "adapts_entropy": adapts_entropy(config),
        "watches_norms": config.optimizer.skip_norm_factor is not None,
        "averages": config.train.ema is not None,
        "lora": config.adapters,
    }
    abstract = abstract_state(config.model, optimizer, **how)
    restored = store.restore_latest(abstract, fingerprints=setup.fingerprints)
    start, state, extras = restored if restored else (0, None, {})
    with world.together("opening the records"):
        log = RunLog(run_dir, resume_step=start if restored else -1) if world.first else NoLog()
    try:
        with ExitStack() as stack:
            progress = stack.enter_context(Progress(run_dir.name, steps=config.train.steps, quiet=not world.first))
            for words in ablations(config.model):
                progress.say(words)
            if restored and not reinforce:
                progress.say(f"the warm-up of {run_dir} is done; jaxrl train goes on from step {start}")
                return "finished"
            # As early as this, so that samplers find the trainer while it warms up.
            outlets = Outlets(None)
            with world.together("opening the samplers' door"):
                if reinforce and world.first:
                    outlets = stack.enter_context(open_outlets(setup, deployment, run_dir, log, progress))
            base = frozen_base(run_dir, setup, resumed=restored is not None)
            if state is None:
                params = warm_up(setup, base, log, progress, lambda: world.any_process(asked()))
                if params is None:
                    log.state("interrupted", step=0, steps=config.train.steps, message="stopped in the warm-up")
                    return "interrupted"
                state = state_from_params(config.model, optimizer, params=params, **how)
                del params
            elif start:
                progress.say(f"going on from the checkpoint of step {start}")
            reference = reference_policy(run_dir, setup, None if restored else state.params)
            issuer = new_issuer(setup, extras)
            save = Saver(setup, issuer, store, log)
            if not restored:
                save(0, state, {})
            if not reinforce:
                log.state("finished", step=0, steps=0, message="supervised warm-up only")
                return "finished"
            remote = is_remote(deployment)
            with world.together("compiling"):
                wire = wire_form(setup.config, deployment.remote, setup.trainer_mesh) if remote else None
                work = shared_work(setup, base, reference, save, wire)
            if not world.first:
                try:
                    return follow(world, work, state, asked)
                except KeyboardInterrupt:
                    return "interrupted"
            lead = Lead(world, work)

            def run() -> str:
                assert rewards is not None
                environment = rewards.environment()
                joined = Joined(setup, environment, state, work, lead, start, issuer, log, progress, outlets, asked)
                ended = _reinforce(joined, state, start, extras, run_dir, asked)
                if outlets.fleet is not None:
                    outlets.fleet.finished = ended == "finished"
                return ended

            return lead.to_the_end(run)
    finally:
        log.close()


def _reinforce(joined: Joined, state: TrainState, start: int, extras: Mapping[str, Any], run_dir: Path, asked) -> str:
    config, log, progress = joined.setup.config, joined.log, joined.progress
    steps = config.train.steps
    log.state("running", step=start, steps=steps)
    counters = Counters(**extras.get("counters", {}))
    try:
        outcome = run_loop(
            state,
            joined.parts(),
            Schedule(
                steps=steps,
                lag_bound=lag_rule(config.rollout).bound,
                eval_every=config.eval.every,
                checkpoint_every=config.checkpoint.every,
            ),
            counters,
            start=start,
            stop_requested=lambda: joined.lead.stop_requested(asked),
        )
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        message = "stopped at once" if interrupted else f"{type(error).__name__}: {error}"
        log.state("interrupted" if interrupted else "failed", step=start, steps=steps, message=message)
        if interrupted:
            return "interrupted"
        raise
    _finish(run_dir, outcome, steps, log, progress)
    return outcome.state


def _finish(run_dir: Path, outcome: Outcome, steps: int, log: RunLog, progress: Progress) -> None:
    log.state(outcome.state, step=outcome.step, steps=steps, message=outcome.message)
    fit_run(run_dir)
    path = write_report(run_dir)
    facts = summarise(run_dir)
    if outcome.message:
        progress.say(outcome.message)
    curves = {f"held-out {facts['metric']}": facts} | facts["sources"]
    reached = ", ".join(f"{name} {_short(f['eval_first'])} -> {_short(f['eval_last'])}" for name, f in curves.items())
    progress.say(f"{outcome.state} at step {outcome.step} of {steps}: {reached}")
    progress.say(f"report: {path}")


def _short(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
