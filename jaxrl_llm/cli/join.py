"""Joining the rooms into one RL run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.algorithm import bind_algorithm, bind_selection
from jaxrl_llm.cli.assemble import Setup
from jaxrl_llm.cli.console import Progress
from jaxrl_llm.cli.tasks import prompt_stream
from jaxrl_llm.cli.tools import bound_tools, stop_strings, turn_tokens
from jaxrl_llm.config import OptimizerConfig, RolloutConfig, RunConfig
from jaxrl_llm.data.curriculum import PassRates
from jaxrl_llm.envs.single_turn import SingleTurn
from jaxrl_llm.evaluate import evaluate, evaluate_with, mismatch
from jaxrl_llm.metrics import RunLog
from jaxrl_llm.models.flops import peak_flops, sample_flops, train_flops
from jaxrl_llm.models.lora import merge
from jaxrl_llm.rollout.batching import select
from jaxrl_llm.rollout.coordinator import Coordinator
from jaxrl_llm.rollout.exchange import Driver
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.lag import LagRule
from jaxrl_llm.rollout.local import LocalSampler
from jaxrl_llm.rollout.requests import HowToSample
from jaxrl_llm.rollout.rows import RowShape, pack, row_shape
from jaxrl_llm.rollout.statistics import by_source, pass_rate
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.sampler.wire_form import WireForm
from jaxrl_llm.train.algorithm import AdaptiveEntropy, Algorithm
from jaxrl_llm.train.lead import Lead, SharedWork
from jaxrl_llm.train.loop import Compute, Parts
from jaxrl_llm.train.optimizer import learning_rate, make_optimizer
from jaxrl_llm.train.spikes import spike_rule
from jaxrl_llm.train.state import TrainState, abstract_state
from jaxrl_llm.train.step import TrainStep, make_score, make_train_step
from jaxrl_llm.types import EpisodeGroup, Params, PolicyWeights, Reach, Sampling, ThinkingBudget
from jaxrl_llm.weights import WeightBoard
from jaxrl_llm.worlds.fleet import Fleet

# Evaluation draws from a seed of its own, so that its samples never repeat a training sample's key.
_EVAL_SEED_OFFSET = 2**31
_PROBE_DOCUMENTS = 64
_SAMPLES_KEPT = 4


def packed_shape(config: RunConfig, documents: int, updates: int = 1) -> RowShape:
    """Rows that always hold `documents` prompts with their completions in each update."""
    return row_shape(
        documents=documents,
        prompt=config.rollout.max_prompt_tokens,
        completion=config.rollout.max_new_tokens,
        length=config.train.row_length,
        rows=config.train.microbatch_rows,
        updates=updates,
        share_prompts=config.train.share_prompts,
    )


def make_step(
    setup: Setup,
    rates: OptimizerConfig,
    algorithm: Algorithm,
    *,
    total_steps: int,
    reach: Reach | None,
    ema: float | None = None,
    reference: Params | None = None,
    base: Params | None = None,
) -> tuple[TrainStep, TrainState]:
    """The train step of this run, not compiled, and the abstract state that it takes; with LoRA it trains adapters of
    `base`."""
    config = setup.config
    optimizer = make_optimizer(rates, total_steps=total_steps)
    step = make_train_step(
        config.model,
        optimizer,
        algorithm,
        mesh=setup.trainer_mesh,
        temperature=config.rollout.temperature,
        head_chunk=config.train.head_chunk,
        remat=config.train.remat,
        unroll=config.train.unroll_layers,
        share_prompts=config.train.share_prompts,
        reach=reach,
        gradient_dtype=config.train.gradient_dtype,
        spikes=spike_rule(rates.skip_norm_factor),
        ema=ema,
        reference=reference,
        lora=config.adapters,
        base=base,
    )
    state = abstract_state(
        config.model,
        optimizer,
        mesh=setup.trainer_mesh,
        critic=algorithm.critic.optimizer if algorithm.critic is not None else None,
        adapts_entropy=isinstance(algorithm.entropy, AdaptiveEntropy),
        watches_norms=rates.skip_norm_factor is not None,
        averages=ema is not None,
        lora=config.adapters,
    )
    return step, state


def build_train_step(
    setup: Setup,
    rates: OptimizerConfig,
    algorithm: Algorithm,
    *,
    total_steps: int,
    shape: RowShape,
    ema: float | None = None,
    reference: Params | None = None,
    base: Params | None = None,
) -> TrainStep:
    """The train step of this run, compiled for batches of `shape`."""
    how: dict[str, Any] = {"ema": ema, "reference": reference, "base": base}
    step, state = make_step(setup, rates, algorithm, total_steps=total_steps, reach=shape.reach, **how)
    return step.compiled(state, pack([], shape))


def rl_algorithm(setup: Setup) -> Algorithm:
    """The configured algorithm; a row holds at most as many segments as shortest prompts fit into it, and where prompts
    are shared as it has tokens."""
    shortest = 1 if setup.config.train.share_prompts else min(len(task.tokens_T) for task in setup.train_tasks)
    return bind_algorithm(setup.config, num_segments=1 + setup.config.train.row_length // shortest)


def rl_shape(config: RunConfig, algorithm: Algorithm) -> RowShape:
    """Rows that always hold the completions of one RL step."""
    documents = config.rollout.prompts_per_step * config.rollout.group_size // algorithm.updates
    return packed_shape(config, documents, algorithm.updates)


def _sampling(config: RunConfig, temperature: float) -> Sampling:
    how = config.rollout.interruption
    thinking = ThinkingBudget(how.lowest, how.highest, how.answer_tokens) if how.enabled else None
    return Sampling(
        turn_tokens(config.rollout),
        temperature,
        stop_strings=stop_strings(config.rollout),
        thinking=thinking,
        repetition_limit=config.rollout.repetition_limit,
    )


def how_to_sample(config: RunConfig) -> HowToSample:
    """What samplers are asked for, in training and in evaluation."""
    return HowToSample(
        training=_sampling(config, config.rollout.temperature),
        training_seed=config.seed,
        evaluation=_sampling(config, config.eval.temperature),
        evaluation_seed=config.seed + _EVAL_SEED_OFFSET,
    )


def lag_rule(rollout: RolloutConfig) -> LagRule:
    """The configured mode's rule."""
    return LagRule(rollout.mode, rollout.max_lag)


