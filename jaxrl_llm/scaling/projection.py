"""Variable projection for the laws that are linear in two levels: the sigmoid and the power law.

Given a law's shape parameters (ln B and, for the sigmoid, ln C_mid), the reward is linear in its
two levels, y = R0 (1 - s) + A s with 0 <= s <= 1, and the best levels under lower <= R0 <= A <= upper follow in closed
form. Levenberg-Marquardt then has one or two bounded parameters left, which makes it robust to poor starts.

Everything is float64 inside a `jax.enable_x64` context, whatever the caller's configuration. Curves are padded and
problems grouped into a few fixed sizes, so that repeated fits reuse the compiled program.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.scaling.device import in_chunks, padded
from jaxrl_llm.scaling.lanes import best_lane, best_starts
from jaxrl_llm.scaling.least_squares import levenberg_marquardt

Shape = Literal["sigmoid", "power"]

_ZERO_COMPUTE = -1e6  # ln C of a point at C = 0: the sigmoid is exactly R0 there
_SHORT, _LONG = 6, 1000  # iterations; where noise is as large as the rise the last steps are many and small


class _Problem(NamedTuple):
    """What one descent needs; under vmap every leaf gains a leading axis. Leaves are float64 and
    bool, numpy arrays on the host and JAX arrays once traced."""

    x: Any  # [N] ln C, shifted so that the points' middle is 0
    y: Any  # [N]
    root_weight: Any  # [N] square root of the weight; 0 is padding
    origin: Any  # [] power law: x of the least compute
    A: Any  # [] value of A where it is fixed
    A_free: Any  # [] bool
    R0: Any  # [] value of R0 where it is fixed
    R0_free: Any  # [] bool
    lower: Any  # [] least R0
    upper: Any  # [] greatest A
    start: Any  # [P] shape parameters: ln B, and for the sigmoid ln C_mid
    low: Any  # [P]
    high: Any  # [P]


def _shape(shape: Shape, p: Array, problem: _Problem) -> Array:
    """s [N] in y = R0 (1 - s) + A s."""
    if shape == "sigmoid":
        return jax.nn.sigmoid(jnp.exp(p[0]) * (problem.x - p[1]))
    return -jnp.expm1(-jnp.exp(p[0]) * (problem.x - problem.origin))


def _levels(s: Array, problem: _Problem) -> tuple[Array, Array]:
    """The best (R0, A) for shape s [N]: a convex quadratic over lower <= R0 <= A <= upper, solved edge by edge."""
    w, y, lower, upper = jnp.square(problem.root_weight), problem.y, problem.lower, problem.upper
    a, b, c = jnp.sum(w * (1 - s) * (1 - s)), jnp.sum(w * s * (1 - s)), jnp.sum(w * s * s)
    u, v = jnp.sum(w * (1 - s) * y), jnp.sum(w * s * y)

    def ratio(top: Array, bottom: Array, otherwise: Array) -> Array:
        usable = bottom > 1e-200
        return jnp.where(usable, top / jnp.where(usable, bottom, 1.0), otherwise)

    def best_A(R0: Array) -> Array:
        return jnp.clip(ratio(v - b * R0, c, R0), R0, upper)

    def best_R0(A: Array) -> Array:
        return jnp.clip(ratio(u - b * A, a, A), lower, A)

    def cost(R0: Array, A: Array) -> Array:
        return a * R0 * R0 + 2 * b * R0 * A + c * A * A - 2 * u * R0 - 2 * v * A

    determinant = a * c - b * b
    regular = determinant > 1e-13 * a * c
    safe = jnp.where(regular, determinant, 1.0)
    R0_inner, A_inner = (c * u - b * v) / safe, (a * v - b * u) / safe
    inside = regular & (lower <= R0_inner) & (R0_inner <= A_inner) & (A_inner <= upper)
    level = jnp.clip(ratio(u + v, a + 2 * b + c, lower), lower, upper)
    edges_R0 = jnp.stack([best_R0(upper), lower, level])
    edges_A = jnp.stack([upper, best_A(lower), level])
    edge = jnp.argmin(cost(edges_R0, edges_A))
    R0_free = jnp.where(inside, R0_inner, edges_R0[edge])
    A_free = jnp.where(inside, A_inner, edges_A[edge])

    R0 = jnp.where(problem.R0_free, jnp.where(problem.A_free, R0_free, best_R0(problem.A)), problem.R0)
    A = jnp.where(problem.A_free, jnp.where(problem.R0_free, A_free, best_A(problem.R0)), problem.A)
    return R0, A


def _descend(shape: Shape, iterations: Array, problem: _Problem) -> tuple[Array, ...]:
    def residuals(p: Array) -> Array:
        s = _shape(shape, p, problem)
        R0, A = _levels(s, problem)
        return problem.root_weight * (R0 + (A - R0) * s - problem.y)

    minimum = levenberg_marquardt(
        residuals,
        problem.start,
        problem.low,
        problem.high,
        max_iterations=iterations,
        rounding=1e-28 * jnp.sum(jnp.square(problem.root_weight * problem.y)),
    )
    R0, A = _levels(_shape(shape, minimum.parameters, problem), problem)
    return minimum.parameters, minimum.ssr, minimum.converged, R0, A


@functools.partial(jax.jit, static_argnames="shape")
def _descend_all(problems: _Problem, iterations: Array, *, shape: Shape) -> tuple[Array, ...]:
    return jax.vmap(functools.partial(_descend, shape, iterations))(problems)


@dataclass(frozen=True)
class Fits:
    """K least-squares fits; every array is float64 (or bool) [K]. `ssr` is the weighted sum of squared residuals."""

    A: np.ndarray
    B: np.ndarray
    C_mid: np.ndarray  # for the power law: nan
    R0: np.ndarray  # for the power law: the value at the least compute
    ssr: np.ndarray
    converged: np.ndarray


def fit_levels(
    compute: np.ndarray,
    reward: np.ndarray,
    weights: np.ndarray,
    *,
    starts: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    shape: Shape = "sigmoid",
    A: np.ndarray | None = None,
    R0: np.ndarray | None = None,
    lower: np.ndarray | float,
    upper: np.ndarray | float,
    shortlist: int | None = None,
) -> Fits:
    """Fit K curves at once, each from S starts, and keep the best of each.

    `compute`, `reward` and `weights` are [K, N]; weight 0 marks padding. `A` and `R0` [K] are fixed where given and
    free within lower <= R0 <= A <= upper where None. `starts` [K, S, P], `low` and `high` [K, P] hold (B, C_mid), for
    the power law (B,). With `shortlist` only so many of the starts, the best after a few iterations, are followed to
    the end. No input is checked here; `converged` speaks per curve.
    """
    curves, lanes, width = starts.shape
    positive = (weights > 0) & (compute > 0)
    logs = np.log(np.where(compute > 0, compute, 1.0))
    least = np.min(np.where(positive, logs, np.inf), axis=1)
    greatest = np.max(np.where(positive, logs, -np.inf), axis=1)
    middle = (least + greatest) / 2
    x = np.where(compute > 0, logs - middle[:, None], _ZERO_COMPUTE)
    x = np.where(weights > 0, x, 0.0)
    y = np.where(weights > 0, reward, 0.0)
    shift = np.stack([np.zeros(curves), middle], axis=1)[:, :width]

    def each(value: np.ndarray | float | None) -> np.ndarray:
        return np.broadcast_to(np.asarray(0.0 if value is None else value, np.float64), (curves,))

    extra = padded(compute.shape[1]) - compute.shape[1]
    per_curve = _Problem(
        x=np.pad(x, ((0, 0), (0, extra))),
        y=np.pad(y, ((0, 0), (0, extra))),
        root_weight=np.pad(np.sqrt(weights), ((0, 0), (0, extra))),
        origin=least - middle,
        A=each(A),
        A_free=np.full(curves, A is None),
        R0=each(R0),
        R0_free=np.full(curves, R0 is None),
        lower=each(lower),
        upper=each(upper),
        start=np.zeros((curves, width)),
        low=np.log(low) - shift,
        high=np.log(high) - shift,
    )

    def descend(start: np.ndarray, iterations: int) -> tuple[np.ndarray, ...]:
        lanes = start.shape[1]
        spread = _Problem(*(np.repeat(field, lanes, axis=0) for field in per_curve))
        problems = spread._replace(start=start.reshape(curves * lanes, width))
        limit = np.int32(iterations)
        return in_chunks(lambda part: _descend_all(part, limit, shape=shape), problems, problems.y.shape[1])

    start = np.clip(np.log(starts) - shift[:, None], per_curve.low[:, None], per_curve.high[:, None])
    if shortlist is not None and shortlist < lanes:
        parameters, ssr, *_ = descend(start, _SHORT)
        start = best_starts(parameters.reshape(start.shape), ssr.reshape(curves, lanes), shortlist)
    parameters, ssr, converged, found_R0, found_A = descend(start, _LONG)
    pick = best_lane(ssr.reshape(curves, -1), converged.reshape(curves, -1))
    shape_parameters = np.exp(parameters[pick] + shift)
    return Fits(
        found_A[pick],
        shape_parameters[:, 0],
        shape_parameters[:, 1] if width == 2 else np.full(curves, np.nan),
        found_R0[pick],
        ssr[pick],
        converged[pick],
    )
