"""Bounded Levenberg-Marquardt for a handful of parameters, made to be vmapped over very many small problems."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Minimum(NamedTuple):
    """Where one descent ended: parameters [P], sum of squares [], and whether the point is stationary in the bounds."""

    parameters: Array
    ssr: Array
    converged: Array


class _State(NamedTuple):
    parameters: Array
    ssr: Array
    gradient: Array  # J^T r
    normal: Array  # J^T J
    damping: Array
    iteration: Array
    done: Array


def solve_positive(matrix: Array, right: Array) -> tuple[Array, Array]:
    """Solve a small symmetric positive system by an unrolled Cholesky: plain arithmetic, so that vmap stays fused.

    Returns the solution [P] and whether the matrix was positive; where it was not, the solution means nothing.
    """
    size = right.shape[0]
    zero = jnp.zeros(())
    lower: list[list[Array]] = [[zero] * size for _ in range(size)]
    positive = jnp.ones((), bool)
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i, j] - sum((lower[i][k] * lower[j][k] for k in range(j)), start=zero)
            if i == j:
                positive = positive & (rest > 0)
                lower[i][j] = jnp.sqrt(jnp.maximum(rest, 1e-300))
            else:
                lower[i][j] = rest / lower[j][j]
    forward: list[Array] = []
    for i in range(size):
        forward.append((right[i] - sum((lower[i][k] * forward[k] for k in range(i)), start=zero)) / lower[i][i])
    solution = [zero] * size
    for i in reversed(range(size)):
        rest = forward[i] - sum((lower[k][i] * solution[k] for k in range(i + 1, size)), start=zero)
        solution[i] = rest / lower[i][i]
    return jnp.stack(solution), positive


def levenberg_marquardt(
    residuals: Callable[[Array], Array],
    start: Array,
    low: Array,
    high: Array,
    *,
    max_iterations: Array | int,
    rounding: Array,
) -> Minimum:
    """Minimise the sum of squared `residuals(p)` over low <= p <= high from `start`; all of p [P], residuals [N].

    A parameter that sits on a bound and wants to leave it outwards is held there; the step of the others is solved
    without it. `converged` is judged at the end, apart from the reason for stopping: every free column of the
    Jacobian is orthogonal to the residuals (cosine below 1e-6), or their sum of squares is below `rounding` [].
    """
    basis = jnp.eye(start.shape[0])

    def evaluate(parameters: Array) -> tuple[Array, Array, Array]:
        values, push = jax.linearize(residuals, parameters)
        columns = jax.vmap(push)(basis)
        return values @ values, columns @ values, columns @ columns.T

    def free(state: _State) -> Array:
        at_low = (state.parameters <= low) & (state.gradient > 0)
        at_high = (state.parameters >= high) & (state.gradient < 0)
        return ~(at_low | at_high)

    def cosine(state: _State) -> Array:
        scale = jnp.sqrt(jnp.maximum(jnp.diagonal(state.normal) * state.ssr, 1e-300))
        return jnp.max(jnp.where(free(state), jnp.abs(state.gradient), 0.0) / scale)

    def step(state: _State) -> _State:
        moving = free(state)
        curvature = jnp.where(moving, state.damping * jnp.diagonal(state.normal) + 1e-300, 1.0)
        damped = jnp.where(jnp.outer(moving, moving), state.normal, 0.0) + jnp.diag(curvature)
        move, _ = solve_positive(damped, jnp.where(moving, -state.gradient, 0.0))
        proposal = jnp.clip(state.parameters + move, low, high)
        ssr, gradient, normal = evaluate(proposal)
        better = ssr < state.ssr
        moved = jnp.max(jnp.abs(proposal - state.parameters) / (1.0 + jnp.abs(state.parameters)))
        settled = jnp.where(better, moved < 1e-10, (state.damping > 1e12) | (moved < 1e-12))
        return _State(
            jnp.where(better, proposal, state.parameters),
            jnp.where(better, ssr, state.ssr),
            jnp.where(better, gradient, state.gradient),
            jnp.where(better, normal, state.normal),
            jnp.clip(jnp.where(better, state.damping * 0.2, state.damping * 5.0), 1e-14, 1e14),
            state.iteration + 1,
            settled | (cosine(state) < 1e-10),
        )

    first = evaluate(start)
    state = _State(start, *first, jnp.full((), 1e-2), jnp.zeros((), jnp.int32), ~jnp.isfinite(first[0]))
    state = jax.lax.while_loop(lambda s: ~s.done & (s.iteration < max_iterations), step, state)
    converged = jnp.isfinite(state.ssr) & ((cosine(state) < 1e-6) | (state.ssr <= rounding))
    return Minimum(state.parameters, state.ssr, converged)
