"""From scored groups to one optimizer step's TrainBatch: filters, advantages, token weights, packing, the one shift."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.data.packing import first_fit, rows_needed
from jaxrl_llm.losses.advantages import Normalisation, centre, normalise, zero_variance
from jaxrl_llm.losses.aggregate import Aggregation, completion_weights
from jaxrl_llm.types import EpisodeGroup, TrainBatch


@dataclass(frozen=True)
class Document:
    """One prompt and completion about to be packed. The last four have the completion's length C."""

    prompt_T: np.ndarray
    completion_C: np.ndarray
    weights_C: np.ndarray  # token weights, 0 where nothing is trained
    advantages_C: np.ndarray
    logprobs_C: np.ndarray  # from the sampler


@dataclass(frozen=True)
class RowShape:
    """The fixed shape of a packed batch: [microbatches, rows, length]."""

    microbatches: int
    rows: int
    length: int


def row_shape(*, documents: int, longest: int, length: int, rows: int) -> RowShape:
    """The smallest shape that always holds `documents` documents of at most `longest` tokens."""
    return RowShape(-(-rows_needed(documents, longest, length) // rows), rows, length)


def pack(documents: Sequence[Document], shape: RowShape) -> TrainBatch:
    """Documents in rows, shifted once: every [M, B, T] field speaks about `targets`.

    A document of n tokens takes n - 1 places: its last token is nobody's input and its first is nobody's target.
    """
    size = (shape.microbatches * shape.rows, shape.length)
    ints = {name: np.zeros(size, np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    floats = {name: np.zeros(size, np.float32) for name in ("token_weights", "advantages", "behavior_logprobs")}
    lengths = [len(d.prompt_T) + len(d.completion_C) - 1 for d in documents]
    places = first_fit(lengths, shape.length)
    segments = np.zeros(size[0], np.int32)
    for document, length, (row, start) in zip(documents, lengths, places, strict=True):
        end = start + length
        segments[row] += 1
        ids = np.concatenate([document.prompt_T, document.completion_C])
        ints["tokens"][row, start:end] = ids[:-1]
        ints["targets"][row, start:end] = ids[1:]
        ints["positions"][row, start:end] = np.arange(length)
        ints["segment_ids"][row, start:end] = segments[row]
        sampled = slice(end - len(document.completion_C), end)
        floats["token_weights"][row, sampled] = document.weights_C
        floats["advantages"][row, sampled] = document.advantages_C
        floats["behavior_logprobs"][row, sampled] = document.logprobs_C
    used = max((row for row, _ in places), default=-1) + 1
    fields = {
        name: array.reshape(shape.microbatches, *(shape.rows, shape.length)) for name, array in (ints | floats).items()
    }
    return TrainBatch(**fields, microbatches=np.int32(-(-used // shape.rows)))


@dataclass(frozen=True)
class StepGroups:
    """What becomes of the groups of one step."""

    trained: list[EpisodeGroup]
    dropped: dict[int, str]
    documents: list[Document]


def select(
    groups: Sequence[EpisodeGroup],
    *,
    advantage: Normalisation,
    aggregation: Aggregation,
    zero_variance_filter: bool,
) -> StepGroups:
    """Advantages and token weights of one optimizer batch, worked out over all of its groups at once.

    A completion whose reward failed leaves its group; a group with fewer than two left is dropped.
    """
    if not groups:
        return StepGroups([], {}, [])
    size = max(len(group.episodes) for group in groups)
    rewards_PG, keep_PG = np.zeros((len(groups), size)), np.zeros((len(groups), size), bool)
    for p, group in enumerate(groups):
        for g, episode in enumerate(group.episodes):
            keep_PG[p, g] = episode.reward.failed is None
            rewards_PG[p, g] = episode.reward.value if keep_PG[p, g] else 0.0
    failed_P = keep_PG.sum(axis=1) < 2
    flat_P = zero_variance(rewards_PG, keep_PG) & ~failed_P & zero_variance_filter
    keep_PG &= ~(failed_P | flat_P)[:, None]
    advantages_PG = normalise(centre(rewards_PG, keep_PG), keep_PG, kind=advantage)

    places = [(p, g) for p in range(len(groups)) for g in range(len(groups[p].episodes)) if keep_PG[p, g]]
    episodes = [groups[p].episodes[g] for p, g in places]
    weights_N = completion_weights(
        np.array([episode.trainable_T.sum() for episode in episodes], int),
        np.array([p for p, _ in places], int),
        np.ones(len(episodes), bool),
        kind=aggregation,
    )
    documents = [
        Document(
            prompt_T=groups[p].task.tokens_T,
            completion_C=episode.completion.tokens_T,
            weights_C=np.where(episode.trainable_T, weight, 0.0),
            advantages_C=np.full(len(episode.trainable_T), advantages_PG[p, g]),
            logprobs_C=episode.completion.logprobs_T,
        )
        for (p, g), episode, weight in zip(places, episodes, weights_N, strict=True)
    ]
    reasons = dict.fromkeys(np.flatnonzero(failed_P), "reward_failed") | dict.fromkeys(
        np.flatnonzero(flat_P), "zero_variance"
    )
    return StepGroups(
        trained=[group for p, group in enumerate(groups) if p not in reasons],
        dropped={groups[p].group_id: reason for p, reason in reasons.items()},
        documents=documents,
    )


def supervised(prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]) -> list[Document]:
    """Given completions as documents of advantage 1, averaged over all their tokens."""
    weight = 1.0 / sum(len(completion) for completion in completions)
    return [
        Document(prompt, completion, *(np.full(len(completion), value) for value in (weight, 1.0, 0.0)))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
