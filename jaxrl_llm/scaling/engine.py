"""Fit any law of the table: many starts x many data sets (runs or resamples) in one vmapped, jitted call.

Parameters are searched in their own coordinates (ln where the law says so, which keeps them positive) within box
bounds; bounds that coincide hold a parameter fixed. Laws that are linear in two levels go through `projection`, laws
with a Huber loss through `robust`, all others through Levenberg-Marquardt over all parameters.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.scaling.device import in_chunks, padded
from jaxrl_llm.scaling.lanes import best_lane, best_starts
from jaxrl_llm.scaling.law import Law, Program
from jaxrl_llm.scaling.least_squares import levenberg_marquardt
from jaxrl_llm.scaling.projection import fit_levels
from jaxrl_llm.scaling.robust import minimise_huber

_SHORT, _LONG = 8, 300  # iterations
_ZERO = 1e-300  # stands for zero compute, where the logarithm does not exist


@dataclass(frozen=True)
class Batch:
    """K data sets of one law, padded to one width; float64. `y` is in the law's link (the response or its ln)."""

    columns: np.ndarray  # [K, C, N]
    y: np.ndarray  # [K, N]
    weights: np.ndarray  # [K, N]; 0 is padding
    groups: np.ndarray  # [K, G, N] ones and zeros; G may be 0

    def repeat(self, times: int) -> "Batch":
        """Every data set `times` times in a row."""
        return Batch(*(np.repeat(field, times, axis=0) for field in (self.columns, self.y, self.weights, self.groups)))


@dataclass(frozen=True)
class Solutions:
    """K fits: parameters [K, P] in the law's order (per-group ones last), weighted sum of squares (or summed Huber
    loss) [K], convergence [K]."""

    parameters: np.ndarray
    objective: np.ndarray
    converged: np.ndarray


class _Problem(NamedTuple):
    """What one descent needs; under vmap every leaf gains a leading axis."""

    columns: Any  # [C, N]
    y: Any  # [N]
    root_weight: Any  # [N]
    groups: Any  # [G, N]
    start: Any  # [P]
    low: Any  # [P]
    high: Any  # [P]


def logs(law: Law, groups: int) -> np.ndarray:
    """Which of the P parameters are searched in ln, bool [P]: shared ones first, per-group ones `groups` times each."""
    shared = [p.log for p in law.parameters if not p.per_group]
    return np.array(shared + [p.log for p in law.parameters if p.per_group for _ in range(groups)], bool)


def to_search(law: Law, groups: int, parameters: np.ndarray) -> np.ndarray:
    """Parameters [..., P] in search coordinates."""
    log = logs(law, groups)
    return np.where(log, np.log(np.where(log, parameters, 1.0)), parameters)


def from_search(law: Law, groups: int, coordinates: np.ndarray) -> np.ndarray:
    """The inverse of `to_search`."""
    log = logs(law, groups)
    return np.where(log, np.exp(np.where(log, coordinates, 0.0)), coordinates)


def _values(program: Program, p: Array, problem: _Problem) -> Array:
    """The law at the problem's points [N], in its link, for search coordinates p [P]."""
    groups = problem.groups.shape[0]
    position, values = 0, []
    for log, per_group in zip(program.logs, program.per_group, strict=True):
        size = groups if per_group else 1
        part = p[position : position + size]
        part = jnp.exp(part) if log else part
        values.append(part @ problem.groups if per_group else part[0])
        position += size
    return program.link(*problem.columns, *values)


@functools.partial(jax.jit, static_argnames="program")
def _descend(problems: _Problem, iterations: Array, *, program: Program) -> tuple[Array, ...]:
    def one(problem: _Problem) -> tuple[Array, Array, Array]:
        def residuals(p: Array) -> Array:
            return jnp.where(
                problem.root_weight > 0, problem.root_weight * (_values(program, p, problem) - problem.y), 0.0
            )

        if program.huber is not None:
            return minimise_huber(
                lambda p: _values(program, p, problem) - problem.y,
                jnp.square(problem.root_weight),
                problem.start,
                problem.low,
                problem.high,
                delta=program.huber,
                max_iterations=iterations,
            )
        return levenberg_marquardt(
            residuals,
            problem.start,
            problem.low,
            problem.high,
            max_iterations=iterations,
            rounding=1e-28 * jnp.sum(jnp.square(problem.root_weight * problem.y)),
        )

    return tuple(jax.vmap(one)(problems))


@functools.partial(jax.jit, static_argnames="program")
def _linearise(problems: _Problem, *, program: Program) -> tuple[Array, ...]:
    def one(problem: _Problem) -> tuple[Array, Array]:
        columns = jax.jacfwd(lambda p: _values(program, p, problem))(problem.start)
        return _values(program, problem.start, problem), jnp.where(problem.root_weight[:, None] > 0, columns, 0.0)

    return jax.vmap(one)(problems)


