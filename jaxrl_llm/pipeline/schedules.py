"""Random schedules: a small run with random sizes, delays and faults, everything drawn from one seed."""

import random
from collections.abc import Sequence
from functools import partial
from typing import get_args

from jaxrl_llm.losses.advantages import centre, normalise
from jaxrl_llm.losses.aggregate import completion_weights
from jaxrl_llm.pipeline.simulation import Books, RunSpec, SamplerSpec, Simulation
from jaxrl_llm.rollout.batching import Selection
from jaxrl_llm.rollout.coordinator import Coordinator, Order, Priority, Straggler
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.lag import LagRule, Mode
from jaxrl_llm.rollout.rows import RowShape

_MAX_EVENTS = 5_000
_LONGEST = 6  # tokens of a turn
_TURNS = 3


class FaultyNetwork:
    """Everything takes a random time, so that messages overtake each other; some come twice. With `loses`, work and
    answers may be lost, and so may be what a sampler says about its weights. Some transfers of weights break off."""

    def __init__(self, rng: random.Random, *, loses: bool):
        self._rng = rng
        self._slow = rng.choice((0.01, 0.1, 1.0))
        self._twice = rng.choice((0.0, 0.1, 0.3))
        self._lost = rng.choice((0.0, 0.02, 0.1)) if loses else 0.0
        self._lost_holds = rng.choice((0.0, 0.2))
        self._push = self._slow * rng.choice((2, 2, 30))
        self._cut = rng.choice((0.0, 0.1, 0.4))
        self._refused = rng.choice((0.0, 0.0, 0.05))

    def deliveries(self, kind: str) -> Sequence[float]:
        lost = self._lost_holds if kind == "holds" else self._lost
        if self._rng.random() < lost:
            return ()
        copies = 2 if self._rng.random() < self._twice and kind in ("reply", "holds", "heard", "cancel") else 1
        return [self._rng.expovariate(1 / self._slow) for _ in range(copies)]

    def push(self) -> tuple[float, bool]:
        return self._rng.expovariate(1 / self._push), self._rng.random() >= self._cut

    def refuses(self) -> bool:
        return self._rng.random() < self._refused


def selection(group_size: int) -> Selection:
    """ScaleRL's, on numbers alone; groups of one have nothing to compare."""
    return Selection(
        advantages=lambda rewards, keep: normalise(centre(rewards, keep), keep, kind="batch_std"),
        token_weights=partial(completion_weights, kind="prompt"),
        zero_variance_filter=group_size > 1,
        smallest_group=min(2, group_size),
        siblings=group_size,
    )


def random_simulation(seed: int) -> tuple[Simulation, "Disturber"]:
    """The run of this seed, and what disturbs it after each event."""
    rng = random.Random(seed)
    modes: tuple[Mode, ...] = ("sync", "ppo_off_policy", "pipeline", "pipeline")
    mode = rng.choice(modes)
    k = rng.randint(1, 3) if mode == "ppo_off_policy" else rng.randint(0, 3)
    per_step, group_size = rng.randint(1, 3), rng.randint(2, 3)
    straggler = rng.choice(get_args(Straggler))
    timeout = rng.choice((None, 30.0, 60.0))
    order = rng.choice(get_args(Order))
    max_ready = rng.choice((None, per_step, 2 * per_step)) if mode == "pipeline" else None
    priority = rng.choice(get_args(Priority))
    turns = rng.choice((1, 1, 2, _TURNS))

    def coordinator(issuer: GroupIssuer, step: int) -> Coordinator:
        return Coordinator(
            issuer,
            LagRule(mode, k),
            prompts_per_step=per_step,
            group_size=group_size,
            step=step,
            order=order,
            max_ready=max_ready,
            straggler=straggler,
            straggler_timeout_s=timeout,
            priority=priority,
            tools=turns > 1,
            back_off_s=0.2,
            longest_back_off_s=5.0,
        )

    spread = rng.choice((1, 3, _LONGEST))

    def sampler() -> SamplerSpec:
        each_s = rng.choice((0.02, 0.2, 1.0))
        return SamplerSpec(
            slots=rng.randint(1, 6),
            chunk=rng.randint(1, 2),
            step_s=lambda _: rng.uniform(0.5, 1.5) * each_s,
            prefill_s=0.01,
        )

    samplers = [sampler() for _ in range(rng.randint(1, 3))]
    train_s = rng.choice((0.05, 1.0, 5.0))
    steps = rng.randint(3, 6)
    spec = RunSpec(
        steps=steps,
        prompts_per_step=per_step,
        group_size=group_size,
        coordinator=coordinator,
        samplers=samplers,
        length=lambda stream, sibling: 1 + (7919 * (stream + 3 * sibling) + seed) % spread,
        reward=lambda group_id, sibling: float((group_id + sibling * (group_id % 3)) % 2),
        train_s=lambda tokens, documents: rng.uniform(0.5, 1.5) * train_s,
        selection=selection(group_size),
        shape=RowShape(per_step * group_size, 1, _TURNS * (_LONGEST + 1)),
        score_s=rng.choice((0.0, 0.1, 1.0)),
        evaluate_every=rng.choice((0, 0, 2)),
        evaluate_prompts=rng.randint(1, 2),
        checkpoint_every=rng.randint(1, 3),
        heartbeat_s=15.0,
        turns=lambda stream, sibling: 1 + (stream + 3 * sibling + seed) % turns,
        tool_s=rng.choice((0.0, 0.1, 1.0, 10.0)),
    )
    simulation = Simulation(spec, FaultyNetwork(rng, loses=timeout is not None))
    return simulation, Disturber(simulation, rng)


class Disturber:
    """Kills, stops and restarts, at random moments; less and less, so that every run can end."""

    def __init__(self, simulation: Simulation, rng: random.Random):
        self._simulation, self._rng = simulation, rng
        self._rate = rng.choice((0.0, 0.005, 0.03))
        self._left = rng.randint(0, 6)
        self.done: list[str] = []

    def __call__(self) -> None:
        if not self._left or self._rng.random() >= self._rate:
            return
        self._left -= 1
        rng, simulation = self._rng, self._simulation
        what = rng.choice(("kill", "kill", "stop", "trainer"))
        self.done.append(what)
        if what == "trainer":
            simulation.crash_trainer(rng.uniform(0, 5))
        elif what == "kill":
            rng.choice(simulation.hosts).crash(rng.uniform(0, 2), rng.uniform(0, 10))
        else:
            rng.choice(simulation.hosts).stop(rng.uniform(0, 100))


def run_schedule(seed: int) -> Books:
    """Run the schedule of this seed to its end. Raises BrokenRuleError, or what a rule of the real code raises."""
    simulation, disturber = random_simulation(seed)
    return simulation.run(max_events=_MAX_EVENTS, disturb=disturber)
