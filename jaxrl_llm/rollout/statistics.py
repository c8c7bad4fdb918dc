"""What one step's groups say about the policy and about staleness; plain numbers for the run's records."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.types import Completion, EpisodeGroup

_REASONS, _REASON = 8, 160  # how many reasons are told apart in a record, and by how many characters


def measure_lag(groups: Sequence[EpisodeGroup], *, version: int, bound: int) -> dict[str, Any]:
    """Lag of every sampled token behind the `version` it trains: maximum, mean and histogram (index = lag), and the
    mean over groups of the lag of a group's oldest token.

    Raises RuntimeError if a token is newer than the trainer or older than the bound: the slots were miscounted.
    """
    by_group = [np.concatenate([e.completion.versions_T for e in group.episodes]) for group in groups]
    lags = version - np.concatenate(by_group)
    if lags.min() < 0 or lags.max() > bound:
        raise RuntimeError(f"tokens trained at version {version} have lags {lags.min()}..{lags.max()}, bound {bound}")
    return {
        "lag_max": int(lags.max()),
        "lag_mean": float(lags.mean()),
        "lag_group_mean": float(np.mean([version - versions.min() for versions in by_group])),
        "lag_histogram": np.bincount(lags, minlength=bound + 1).tolist(),
        "lag_bound": bound,
    }


def age_by_length(groups: Sequence[EpisodeGroup], ages_s: Mapping[int, float]) -> list[dict[str, float]]:
    """How old rollouts are when they are taken, by length: whether long completions have to wait for their turn.

    One entry for every power of two that is the least not below some completion's length in tokens: how many there are
    and their mean and greatest age in seconds since their group was issued (`ages_s`, by group id).
    """
    ages: dict[int, list[float]] = {}
    for group in groups:
        for episode in group.episodes:
            ages.setdefault(1 << (max(1, len(episode.completion.tokens_T)) - 1).bit_length(), []).append(
                ages_s[group.group_id]
            )
    return [
        {"tokens": tokens, "completions": len(found), "mean_s": float(np.mean(found)), "max_s": max(found)}
        for tokens, found in sorted(ages.items())
    ]


def describe_groups(groups: Sequence[EpisodeGroup]) -> dict[str, Any]:
    """Means over the completions of a step; a completion without a reward counts in none about rewards.

    `reward_part_NAME` is the mean of the reward's part NAME over the completions that have it;
    `reward_failures_by_reason` counts the most frequent reasons.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    completions = [episode.completion for episode in episodes]
    rewards = [episode.reward for episode in episodes if episode.reward.failed is None]
    reasons = Counter(episode.reward.failed[:_REASON] for episode in episodes if episode.reward.failed is not None)
    names = sorted({name for reward in rewards for name in reward.parts})
    return {
        **{
            f"reward_part_{name}": float(np.mean([r.parts[name] for r in rewards if name in r.parts])) for name in names
        },
        "reward_mean": float(np.mean([r.value for r in rewards])) if rewards else float("nan"),
        "pass_rate": pass_rate(groups),
        "completion_tokens_mean": float(np.mean([len(c.tokens_T) for c in completions])),
        "truncation_rate": float(np.mean([c.finish == "length" for c in completions])),
        "interruption_rate": float(np.mean([not c.turns and bool(c.forced_T.any()) for c in completions])),
        "tool_calls_mean": float(np.mean([len(c.turns) for c in completions])),
        "reward_failures": float(len(episodes) - len(rewards)),
        "reward_failures_by_reason": dict(reasons.most_common(_REASONS)),
    }


def pass_rate(groups: Sequence[EpisodeGroup]) -> float:
    """Share of right completions, in [0, 1] whatever the rewards' scale; NaN if nothing was scored."""
    right = [e.reward.parts["correct"] > 0 for g in groups for e in g.episodes if e.reward.failed is None]
    return float(np.mean(right)) if right else float("nan")


def by_source(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """ "value/NAME" -> pass rate of the prompts of each source; empty where there is but one."""
    names = dict.fromkeys(group.task.source for group in groups)
    if len(names) < 2:
        return {}
    return {f"value/{name}": pass_rate([group for group in groups if group.task.source == name]) for name in names}


def sampled_tokens(groups: Sequence[EpisodeGroup]) -> tuple[int, int]:
    """(tokens prefilled: each group's prompt once, and what every later turn of a completion begins with; tokens
    decoded: all others)."""
    prefilled = decoded = 0
    for group in groups:
        prompt = len(group.task.tokens_T)
        prefilled += prompt
        for completion in (episode.completion for episode in group.episodes):
            prefilled += sum(prompt + start for start in completion.turns)
            decoded += _decoded(completion)
    return prefilled, decoded


def _decoded(completion: Completion) -> int:
    answers = int(completion.forced_T.sum()) if completion.turns else 0  # an interruption's phrase is decoded
    return len(completion.tokens_T) - answers