def new_coordinator(config: RunConfig, issuer: GroupIssuer, start: int) -> Coordinator:
    """The coordinator of a run that trains its next step at version `start`."""
    rollout = config.rollout
    return Coordinator(
        issuer,
        lag_rule(rollout),
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        step=start,
        order=rollout.order,
        # The stock keeps a pipeline's samples young; what the other modes wait for is the trainer's turn anyway.
        max_ready=rollout.ready_batches * rollout.prompts_per_step if rollout.mode == "pipeline" else None,
        straggler=rollout.straggler,
        straggler_timeout_s=rollout.straggler_timeout_s,
        smallest_group=bind_selection(config).smallest_group,
        priority=config.eval.priority,
        refuse=issuer.refuse,
        tools=bool(rollout.tools.use),
    )


def new_issuer(setup: Setup, extras: Mapping[str, Any]) -> GroupIssuer:
    """The source of prompts, where a checkpoint's `extras` left it."""
    config = setup.config
    issuer = GroupIssuer(
        prompt_stream(setup.pools, config.data),
        PassRates(retire_at=config.algorithm.no_positive_resampling),
        most_replaced=(config.algorithm.dynamic_sampling or 0) * config.rollout.prompts_per_step,
    )
    if extras:
        issuer.restore(extras["issuer"])
    return issuer


