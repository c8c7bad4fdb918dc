"""Advantages of the siblings of a prompt. Arrays are [P, G]; numpy in gives numpy out, jax in gives jax out.

`keep_PG` (bool) marks the siblings that exist: a group may be ragged. Whatever stands at a dropped place is not read,
and its advantage is 0.
"""

from typing import Any, Literal, get_args

Normalisation = Literal["none", "prompt_std", "batch_std", "global"]

EPS = 1e-6
"""Added to every standard deviation."""


def _keep(xp: Any, rewards_PG: Any, keep_PG: Any | None) -> Any:
    return xp.ones(rewards_PG.shape, bool) if keep_PG is None else xp.asarray(keep_PG, dtype=bool)


def zero_variance(rewards_PG: Any, keep_PG: Any | None = None) -> Any:
    """Which groups have nothing to compare: bool [P], True where all kept rewards are exactly equal (or none is kept).

    Exact equality, never a threshold on the standard deviation: .1, .1, .1 has a standard deviation of 1e-17.
    """
    xp = rewards_PG.__array_namespace__()
    keep_PG = _keep(xp, rewards_PG, keep_PG)
    highest_P = xp.where(keep_PG, rewards_PG, -xp.inf).max(axis=1)
    lowest_P = xp.where(keep_PG, rewards_PG, xp.inf).min(axis=1)
    return highest_P <= lowest_P


def uncentred(rewards_PG: Any, keep_PG: Any | None = None) -> Any:
    """The rewards themselves, no baseline (REINFORCE; REINFORCE++ centres over the batch instead)."""
    xp = rewards_PG.__array_namespace__()
    return xp.where(_keep(xp, rewards_PG, keep_PG), rewards_PG, 0.0)


def centre(rewards_PG: Any, keep_PG: Any | None = None) -> Any:
    """Reward minus the mean of the group's kept rewards, exactly 0 in a zero-variance group."""
    xp = rewards_PG.__array_namespace__()
    keep_PG = _keep(xp, rewards_PG, keep_PG)
    rewards_PG = xp.where(keep_PG, rewards_PG, 0.0)
    mean_P1 = rewards_PG.sum(axis=1, keepdims=True) / xp.maximum(keep_PG.sum(axis=1, keepdims=True), 1)
    # The mean of equal non-dyadic rewards is off by a rounding, which a tiny standard deviation would blow up.
    varies_P1 = ~zero_variance(rewards_PG, keep_PG)[:, None]
    return xp.where(keep_PG & varies_P1, rewards_PG - mean_P1, 0.0)


def leave_one_out(rewards_PG: Any, keep_PG: Any | None = None) -> Any:
    """Reward minus the mean of the *other* kept rewards of the group: G/(G-1) (r - mean). RLOO, arXiv:2402.14740.

    A lone sibling has nobody to be compared with and gets 0.
    """
    xp = rewards_PG.__array_namespace__()
    keep_PG = _keep(xp, rewards_PG, keep_PG)
    count_P1 = keep_PG.sum(axis=1, keepdims=True)
    return centre(rewards_PG, keep_PG) * (count_P1 / xp.maximum(count_P1 - 1, 1))


def normalise(
    advantages_PG: Any,
    keep_PG: Any | None = None,
    *,
    kind: Normalisation = "batch_std",
    ddof: int | None = None,
    eps: float = EPS,
) -> Any:
    """Scale advantages. `keep_PG` must already exclude the groups a zero-variance filter drops.

    - none: as they are (Dr. GRPO)
    - prompt_std: divided by the group's standard deviation (GRPO)
    - batch_std: divided by the standard deviation of all kept advantages, mean not subtracted (ScaleRL)
    - global: mean of all kept advantages subtracted, then divided by that standard deviation (REINFORCE++, Magistral)

    `ddof` is what the deviation takes off its count; None is the kind's own: 1 for prompt_std, else 0.
    Raises ValueError on an unknown kind.
    """
    if kind not in get_args(Normalisation):
        raise ValueError(f"advantage normalisation {kind!r} is unknown; choose {', '.join(get_args(Normalisation))}")
    xp = advantages_PG.__array_namespace__()
    keep_PG = _keep(xp, advantages_PG, keep_PG)
    advantages_PG = xp.where(keep_PG, advantages_PG, 0.0)
    if kind == "none":
        return advantages_PG
    by_prompt = kind == "prompt_std"
    ddof = int(by_prompt) if ddof is None else ddof

    def total(x: Any) -> Any:
        return x.sum(axis=1 if by_prompt else None, keepdims=True)

    count = total(keep_PG)
    mean = total(advantages_PG) / xp.maximum(count, 1)
    squares = total(xp.where(keep_PG, (advantages_PG - mean) ** 2, 0.0))
    std = xp.sqrt(squares / xp.maximum(count - ddof, 1))
    shift = mean if kind == "global" else 0.0
    return xp.where(keep_PG, (advantages_PG - shift) / (std + eps), 0.0)