def _problems(law: Law, batch: Batch, start: np.ndarray, low: np.ndarray, high: np.ndarray) -> _Problem:
    """The batch padded to a compiled width by repeating its first point at weight 0, in search coordinates."""
    groups = batch.groups.shape[1]
    extra = padded(batch.y.shape[1]) - batch.y.shape[1]

    def wide(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.repeat(values[..., :1], extra, axis=-1)], axis=-1)

    columns = np.stack(
        [
            np.where((values == 0) & column.zero, _ZERO, values)
            for column, values in zip(law.columns, np.moveaxis(batch.columns, 1, 0), strict=True)
        ],
        axis=1,
    )
    roots = np.sqrt(batch.weights)
    return _Problem(
        columns=wide(columns),
        y=wide(batch.y),
        root_weight=np.concatenate([roots, np.zeros((len(roots), extra))], axis=1),
        groups=wide(batch.groups),
        start=to_search(law, groups, start),
        low=to_search(law, groups, low),
        high=to_search(law, groups, high),
    )


def solve(
    law: Law,
    batch: Batch,
    starts: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    *,
    shortlist: int | None = None,
    project: bool = True,
) -> Solutions:
    """Fit K data sets, each from S starts [K, S, P] within [low, high] ([K, P]), and keep the best of each.

    With `shortlist` only so many of the starts, the best after a few iterations, are followed to the end. With
    `project` false a law with two levels is fitted like any other, so that every parameter can be held fixed.
    """
    sets, lanes, width = starts.shape
    # The power law's D is no parameter of the projection, which could not hold it.
    held_D = law.levels == "power" and bool(np.any(low[:, 2] == high[:, 2]))
    if law.levels is not None and project and not held_D:
        return _solve_levels(law, batch, starts, low, high, shortlist)

    def descend(start: np.ndarray, iterations: int) -> tuple[np.ndarray, ...]:
        per_set = _problems(law, batch, low, low, high)
        lanes = start.shape[1]
        spread = _Problem(*(np.repeat(field, lanes, axis=0) for field in per_set))
        clipped = np.clip(start, per_set.low[:, None], per_set.high[:, None])
        problems = spread._replace(start=clipped.reshape(sets * lanes, width))
        limit = np.int32(iterations)
        return in_chunks(lambda part: _descend(part, limit, program=law.program), problems, problems.y.shape[1])

    start = to_search(law, batch.groups.shape[1], starts)
    if shortlist is not None and shortlist < lanes:
        found, objective, _ = descend(start, _SHORT)
        start = best_starts(found.reshape(start.shape), objective.reshape(sets, lanes), shortlist)
    found, objective, converged = descend(start, _LONG)
    pick = best_lane(objective.reshape(sets, -1), converged.reshape(sets, -1))
    return Solutions(from_search(law, batch.groups.shape[1], found[pick]), objective[pick], converged[pick])


def _solve_levels(
    law: Law, batch: Batch, starts: np.ndarray, low: np.ndarray, high: np.ndarray, shortlist: int | None
) -> Solutions:
    compute = batch.columns[:, 0]
    if law.levels == "power":
        found = fit_levels(
            compute,
            batch.y,
            batch.weights,
            shape="power",
            A=_held(low[:, 0], high[:, 0]),
            lower=batch.y.min() - 10 * np.ptp(batch.y) - 1.0,
            upper=high[:, 0],
            starts=starts[:, :, 1:2],
            low=low[:, 1:2],
            high=high[:, 1:2],
            shortlist=shortlist,
        )
        least = np.min(np.where(batch.weights > 0, compute, np.inf), axis=1)
        D = (found.A - found.R0) * np.exp(found.B * np.log(least))
        parameters = np.stack([found.A, found.B, D], axis=1)
    else:
        found = fit_levels(
            compute,
            batch.y,
            batch.weights,
            A=_held(low[:, 0], high[:, 0]),
            R0=_held(low[:, 3], high[:, 3]),
            lower=low[:, 3],
            upper=high[:, 0],
            starts=starts[:, :, 1:3],
            low=low[:, 1:3],
            high=high[:, 1:3],
            shortlist=shortlist,
        )
        parameters = np.stack([found.A, found.B, found.C_mid, found.R0], axis=1)
    return Solutions(parameters, found.ssr, found.converged)


def _held(low: np.ndarray, high: np.ndarray) -> np.ndarray | None:
    """The value at which a parameter is held: where its bounds coincide, in all data sets or in none."""
    held = low == high
    if held.any() and not held.all():
        raise ValueError("a level is fixed in some data sets of the batch and free in others")
    return low if held.all() else None


def linearise(law: Law, batch: Batch, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The law's values [K, N] in its link, and their Jacobian [K, N, P] in search coordinates, at parameters [K, P]."""
    problems = _problems(law, batch, parameters, parameters, parameters)
    values, jacobian = in_chunks(lambda part: _linearise(part, program=law.program), problems, problems.y.shape[1])
    points = batch.y.shape[1]
    return values[:, :points], jacobian[:, :points]
