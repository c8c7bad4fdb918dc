"""Held-out evaluation pinned to one version, and the sampler-trainer mismatch measured on its completions."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jax import Array

from jaxrl_llm.rollout.local import Scheduler
from jaxrl_llm.rollout.play import play
from jaxrl_llm.rollout.rows import Document, RowShape, pack
from jaxrl_llm.rollout.turns import Tools
from jaxrl_llm.rollout.worker import Environment
from jaxrl_llm.types import Completion, EpisodeGroup, Params, PromptTask, SampleRequest, Sampling


def evaluate(
    scheduler: Scheduler,
    tasks: Sequence[PromptTask],
    environment: Environment,
    *,
    samples: int,
    sampling: Sampling,
    seed: int,
    tools: Tools | None = None,
) -> list[EpisodeGroup]:
    """`samples` scored completions of every prompt under exactly the weights that the scheduler holds.

    The scheduler must be this function's alone. Random streams are numbered by (version, prompt), so two evaluations
    of one run never share them and each can be replayed.
    """
    first = first_stream(scheduler.version, len(tasks))
    requests = [
        SampleRequest(task.tokens_T, sampling, seed, first + index, sibling)
        for index, task in enumerate(tasks)
        for sibling in range(samples)
    ]
    completions = play(scheduler, requests, [task for task in tasks for _ in range(samples)], tools)
    each = [[completions[index * samples + sibling] for sibling in range(samples)] for index in range(len(tasks))]
    return _scored(tasks, each, environment)


def evaluate_with(
    sample_pinned: Callable[..., list[list[Completion]]],
    version: int,
    tasks: Sequence[PromptTask],
    environment: Environment,
    *,
    samples: int,
) -> list[EpisodeGroup]:
    """`evaluate` by samplers that train beside it, through rollout.exchange.Exchange.sample_pinned: the same tokens.

    How they sample, and with which seed, is their configuration's matter.
    """
    first = first_stream(version, len(tasks))
    return _scored(tasks, sample_pinned(version, tasks, samples, first_stream=first), environment)


def first_stream(version: int, prompts: int) -> int:
    """The random stream of the first of `prompts` prompts in an evaluation of `version`; the others' follow."""
    return version * prompts


def _scored(
    tasks: Sequence[PromptTask], completions: Sequence[Sequence[Completion]], environment: Environment
) -> list[EpisodeGroup]:
    return [
        EpisodeGroup(index, task, tuple(environment.episodes(task, each)))
        for index, (task, each) in enumerate(zip(tasks, completions, strict=True))
    ]


def mismatch(
    groups: Sequence[EpisodeGroup], score: Callable[..., Array | np.ndarray], params: Params, shape: RowShape
) -> tuple[float, float]:
    """(maximum, mean) of |trainer - sampler| log-probability over the sampled tokens of `groups`, in nats; not over
    those that the system put there.

    `params` are the trainer's weights of the version that sampled them, so what is left is numerics alone. `shape`
    must have one microbatch and room for the documents.
    """
    documents = [
        Document(group.task.tokens_T, c.tokens_T, (~c.forced_T).astype(float), np.ones(len(c.tokens_T)), c.logprobs_T)
        for group in groups
        for c in (episode.completion for episode in group.episodes)
    ]
    batch = pack(documents, replace(shape, share_prompts=False))
    trainer = score(params, batch.tokens[0], batch.targets[0], batch.positions[0], batch.segment_ids[0])
    difference = np.abs(np.asarray(trainer) - batch.behavior_logprobs[0])[batch.token_weights[0] > 0]
    return float(difference.max()), float(difference.mean())
