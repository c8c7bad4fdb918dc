"""Profile likelihood: how far one parameter can go when all others make the best of it."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import scipy.stats

from jaxrl_llm.scaling.data import Data, batch_of
from jaxrl_llm.scaling.engine import logs, solve
from jaxrl_llm.scaling.fit import LEVEL, Fit
from jaxrl_llm.types import UserError

_GRID, _FINE = 25, 17  # values per scan
_FIRST_REACH, _WIDENINGS = 4.0, 6  # standard deviations to each side; how often that is multiplied by 4


@dataclass(frozen=True)
class Profile:
    """`objective` [M], the least sum of squares with `name` held at each of `values` [M] (ascending), and the interval
    at `level`. An end that the data does not limit is the parameter's bound, and `open_low` or `open_high` is True."""

    name: str
    values: np.ndarray
    objective: np.ndarray
    interval: tuple[float, float]
    open_low: bool
    open_high: bool
    level: float


def profile(fit: Fit, name: str, *, level: float = LEVEL) -> Profile:
    """The profile of one free parameter of a least-squares fit and the interval where F(1, freedom) allows it.

    Unlike the linearised interval it follows bends and ends at bounds, and it says which side is open. Where R0 was
    measured at zero compute that measurement joins the points. Raises UserError for a parameter that was not free and
    for laws with a Huber loss, whose objective is no likelihood of known scale (bootstrap those).
    """
    law = fit.data.law
    if name not in fit.free:
        raise UserError(f"{name} was not free in this fit; free were {', '.join(fit.free)}")
    if law.huber is not None:
        raise UserError(f"{law.name} is fitted with a Huber loss, which has no profile likelihood; use the bootstrap")
    data = _with_zeros(fit.data)
    index = data.names.index(name)
    groups = data.ones.shape[0]
    in_log = logs(law, groups)[index]
    found, least = np.array(list(fit.params.values())), fit.objective
    if fit.r0_source == "zero":  # all measurements together have an optimum of their own
        joint = solve(
            data.law,
            batch_of([data]),
            np.concatenate([found[None], data.starts()])[None],
            data.low[None],
            data.high[None],
        )
        found, least = joint.parameters[0], float(joint.objective[0])

    def search(value: float | np.ndarray) -> np.ndarray:
        return np.log(value) if in_log else np.asarray(value, np.float64)

    centre, low, high = (float(search(value)) for value in (found[index], data.low[index], data.high[index]))
    variance = fit.covariance[fit.free.index(name), fit.free.index(name)]
    step = min(max(float(np.sqrt(max(variance, 0.0))), 1e-9 * (1 + abs(centre))), high - low)
    allowed = least * (1 + scipy.stats.t.ppf((1 + level) / 2, fit.freedom) ** 2 / fit.freedom)
    allowed = max(allowed, least + 1e-26 * float(np.sum(data.weights * data.link**2)))

    places, objective = np.array([centre]), np.array([least])
    ends, opened = [], []
    for side, bound in ((-1.0, low), (1.0, high)):
        inside, reach = centre, _FIRST_REACH * step
        outside = None
        for _ in range(_WIDENINGS):
            edge = np.clip(centre + side * reach, low, high)
            scan = np.linspace(inside, edge, _GRID)[1:] if edge != inside else np.array([])
            values = _held(data, index, from_axis(scan, in_log), found)
            places, objective = np.append(places, scan), np.append(objective, values)
            beyond = np.flatnonzero(values > allowed)
            if beyond.size:
                outside = scan[beyond[0]]
                inside = scan[beyond[0] - 1] if beyond[0] else inside
                break
            inside, reach = float(edge), reach * 4
            if edge == bound:
                break
        if outside is None:
            ends.append(bound if inside == bound else inside)
            opened.append(True)
            continue
        scan = np.linspace(inside, outside, _FINE)
        values = _held(data, index, from_axis(scan, in_log), found)
        places, objective = np.append(places, scan), np.append(objective, values)
        # sqrt of the rise is nearly straight in the parameter.
        rise = np.sqrt(np.maximum(values - least, 0.0))
        ends.append(float(np.interp(np.sqrt(allowed - least), np.maximum.accumulate(rise), scan)))
        opened.append(False)
    places, first = np.unique(places, return_index=True)
    interval = (float(from_axis(ends[0], in_log)), float(from_axis(ends[1], in_log)))
    return Profile(name, from_axis(places, in_log), objective[first], interval, opened[0], opened[1], level)


def from_axis(value: float | np.ndarray, in_log: bool) -> np.ndarray:
    """A value of the search coordinate in the parameter's own unit."""
    return np.exp(value) if in_log else np.asarray(value, np.float64)


def _with_zeros(data: Data) -> Data:
    """The data with its measurements at zero compute among the points and R0 free."""
    if data.r0_source != "zero":
        return data
    R0, A = data.names.index("R0"), data.names.index("A")
    low, high = data.low.copy(), data.high.copy()
    low[R0], high[R0] = data.reward_low, high[A]
    zeros = len(data.zeros)
    return dataclasses.replace(
        data,
        columns=np.concatenate([data.columns, np.zeros((1, zeros))], axis=1),
        response=np.concatenate([data.response, data.zeros]),
        weights=np.concatenate([data.weights, np.ones(zeros)]),
        groups=np.concatenate([data.groups, np.zeros(zeros, np.int64)]),
        low=low,
        high=high,
        r0_source="free",
    )


def _held(data: Data, index: int, values: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The least objective [M] with parameter `index` held at each of `values` [M]."""
    if not len(values):
        return np.array([])
    count = len(values)
    low, high = np.tile(data.low, (count, 1)), np.tile(data.high, (count, 1))
    low[:, index] = high[:, index] = values
    # Near the fit its own parameters nearly always lead on; a third of the law's starts stand by for where they do not.
    starts = np.concatenate([found[None], data.starts()[::3]])
    every = np.clip(np.tile(starts, (count, 1, 1)), low[:, None], high[:, None])
    solved = solve(data.law, batch_of([data]).repeat(count), every, low, high, shortlist=3)
    return solved.objective
