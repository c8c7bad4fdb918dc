"""Minimise a summed Huber loss over a handful of bounded parameters, made to be vmapped over many small problems."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.scaling.least_squares import Minimum, solve_positive


def huber_sum(residuals: Array, weights: Array, delta: float) -> Array:
    """Weighted sum of r^2/2 up to |r| = delta and of delta (|r| - delta/2) beyond."""
    size = jnp.abs(residuals)
    inner = jnp.minimum(size, delta)
    return jnp.sum(weights * inner * (size - 0.5 * inner))


class _State(NamedTuple):
    parameters: Array
    value: Array
    gradient: Array
    hessian: Array
    scale: Array  # diagonal of the majoriser's matrix: what damping multiplies
    damping: Array
    iteration: Array
    done: Array


def minimise_huber(
    residuals: Callable[[Array], Array],
    weights: Array,
    start: Array,
    low: Array,
    high: Array,
    *,
    delta: float,
    max_iterations: Array | int,
) -> Minimum:
    """Minimise sum(weights huber(residuals(p))) over low <= p <= high from `start`; p [P], residuals and weights [N].

    Damped Newton steps with the exact Hessian: nearly all points lie in the loss's linear part, where a Gauss-Newton
    matrix says little. Damping is scaled by that of the quadratic majoriser (weights min(1, delta/|r|)); a Hessian that
    is not positive even with it counts as a failed step. `converged`: every free component of the gradient is below
    1e-6 of the sum of the absolute terms that cancel in it.
    """
    basis = jnp.eye(start.shape[0])

    def evaluate(p: Array) -> tuple[Array, Array, Array, Array]:
        def objective(q: Array) -> Array:
            return huber_sum(residuals(q), weights, delta)

        gradient, push = jax.linearize(jax.grad(objective), p)
        values, push_residuals = jax.linearize(residuals, p)
        columns = jax.vmap(push_residuals)(basis)
        weight = weights * jnp.minimum(1.0, delta / jnp.maximum(jnp.abs(values), delta))
        return huber_sum(values, weights, delta), gradient, jax.vmap(push)(basis), jnp.square(columns) @ weight

    def free(state: _State) -> Array:
        return ~(
            ((state.parameters <= low) & (state.gradient > 0)) | ((state.parameters >= high) & (state.gradient < 0))
        )

    def slope(state: _State) -> Array:
        # sqrt(scale * value) bounds the gradient (Cauchy-Schwarz), so this is a cosine.
        bound = jnp.sqrt(jnp.maximum(state.scale * state.value, 1e-300))
        return jnp.max(jnp.where(free(state), jnp.abs(state.gradient), 0.0) / bound)

    def step(state: _State) -> _State:
        moving = free(state)
        both = jnp.outer(moving, moving)
        damped = jnp.where(both, state.hessian, 0.0) + jnp.diag(
            jnp.where(moving, state.damping * state.scale + 1e-300, 1.0)
        )
        move, positive = solve_positive(damped, jnp.where(moving, -state.gradient, 0.0))
        proposal = jnp.clip(state.parameters + move, low, high)
        value, gradient, hessian, scale = evaluate(proposal)
        better = positive & (value < state.value)
        moved = jnp.max(jnp.abs(proposal - state.parameters) / (1.0 + jnp.abs(state.parameters)))
        settled = jnp.where(better, moved < 1e-11, (state.damping > 1e12) | (positive & (moved < 1e-13)))

        def keep(new: Array, old: Array) -> Array:
            return jnp.where(better, new, old)

        return _State(
            keep(proposal, state.parameters),
            keep(value, state.value),
            keep(gradient, state.gradient),
            keep(hessian, state.hessian),
            keep(scale, state.scale),
            jnp.clip(jnp.where(better, state.damping * 0.3, state.damping * 4.0), 1e-14, 1e14),
            state.iteration + 1,
            settled | (slope(state) < 1e-11),
        )

    first = evaluate(start)
    state = _State(start, *first, jnp.full((), 1.0), jnp.zeros((), jnp.int32), ~jnp.isfinite(first[0]))
    exact = 1e-22 * jnp.sum(weights)  # residuals of some 1e-11: what rounding leaves of noiseless data
    state = jax.lax.while_loop(lambda s: ~s.done & (s.iteration < max_iterations), step, state)
    converged = jnp.isfinite(state.value) & ((slope(state) < 1e-6) | (state.value <= exact))
    return Minimum(state.parameters, state.value, converged)
