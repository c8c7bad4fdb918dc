"""Measures what steps and tokens of a configuration cost on this machine, as `jaxrl simulate --costs` reads it.

python benchmarks/pipeline/costs.py configs/quickstart.yaml --out costs.json
"""

import argparse
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jax
import numpy as np

from jaxrl_llm.cli.algorithm import bind_selection
from jaxrl_llm.cli.assemble import Setup, assemble
from jaxrl_llm.cli.devices import configure_jax
from jaxrl_llm.cli.join import build_train_step, how_to_sample, rl_algorithm, rl_shape
from jaxrl_llm.config import load
from jaxrl_llm.pipeline.planner import Costs
from jaxrl_llm.rollout.batching import select
from jaxrl_llm.rollout.rows import pack
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.train.state import random_state, state_from_params
from jaxrl_llm.types import EpisodeGroup, Params, SampleRequest


def seconds(do: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` calls, the first one left out."""
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        do()
        times.append(time.perf_counter() - begun)
    return median(times[1:])


class Sampling:
    """Batches of whole groups through a scheduler of the configuration."""

    def __init__(self, setup: Setup, params: Params):
        self.setup, self.how = setup, how_to_sample(setup.config)
        self.scheduler = Scheduler(setup.engine, params, refill=setup.config.sampler.refill_slots)
        self._stream = 0

    def batch(self, prompts: int) -> list[EpisodeGroup]:
        config, groups = self.setup.config, []
        asked: dict[int, tuple[int, int]] = {}
        for _ in range(prompts):
            task = self.setup.train_tasks[self._stream % len(self.setup.train_tasks)]
            requests = [
                SampleRequest(task.tokens_T, self.how.training, config.seed, self._stream, sibling)
                for sibling in range(config.rollout.group_size)
            ]
            asked |= {id: (len(groups), n) for n, id in enumerate(self.scheduler.submit(requests))}
            groups.append((self._stream, task, {}))
            self._stream += 1
        for id, completion in self.scheduler.drain():
            group, sibling = asked[id]
            groups[group][2][sibling] = completion
        return [
            EpisodeGroup(
                stream, task, tuple(self.setup.environment.episodes(task, [found[n] for n in range(len(found))]))
            )
            for stream, task, found in groups
        ]


def measure(setup: Setup, params: Params | None, *, repeats: int = 10) -> Costs:
    """The costs. `params` are a policy's weights (None: random)."""
    config = setup.config
    algorithm = rl_algorithm(setup)
    optimizer = make_optimizer(config.optimizer, total_steps=config.train.steps)
    how = {"mesh": setup.trainer_mesh, "lora": config.adapters}
    state = (
        random_state(config.model, optimizer, seed=config.seed, **how)
        if params is None
        else state_from_params(config.model, optimizer, params=params, **how)
    )
    shape = rl_shape(config, algorithm)
    step = build_train_step(setup, config.optimizer, algorithm, total_steps=config.train.steps, shape=shape)
    sampling = Sampling(setup, state.params)
    prompts, decode_steps = config.rollout.prompts_per_step, config.sampler.decode_steps

    groups = [group for _ in range(3) for group in sampling.batch(prompts)]
    lengths = [len(e.completion.tokens_T) for group in groups for e in group.episodes]

    def sampled(count: int) -> tuple[float, float, float, float]:
        """(wall, busy, seconds of a decode step, mean number of sequences), over `repeats` batches."""
        before, begun = sampling.scheduler.statistics, time.perf_counter()
        for _ in range(repeats):
            sampling.batch(count)
        wall, now = time.perf_counter() - begun, sampling.scheduler.statistics
        busy, dispatches = now.busy_s - before.busy_s, now.dispatches - before.dispatches
        running = min(config.sampler.slots, count * config.rollout.group_size)
        return wall, busy, busy / dispatches / decode_steps, running

    sampled(1)
    wall, busy, full_s, many = sampled(prompts)
    _, _, single_s, few = sampled(1)
    sequence_s = max(0.0, (full_s - single_s) / (many - few)) if many > few else 0.0

    # What a step on every group takes; how many groups have nothing to compare is counted below.
    chosen = select(groups[:prompts], dataclasses.replace(bind_selection(config), zero_variance_filter=False))
    half = [d for d in chosen.documents if d.number % 2]
    sizes = [sum(len(d.prompt_T) + len(d.completion_C) for d in docs) for docs in (chosen.documents, half)]

    def train(docs):
        nonlocal state
        state, metrics = step(state, pack(docs, shape))
        jax.block_until_ready(metrics)

    whole_s, half_s = seconds(lambda: train(chosen.documents), repeats), seconds(lambda: train(half), repeats)
    token_s = max(0.0, (whole_s - half_s) / max(1, sizes[0] - sizes[1]))
    chips = setup.trainer_mesh.size

    # Both at once, for what sharing a processor costs.
    stop, batches = threading.Event(), []

    def sample_on() -> None:
        while not stop.is_set():
            begun = time.perf_counter()
            sampling.batch(prompts)
            batches.append(time.perf_counter() - begun)

    thread = threading.Thread(target=sample_on)
    thread.start()
    together_s = seconds(lambda: train(chosen.documents), max(repeats, 20))
    stop.set()
    thread.join()
    slow_train, slow_sample = together_s / whole_s, median(batches) / (wall / repeats)

    unfiltered = select(groups, bind_selection(config))
    task, completions = groups[0].task, [e.completion for e in groups[0].episodes]
    return Costs(
        train_token_chip_s=token_s * chips,
        train_step_s=max(0.0, whole_s - token_s * sizes[0]),
        host_s=seconds(lambda: select(groups[:prompts], bind_selection(config)), repeats),
        decode_step_s=max(1e-9, full_s - sequence_s * many),
        decode_sequence_s=sequence_s,
        prefill_s=max(0.0, wall - busy) / (repeats * prompts),
        score_s=seconds(lambda: setup.environment.episodes(task, completions), repeats),
        push_s=seconds(lambda: jax.block_until_ready(setup.engine.load_params(state.params)), repeats),
        overlap_train=max(1.0, slow_train),
        overlap_sample=max(1.0, slow_sample),
        sampler_chips=setup.engine.mesh.size,
        prompt_tokens=float(np.mean([len(group.task.tokens_T) for group in groups])),
        trained_share=len(unfiltered.trained) / len(groups),
        lengths=tuple(float(n) for n in lengths),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("costs.json"))
    options = parser.parse_args()
    config = load(options.config, options.overrides)
    configure_jax(config.device)
    costs = measure(assemble(config), None)
    options.out.write_text(json.dumps(dataclasses.asdict(costs), indent=1) + "\n")
    shown = {name: value for name, value in dataclasses.asdict(costs).items() if name != "lengths"}
    print(json.dumps(shown | {"mean_length": sum(costs.lengths) / len(costs.lengths)}, indent=1))


if __name__ == "__main__":
    main()
