"""Several seeds of one recipe: what they share, and how far one seed lies from another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.data import prepare
from jaxrl_llm.scaling.engine import logs, to_search
from jaxrl_llm.scaling.fit import LEVEL, Fit, fit, fit_many
from jaxrl_llm.scaling.table import law_named
from jaxrl_llm.types import UserError


@dataclass(frozen=True)
class Seeds:
    """`fits`, one for each seed; `pooled`, one fit of all points; `mean` of the seeds' parameters (for parameters that
    are searched in ln the geometric one) with `intervals` at `level` from the spread between seeds (Student's t with
    one degree of freedom less than seeds), and `spread`, the greatest minus the least."""

    fits: dict[str, Fit]
    pooled: Fit
    mean: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    spread: dict[str, float]
    level: float


def fit_seeds(curves: Mapping[str, Curve], *, law: str = "sigmoid", level: float = LEVEL, **options: Any) -> Seeds:
    """Fit every seed of one recipe in one batch, and all of them together; `options` are those of `fit.fit`.

    What differs from seed to seed is no noise around one curve, so the intervals of one run's fit do not hold for the
    recipe: those here do, as far as so few seeds can tell. Raises UserError for fewer than two seeds.
    """
    if len(curves) < 2:
        raise UserError(f"{len(curves)} seed tells nothing about others; give at least 2")
    names = list(curves)
    sets = [prepare(law_named(law), curves[name], **options) for name in names]
    fits = dict(zip(names, fit_many(law, sets, level=level), strict=True))
    pooled = fit(
        law,
        {
            "compute": np.concatenate([curves[name].compute for name in names]),
            "reward": np.concatenate([curves[name].reward for name in names]),
        },
        groups=[name for name in names for _ in range(len(curves[name]))],
        level=level,
        **options,
    )
    values = np.array([[found.params[name] for name in found.params] for found in fits.values()])
    searched = to_search(law_named(law), 0, values)
    in_log = logs(law_named(law), 0)
    count = len(names)
    middle = searched.mean(axis=0)
    half = scipy.stats.t.ppf((1 + level) / 2, count - 1) * searched.std(axis=0, ddof=1) / np.sqrt(count)
    mean, intervals, spread = {}, {}, {}
    for index, name in enumerate(pooled.params):
        ends = middle[index] + half[index] * np.array([-1.0, 0.0, 1.0])
        low, centre, high = np.exp(ends) if in_log[index] else ends
        mean[name] = float(centre)
        spread[name] = float(np.ptp(values[:, index]))
        if name in pooled.intervals:
            intervals[name] = (float(low), float(high))
    return Seeds(fits, pooled, mean, intervals, spread, level)
