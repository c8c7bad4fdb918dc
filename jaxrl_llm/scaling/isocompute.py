"""IsoCompute: how a sampling budget C = B_p n M is best split into prompts B_p, rollouts n per prompt and steps M.

A run's records (points whose bucket of reward exceeds all earlier ones) are fitted with the sigmoid for each (B_p, n);
the frontier is the upper envelope over n, n*(C) its argmax, and log2 n* = L / (1 + exp(-k (log10 C - c0))) + b.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jaxrl_llm.scaling.laws import namespace
from jaxrl_llm.types import UserError


class OptimalRollouts(NamedTuple):
    """Constants of the n*(C) law."""

    L: float
    k: float
    c0: float
    b: float


# Published for easy problems at B_p = 32; C in rollouts or in tokens.
PUBLISHED = {"rollouts": OptimalRollouts(6.09, 4.75, 5.84, 2.73), "tokens": OptimalRollouts(6.62, 3.47, 9.18, 2.64)}
SATURATION = {"easy": 512, "hard": 128}
PROMPTS_GRID = tuple(2**power for power in range(5, 11))
ROLLOUTS_GRID = tuple(2**power for power in range(3, 12))


def log2_rollouts(C: Any, L: Any, k: Any, c0: Any, b: Any) -> Any:
    """log2 n* at budget C."""
    xp = namespace(C, L, k, c0, b)
    expit = jax.nn.sigmoid if xp is jnp else scipy.special.expit
    return L * expit(k * (xp.log10(C) - c0)) + b


def budget_of_rollouts(log2_n: Any, L: Any, k: Any, c0: Any, b: Any) -> Any:
    """The budget C at which log2 n* is `log2_n`; nan outside (b, b + L), which the law never reaches."""
    share = np.asarray((log2_n - b) / L, np.float64)
    inside = (share > 0) & (share < 1)
    logit = scipy.special.logit(np.where(inside, share, 0.5))
    return np.where(inside, 10.0 ** (c0 + logit / k), np.nan)


def steps(C: Any, prompts: Any, rollouts: Any) -> Any:
    """M = C / (B_p n)."""
    return C / (prompts * rollouts)


def bucketed(reward: Any, width: float) -> np.ndarray:
    """The bucket of each reward: floor(reward / width), [N] int64. A reward on an edge belongs to the bucket above."""
    if not width > 0:
        raise UserError(f"a bucket of width {width:g} holds nothing; give a positive width in the unit of the reward")
    # A reward such as .3 at width .1 divides to 2.999...96: the edge is taken to a part in 1e9.
    return np.floor(np.asarray(reward, np.float64) / width + 1e-9).astype(np.int64)


def record_points(reward: Any, width: float) -> np.ndarray:
    """Which points [N] bool are record-breaking: their bucket exceeds every earlier one (the first point is one)."""
    buckets = bucketed(reward, width)
    earlier = (
        np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(buckets)[:-1]]) if len(buckets) else buckets
    )
    return buckets > earlier


class Frontier(NamedTuple):
    """The upper envelope over n at each budget, all [M]: the reward and the n that gives it."""

    C: np.ndarray
    reward: np.ndarray
    rollouts: np.ndarray


def frontier(C: Any, curves: Mapping[int, Any], reach: Mapping[int, tuple[float, float]] | None = None) -> Frontier:
    """The best fitted reward over n at budgets `C` [M], and its n; ties go to the smaller n.

    `curves` maps n to a function of C, for example the `predict` of its fit. With `reach`, n -> (least, greatest)
    budget of its own points, a curve counts only there; UserError where no curve reaches a budget.
    """
    C = np.asarray(C, np.float64)
    if not curves:
        raise UserError("a frontier needs at least one fitted (B_p, n)")
    rollouts = np.array(sorted(curves))
    values = np.stack([np.asarray(curves[n](C), np.float64) for n in rollouts])
    if reach is not None:
        low, high = (np.array([reach[n][end] for n in rollouts])[:, None] for end in (0, 1))
        values = np.where((low <= C) & (high >= C), values, -np.inf)
    best = np.argmax(values, axis=0)
    top = values[best, np.arange(len(C))]
    if np.any(np.isneginf(top)):
        raise UserError(f"no run reaches budget {C[np.isneginf(top)][0]:g}; ask for budgets that the sweep covers")
    return Frontier(C, top, rollouts[best])


def smallest_sufficient_prompts(rewards: Mapping[int, float], stable: Mapping[int, bool], margin: float) -> int:
    """The B_p rule: the smallest B_p whose runs are stable and whose reward is within `margin` of the best stable one.

    `rewards` maps B_p to the frontier's reward at the budget, `stable` to whether its runs held; UserError where none
    did.
    """
    held = [prompts for prompts in rewards if stable[prompts]]
    if not held:
        raise UserError(f"none of B_p = {', '.join(map(str, sorted(rewards)))} was stable; lower the learning rate")
    best = max(rewards[prompts] for prompts in held)
    return min(prompts for prompts in held if rewards[prompts] >= best - margin)


def nearest_power_of_two(log2_n: float, grid: Sequence[int] = ROLLOUTS_GRID) -> int:
    """The n of the grid that is nearest in log2."""
    return min(grid, key=lambda n: (abs(np.log2(n) - log2_n), n))


def starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Rise and floor from the data, middle and steepness over a grid."""
    x = np.log10(columns[0])
    span = max(np.ptp(x), 1e-3)
    rise = max(np.ptp(y), 1e-3)
    return np.array(
        [
            [rise * stretch, steep / span, x.min() + place * span, y.min()]
            for stretch in (1.0, 1.6)
            for steep in (3.0, 8.0, 20.0)
            for place in (0.2, 0.4, 0.6, 0.8)
        ]
    )


def limits(columns: tuple[np.ndarray, ...], y: np.ndarray) -> dict[str, tuple[float, float]]:
    """c0 within one span of the points on either side."""
    x = np.log10(columns[0])
    span = np.ptp(x)
    return {"c0": (x.min() - span, x.max() + span)}
