"""What one step's groups say about the policy and about staleness; plain numbers for the run's records."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.types import EpisodeGroup


def measure_lag(groups: Sequence[EpisodeGroup], *, version: int, bound: int) -> dict[str, Any]:
    """Lag of every sampled token behind the `version` it trains: maximum, mean and histogram (index = lag).

    Raises RuntimeError if a token is newer than the trainer or older than the bound: the slots were miscounted.
    """
    versions = [e.completion.versions_T for group in groups for e in group.episodes]
    lags = version - np.concatenate(versions)
    if lags.min() < 0 or lags.max() > bound:
        raise RuntimeError(f"tokens trained at version {version} have lags {lags.min()}..{lags.max()}, bound {bound}")
    return {
        "lag_max": int(lags.max()),
        "lag_mean": float(lags.mean()),
        "lag_histogram": np.bincount(lags, minlength=bound + 1).tolist(),
        "lag_bound": bound,
    }


def describe_groups(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Means over the completions of a step; a completion without a reward counts in none about rewards."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [episode.reward for episode in episodes if episode.reward.failed is None]
    return {
        "reward_mean": float(np.mean([r.value for r in rewards])) if rewards else float("nan"),
        "pass_rate": pass_rate(groups),
        "completion_tokens_mean": float(np.mean([len(e.completion.tokens_T) for e in episodes])),
        "truncation_rate": float(np.mean([e.completion.finish == "length" for e in episodes])),
        "interruption_rate": float(np.mean([e.completion.forced_T.any() for e in episodes])),
        "reward_failures": float(len(episodes) - len(rewards)),
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
    """(prompt tokens prefilled once per group, tokens sampled)."""
    prompts = sum(len(group.task.tokens_T) for group in groups)
    return prompts, sum(len(e.completion.tokens_T) for group in groups for e in group.episodes)
