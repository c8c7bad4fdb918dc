"""From scored groups to one optimizer step's TrainBatch: filters, advantages, token weights, packing, the one shift."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data.packing import first_fit, rows_needed
from jaxrl_llm.losses.advantages import zero_variance
from jaxrl_llm.types import EpisodeGroup, TrainBatch


@dataclass(frozen=True)
class Document:
    """One prompt and completion about to be packed. The arrays that end in _C have the completion's length C."""

    prompt_T: np.ndarray
    completion_C: np.ndarray
    weights_C: np.ndarray  # token weights, 0 where nothing is trained
    advantages_C: np.ndarray
    logprobs_C: np.ndarray  # from the sampler
    score: float = 0.0  # the completion's reward
    number: int = 0  # 1 + group * siblings + sibling within the update
    update: int = 0  # which of the step's updates trains it


@dataclass(frozen=True)
class RowShape:
    """The fixed shape of a packed batch: [microbatches, rows, length], and how many updates have one each."""

    microbatches: int
    rows: int
    length: int
    updates: int = 1


def row_shape(*, documents: int, longest: int, length: int, rows: int, updates: int = 1) -> RowShape:
    """The smallest shape that always holds `documents` documents of at most `longest` tokens in every update."""
    return RowShape(-(-rows_needed(documents, longest, length) // rows), rows, length, updates)


def pack(documents: Sequence[Document], shape: RowShape) -> TrainBatch:
    """Documents in rows, shifted once: every [M, B, T] field speaks about `targets`.

    A document of n tokens takes n - 1 places: its last token is nobody's input and its first is nobody's target.
    Several updates stand one behind the other on a first axis K.
    """
    if shape.updates == 1:
        return _pack_one(documents, shape)
    parts = [
        _pack_one([document for document in documents if document.update == update], shape)
        for update in range(shape.updates)
    ]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *parts)


def _pack_one(documents: Sequence[Document], shape: RowShape) -> TrainBatch:
    size = (shape.microbatches * shape.rows, shape.length)
    ints = {name: np.zeros(size, np.int32) for name in ("tokens", "targets", "positions", "segment_ids", "completions")}
    floats = {
        name: np.zeros(size, np.float32) for name in ("token_weights", "advantages", "behavior_logprobs", "scores")
    }
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
        floats["scores"][row, sampled] = document.score
        ints["completions"][row, sampled] = document.number
    used = max((row for row, _ in places), default=-1) + 1
    fields: dict[str, Any] = {
        name: array.reshape(shape.microbatches, shape.rows, shape.length) for name, array in (ints | floats).items()
    }
    fields["microbatches"] = np.int32(-(-used // shape.rows))
    return TrainBatch(**fields)


@dataclass(frozen=True)
class StepGroups:
    """What becomes of the groups of one step. `equal_groups` counts those whose rewards are all equal, kept or not."""

    trained: list[EpisodeGroup]
    dropped: dict[int, str]
    documents: list[Document]
    equal_groups: int


@dataclass(frozen=True)
class Selection:
    """How groups become documents, names already looked up.

    `advantages(rewards_PG, keep_PG) -> [P, G]`; `token_weights(lengths_N, prompt_N, keep_N) -> [N]` (see
    losses/aggregate.py). A group with fewer than `smallest_group` completions left is dropped.
    """

    advantages: Callable[[np.ndarray, np.ndarray], np.ndarray]
    token_weights: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    zero_variance_filter: bool
    overlong_filter: bool = False
    smallest_group: int = 2
    prompts_per_update: int | None = None


def select(groups: Sequence[EpisodeGroup], how: Selection) -> StepGroups:
    """Advantages and token weights of a step's groups, worked out over all groups of one update at once.

    The groups are dealt to the updates in order, `prompts_per_update` each (None: one update takes all).
    """
    share = how.prompts_per_update or max(1, len(groups))
    parts = [_select_one(groups[start : start + share], how) for start in range(0, len(groups), share)]
    return StepGroups(
        trained=[group for part in parts for group in part.trained],
        dropped={group_id: reason for part in parts for group_id, reason in part.dropped.items()},
        documents=[replace(d, update=update) for update, part in enumerate(parts) for d in part.documents],
        equal_groups=sum(part.equal_groups for part in parts),
    )


def _select_one(groups: Sequence[EpisodeGroup], how: Selection) -> StepGroups:
    """One update's groups. A completion whose reward failed, or that is too long for the filter, leaves its group."""
    size = max(len(group.episodes) for group in groups)
    rewards_PG, scored_PG = np.zeros((len(groups), size)), np.zeros((len(groups), size), bool)
    overlong_PG = np.zeros(scored_PG.shape, bool)
    for p, group in enumerate(groups):
        for g, episode in enumerate(group.episodes):
            scored_PG[p, g] = episode.reward.failed is None
            rewards_PG[p, g] = episode.reward.value if scored_PG[p, g] else 0.0
            overlong_PG[p, g] = how.overlong_filter and episode.completion.finish == "length"
    keep_PG = scored_PG & ~overlong_PG
    failed_P = scored_PG.sum(axis=1) < how.smallest_group
    overlong_P = (keep_PG.sum(axis=1) < how.smallest_group) & ~failed_P
    equal_P = zero_variance(rewards_PG, keep_PG) & ~failed_P & ~overlong_P
    dropped = {"reward_failed": failed_P, "overlong": overlong_P}
    dropped |= {"zero_variance": equal_P} if how.zero_variance_filter else {}
    reasons = {int(p): reason for reason, where_P in dropped.items() for p in np.flatnonzero(where_P)}
    keep_PG &= ~np.isin(np.arange(len(groups)), list(reasons))[:, None]
    advantages_PG = how.advantages(rewards_PG, keep_PG)

    places = [(p, g) for p in range(len(groups)) for g in range(len(groups[p].episodes)) if keep_PG[p, g]]
    episodes = [groups[p].episodes[g] for p, g in places]
    weights_N = how.token_weights(
        np.array([episode.trainable_T.sum() for episode in episodes], int),
        np.array([p for p, _ in places], int),
        np.ones(len(episodes), bool),
    )
    documents = [
        Document(
            prompt_T=groups[p].task.tokens_T,
            completion_C=episode.completion.tokens_T,
            weights_C=np.where(episode.trainable_T, weight, 0.0),
            advantages_C=np.full(len(episode.trainable_T), advantages_PG[p, g]),
            logprobs_C=episode.completion.logprobs_T,
            score=rewards_PG[p, g],
            number=1 + p * size + g,
        )
        for (p, g), episode, weight in zip(places, episodes, weights_N, strict=True)
    ]
    return StepGroups(
        trained=[group for p, group in enumerate(groups) if p not in reasons],
        dropped={groups[p].group_id: reason for p, reason in reasons.items()},
        documents=documents,
        equal_groups=int(equal_P.sum()),
    )


def supervised(prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]) -> list[Document]:
    """Given completions as documents of advantage 1, averaged over all their tokens."""
    weight = 1.0 / sum(len(completion) for completion in completions)
    documents = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ones = np.ones(len(completion))
        documents.append(Document(prompt, completion, weights_C=weight * ones, advantages_C=ones, logprobs_C=0 * ones))
    return documents
