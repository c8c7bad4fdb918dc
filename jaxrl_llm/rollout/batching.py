"""From scored groups to the documents of one optimizer step: filters, advantages, token weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_llm.losses.advantages import zero_variance
from jaxrl_llm.rollout.rows import Document
from jaxrl_llm.types import EpisodeGroup


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
    `siblings` is how many completions a group has where no straggler left it short (None: as many as the largest).
    """

    advantages: Callable[[np.ndarray, np.ndarray], np.ndarray]
    token_weights: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    zero_variance_filter: bool
    overlong_filter: bool = False
    smallest_group: int = 2
    siblings: int | None = None
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
    size = how.siblings or max(len(group.episodes) for group in groups)
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