class Saver:
    """Checkpoints of the state together with the books."""

    def __init__(self, setup: Setup, issuer: GroupIssuer, store: CheckpointStore, log: RunLog):
        self._setup, self._issuer, self._store, self._log = setup, issuer, store, log

    def __call__(self, step: int, state: TrainState, counters: Mapping[str, Any]) -> None:
        extras = {"issuer": self._issuer.state(), "counters": dict(counters)}
        self._store.save(step, state, extras, self._setup.fingerprints)
        self._log.state("running", step=step, steps=self._setup.config.train.steps)


def shared_work(
    setup: Setup, base: Params | None, reference: Params | None, save: Saver, wire: WireForm | None
) -> SharedWork:
    """What every process of the trainer does of an RL run; the train step is compiled.

    `wire` is the form in which samplers in other processes take weights, None without any.
    """
    config, algorithm, how = setup.config, rl_algorithm(setup), setup.config.sampler
    shape = rl_shape(config, algorithm)
    probe = packed_shape(config, max(_PROBE_DOCUMENTS, config.eval.samples))

    def policy(trained: Params) -> Params:
        """Plain weights for the sampler, which knows no adapters; in its dtype, unless it makes int8 of them."""
        return merge(base, trained, config.adapters, "float32" if how.int8_weights else how.dtype)

    return SharedWork(
        train_step=build_train_step(
            setup,
            config.optimizer,
            algorithm,
            total_steps=config.train.steps,
            shape=shape,
            ema=config.train.ema,
            reference=reference,
            base=base,
        ),
        row_shape=shape,
        policy=policy,
        sent=lambda trained: wire.make(policy(trained)) if wire is not None else None,
        score=make_score(
            config.model,
            mesh=setup.trainer_mesh,
            temperature=config.eval.temperature or 1.0,
            head_chunk=config.train.head_chunk,
            lora=config.adapters,
            base=base,
        ),
        probe_shape=RowShape(1, probe.microbatches * probe.rows, probe.length),
        save=save,
    )


class OutletParams(NamedTuple):
    """One version for the sampler in this process and for those in others; None for who is not there."""

    here: Params | None
    elsewhere: Params | None


@dataclass(frozen=True)
class Outlets:
    """Where versions go: the board of the sampler in this process, the fleet of those in others; None for what is not
    there."""

    board: WeightBoard | None
    fleet: Fleet | None = None

    def publish(self, weights: PolicyWeights) -> None:
        """`weights.params` are OutletParams."""
        here, elsewhere = weights.params
        if self.board is not None and here is not None:
            self.board.publish(PolicyWeights(weights.version, here))
        if self.fleet is not None:
            self.fleet.publish(PolicyWeights(weights.version, elsewhere))


