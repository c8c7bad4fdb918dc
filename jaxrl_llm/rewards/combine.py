"""Rewards made of rewards."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from jaxrl_llm.rewards.protocol import RewardFunction
from jaxrl_llm.types import PromptTask, Reward


def by_task(rewards: Mapping[str, RewardFunction]) -> RewardFunction:
    """Each task scored by the reward that it names."""

    def score(texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool]) -> list[Reward]:
        return rewards[task.reward](texts, task, finished=finished)

    return score


def weighted(answers: RewardFunction, weight: float, others: Sequence[tuple[RewardFunction, float]]) -> RewardFunction:
    """The weighted sum of rewards, with the parts of all.

    `answers` says what is correct whatever its weight. Where one of them failed the sum has failed, for its reason.
    """
    return partial(_sums, answers=answers, weight=weight, others=others)


def _sums(
    texts: Sequence[str],
    task: PromptTask,
    *,
    finished: Sequence[bool],
    answers: RewardFunction,
    weight: float,
    others: Sequence[tuple[RewardFunction, float]],
) -> list[Reward]:
    scored = [answers(texts, task, finished=finished)]
    scored += [score(texts, task, finished=finished) for score, _ in others]
    weights = [weight, *(w for _, w in others)]
    return [_sum(rewards, weights) for rewards in zip(*scored, strict=True)]


def _sum(rewards: Sequence[Reward], weights: Sequence[float]) -> Reward:
    parts = {name: value for reward in rewards for name, value in reward.parts.items()}
    for reward in rewards:
        if reward.failed is not None:
            return Reward(math.nan, parts, reward.failed)
    return Reward(sum(w * reward.value for w, reward in zip(weights, rewards, strict=True)), parts)
