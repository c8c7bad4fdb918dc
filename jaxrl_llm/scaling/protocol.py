"""The fitting protocol published with ScaleRL, exactly: grids over A and C_mid, only B fitted, the least SSR kept."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.data import prepare
from jaxrl_llm.scaling.device import float64_on_host
from jaxrl_llm.scaling.doubts import Flag
from jaxrl_llm.scaling.engine import Solutions
from jaxrl_llm.scaling.fit import Fit, fits_of
from jaxrl_llm.scaling.table import B_RANGE, law_named
from jaxrl_llm.types import UserError

A_ERROR = 0.02  # the published error on A: three seeds lay within .015
_NODES = 64  # values of B at which all pairs are looked at before each is fitted
_NEWTON_STEPS = 8  # at most; two are usual


def published_A_grid() -> np.ndarray:
    """.450, .455, ..., .800."""
    return np.arange(450, 801, 5) / 1000


def published_C_mid_grid() -> np.ndarray:
    """100 evenly spaced values from 100 to 40,000 GPU-hours."""
    return np.linspace(100.0, 40000.0, 100)


class GridFits(NamedTuple):
    """The least-squares B of every pair (A, C_mid), and its SSR; both [I, J], float64. `settled`: B is a stationary
    point, or lies on its bound with the SSR falling outwards."""

    B: np.ndarray
    ssr: np.ndarray
    settled: np.ndarray


@functools.partial(jax.jit, static_argnames="nodes")
def _fit_pairs(x: Array, d: Array, w: Array, a: Array, m: Array, *, nodes: int) -> tuple[Array, Array, Array]:
    """x = ln C [N], d = R - R0 [N], weights w [N], a = A - R0 [I], m = ln C_mid [J] -> ln B, SSR, settled, [I, J].

    For one C_mid and one B the curve's shape s is the same for every A, and the SSR is a quadratic in a whose moments
    are shared. So all pairs are first compared at `nodes` values of ln B; then each is polished with Newton's method
    inside the bracket around its best node, started from the cubic through the nodes' values and slopes.
    """
    u = jnp.linspace(math.log(B_RANGE[0]), math.log(B_RANGE[1]), nodes)
    step = u[1] - u[0]
    z = jnp.exp(u)[None, :, None] * (x[None, None] - m[:, None, None])  # [J, G, N]
    s = jax.nn.sigmoid(z)
    slope = s * (1 - s) * z
    total = jnp.sum(w * d * d)
    # [J, G]; as products with a matrix [N, 1], since XLA's CPU reductions over the last axis are slow.
    P, P_u = s @ (w * d), slope @ (w * d)
    Q, Q_u = (s * s) @ w, 2 * ((s * slope) @ w)
    A = a[:, None, None]
    value = total - 2 * A * P[None] + A * A * Q[None]  # [I, J, G]
    tilt = -2 * A * P_u[None] + A * A * Q_u[None]
    best = jnp.argmin(value, axis=2)

    def at(table: Array, index: Array) -> Array:
        return jnp.take_along_axis(table, index[..., None], axis=2)[..., 0]

    left = jnp.clip(jnp.where(at(tilt, best) > 0, best - 1, best), 0, nodes - 2)
    low, high = u[left], u[left + 1]
    f0, f1, g0, g1 = at(value, left), at(value, left + 1), at(tilt, left) * step, at(tilt, left + 1) * step
    # The minimum of the cubic Hermite polynomial on [0, 1].
    c3, c2 = 2 * (f0 - f1) + g0 + g1, 3 * (f1 - f0) - 2 * g0 - g1
    root = jnp.sqrt(jnp.maximum(c2 * c2 - 3 * c3 * g0, 0.0))
    bottom = c2 + root
    place = jnp.where(jnp.abs(bottom) > 1e-300, -g0 / jnp.where(jnp.abs(bottom) > 1e-300, bottom, 1.0), 0.5)
    v = low + step * jnp.clip(jnp.where(jnp.isfinite(place), place, 0.5), 0.0, 1.0)
    reach = a[:, None, None]

    def evaluate(v: Array) -> tuple[Array, Array, Array]:
        z = jnp.exp(v)[..., None] * (x[None, None] - m[None, :, None])
        s = jax.nn.sigmoid(z)
        slope = s * (1 - s) * z
        off = reach * s - d[None, None]
        first = 2 * a[:, None] * ((off * slope) @ w)
        second = 2 * a[:, None] * ((reach * slope * slope + off * slope * (1 + (1 - 2 * s) * z)) @ w)
        return (off * off) @ w, first, second

    def settled(v: Array, ssr: Array, first: Array, second: Array) -> Array:
        # How far the SSR could still fall by the next step, as a share of it; or a bound that it would leave.
        remaining = first * first / jnp.maximum(second, 1e-300)
        inner = (second > 0) & (remaining <= 1e-14 * jnp.maximum(ssr, 1e-14 * total))
        return inner | ((v <= u[0]) & (first >= 0)) | ((v >= u[-1]) & (first <= 0))

    def moved(v: Array, first: Array, second: Array) -> Array:
        return jnp.clip(v - first / jnp.where(second > 0, second, jnp.inf), low, high)

    def newton(state: tuple[Array, ...]) -> tuple[Array, ...]:
        v, _, first, second, count = state
        v = moved(v, first, second)
        return v, *evaluate(v), count + 1

    state = jax.lax.while_loop(
        lambda state: (state[4] < _NEWTON_STEPS) & ~jnp.all(settled(*state[:4])),
        newton,
        (v, *evaluate(v), jnp.zeros((), jnp.int32)),
    )
    v, ssr, first, second, _ = state
    return moved(v, first, second), ssr, settled(v, ssr, first, second)


def fit_grid(
    compute: np.ndarray, reward: np.ndarray, R0: float, A_grid: np.ndarray, C_mid_grid: np.ndarray
) -> GridFits:
    """Fit B for every pair of the grids to one curve: compute > 0 and reward are [N], the grids [I] and [J]."""
    extra = -len(compute) % 16  # few compiled widths, little padding
    x = np.pad(np.log(compute), (0, extra), mode="edge")
    d, w = np.pad(reward - R0, (0, extra)), np.pad(np.ones(len(compute)), (0, extra))
    with float64_on_host():
        log_B, ssr, settled = _fit_pairs(*map(jnp.asarray, (x, d, w, A_grid - R0, np.log(C_mid_grid))), nodes=_NODES)
        return GridFits(np.exp(np.asarray(log_B)), np.asarray(ssr), np.asarray(settled))


def fit_published_protocol(
    curve: Curve,
    *,
    R0: float | None = None,
    drop_before: float = 1500.0,
    A_grid: Sequence[float] | np.ndarray | None = None,
    C_mid_grid: Sequence[float] | np.ndarray | None = None,
    lower: float = 0.0,
    upper: float = 1.0,
) -> Fit:
    """Fit the sigmoid as ScaleRL's authors did: for each (A, C_mid) of the grids fit B by least squares, keep the
    least sum of squared residuals.

    Points before `drop_before` (about one epoch: 1,500 GPU-hours) are left out. Compute is in GPU-hours unless
    `C_mid_grid` and `drop_before` say otherwise. `R0` defaults to the reward at zero compute, which the curve must
    then have. A's interval is the published +-.02; the protocol gives none for B and C_mid. Raises UserError for a
    missing R0, too few points, or a grid that no curve can be drawn on.
    """
    R0 = curve.zero if R0 is None else R0
    if R0 is None:
        raise UserError("the published protocol holds R0 fixed and the curve has no point at zero compute; give R0")
    A_grid = np.asarray(published_A_grid() if A_grid is None else A_grid, np.float64)
    C_mid_grid = np.asarray(published_C_mid_grid() if C_mid_grid is None else C_mid_grid, np.float64)
    A_grid = A_grid[A_grid > R0]
    if not A_grid.size:
        raise UserError(f"no A of the grid lies above R0 = {R0:g}; the published grid runs from .45 to .80")
    if not C_mid_grid.size or np.any(C_mid_grid <= 0):
        raise UserError("the C_mid grid must hold positive values")
    # A point at zero compute has told R0 by now and carries nothing about B.
    kept = curve.where((curve.compute >= drop_before) & (curve.compute > 0))
    ends = {name: (float(grid.min()), float(grid.max())) for name, grid in (("A", A_grid), ("C_mid", C_mid_grid))}
    data = prepare(law_named("sigmoid"), kept, fixed={"R0": R0}, bounds={"A": (lower, upper), "R0": (lower, upper)})

    found = fit_grid(kept.compute, kept.reward, R0, A_grid, C_mid_grid)
    i, j = np.unravel_index(np.argmin(np.where(np.isfinite(found.ssr), found.ssr, np.inf)), found.ssr.shape)
    parameters = np.array([[A_grid[i], found.B[i, j], C_mid_grid[j], R0]])
    solution = Solutions(parameters, found.ssr[i, j][None], found.settled[i, j][None])
    fit = fits_of([data], solution, protocol="published")[0]
    edges = [
        Flag("at_edge_of_grid", f"{name} is at the edge {fit.params[name]:g} of its grid", (name,))
        for name in ("A", "C_mid")
        if fit.params[name] in ends[name]
    ]
    flags = (*(flag for flag in fit.flags if flag.code != "wide_interval"), *edges)
    lost = {name for flag in flags for name in flag.undetermined}
    A = fit.params["A"]
    intervals = {"A": None if "A" in lost else (A - A_ERROR, A + A_ERROR), "B": None, "C_mid": None}
    return dataclasses.replace(fit, intervals=intervals, flags=flags)