class Joined:
    """The parts of one RL run, joined; holds no logic of its own."""

    def __init__(
        self,
        setup: Setup,
        environment: SingleTurn,
        state: TrainState,
        work: SharedWork,
        lead: Lead,
        start: int,
        issuer: GroupIssuer,
        log: RunLog,
        progress: Progress,
        outlets: Outlets,
        give_up: Callable[[], bool] | None,
    ):
        config = setup.config
        self.setup, self.issuer, self.log, self.progress = setup, issuer, log, progress
        self.engine, self._work, self.lead, self._outlets = setup.engine, work, lead, outlets
        self._give_up = give_up
        drivers: list[Driver] = []
        if outlets.board is not None:
            scheduler = self._scheduler(work.policy(state.params), start)
            drivers.append(LocalSampler(scheduler, outlets.board, how_to_sample(config), slots=config.sampler.slots))
        if outlets.fleet is not None:
            drivers.append(outlets.fleet)
            outlets.publish(PolicyWeights(start, OutletParams(None, lead.weights(state.params))))
        coordinator, scorers = new_coordinator(config, issuer, start), config.rollout.reward_workers.groups_at_once
        self._tools = bound_tools(environment, config.rollout)
        self.worker = RolloutWorker(
            coordinator, environment, drivers, outlets, give_up, scorers=scorers, tools=self._tools
        )

    def _scheduler(self, params: Params, version: int) -> Scheduler:
        how = self.setup.config.sampler
        return Scheduler(
            self.engine,
            params,
            version=version,
            decode=self.setup.tokenizer.decode,
            refill=how.refill_slots,
            recompute_kv=how.recompute_kv,
        )

    def _to_samplers(self, trained: Params) -> OutletParams:
        """What every outlet is given of a version; in one process dispatched and not waited for."""
        outlets = self._outlets
        return OutletParams(
            self.engine.load_params(self._work.policy(trained)) if outlets.board is not None else None,
            self.lead.weights(trained) if outlets.fleet is not None else None,
        )

    def parts(self) -> Parts:
        config, algorithm, work = self.setup.config, rl_algorithm(self.setup), self._work
        sampling = (self.engine.mesh,) if self._outlets.board is not None else ()
        devices = (self.setup.trainer_mesh, self.setup.reward_mesh, *sampling)
        looks = int(algorithm.looks_back) + int(config.algorithm.kl.place != "none")
        return Parts(
            train_step=self.lead.train_step,
            select=partial(select, how=bind_selection(config)),
            row_shape=work.row_shape,
            learning_rate=lambda step: float(learning_rate(config.optimizer, step, total_steps=config.train.steps)),
            worker=self.worker,
            issuer=self.issuer,
            to_sampler=self._to_samplers,
            evaluate=self.evaluate,
            sample_records=self.sample_records,
            save=self.lead.save,
            log=self.log,
            compute=Compute(
                train_flops=lambda n: (
                    train_flops(config.model, n, config.adapters) + sample_flops(config.model, n * looks)
                ),
                sample_flops=partial(sample_flops, config.model),
                devices=len({device for mesh in devices for device in mesh.devices.flat}),
                trainers=tuple(self.setup.trainer_mesh.devices.flat),
                peak_flops=config.device.peak_flops or peak_flops(self.setup.trainer_mesh.devices.flat[0].device_kind),
            ),
            on_step=self.progress.step,
            on_evaluation=self.progress.evaluation,
        )

    def evaluate(self, version: int, params: Params) -> dict[str, Any]:
        """Held-out mean@n of one version: on an engine state of its own while training's sampler goes on, or by the
        samplers in other processes where this one has none."""
        config, tasks, environment = self.setup.config, self.setup.heldout_tasks, self.setup.environment
        if self._outlets.board is None:
            sample = partial(self.worker.exchange.sample_pinned, give_up=self._give_up)
            groups = evaluate_with(sample, version, tasks, environment, samples=config.eval.samples)
        else:
            how = how_to_sample(config)
            groups = evaluate(
                self._scheduler(self._work.policy(params), version),
                tasks,
                environment,
                samples=config.eval.samples,
                sampling=how.evaluation,
                seed=how.evaluation_seed,
                tools=self._tools,
            )
        episodes = [episode for group in groups for episode in group.episodes]
        probed = groups[: max(1, _PROBE_DOCUMENTS // config.eval.samples)]
        highest, mean = mismatch(probed, self.lead.score, params, self._work.probe_shape)
        return {
            "metric": f"mean@{config.eval.samples}",
            "value": pass_rate(groups),
            **by_source(groups),
            "prompts": len(groups),
            "samples": config.eval.samples,
            "truncation_rate": float(np.mean([e.completion.finish == "length" for e in episodes])),
            "head_dtype": config.model.head_dtype,
            "mismatch_max": highest,
            "mismatch_mean": mean,
        }

    def sample_records(self, version: int, groups: Sequence[EpisodeGroup]) -> list[dict[str, Any]]:
        return [
            {
                "step": version,
                "task_id": group.task.task_id,
                "prompt": group.task.prompt,
                "completion": self.setup.environment.transcript(group.episodes[0].completion),
                "answer": group.task.answer,
                "reward": group.episodes[0].reward.value,
                "reward_failed": group.episodes[0].reward.failed,
                "finish": group.episodes[0].completion.finish,
            }
            for group in groups[:_SAMPLES_KEPT]
        ]
