"""Chinchilla: L(N, D) = E + A / N^alpha + B / D^beta, its compute-optimal split of C = 6 N D, and approaches 1 to 3.

Approach 3's objective is the Huber loss (delta 1e-3) of the residuals in ln L, *summed* over the points, with the law
evaluated through log-sum-exp. Approaches 1 and 2 are below: they give the optimal N and D of each budget, to which
the law "allocation" (a power law) is fitted.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.scaling.laws import namespace
from jaxrl_llm.types import UserError

HUBER_DELTA = 1e-3


class Constants(NamedTuple):
    """E, A, B, alpha, beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float


PUBLISHED = Constants(1.69, 406.4, 410.7, 0.34, 0.28)
REPLICATION = Constants(1.8172, 482.01, 2085.43, 0.3478, 0.3658)


def log_loss(N: Any, D: Any, E: Any, A: Any, B: Any, alpha: Any, beta: Any) -> Any:
    """ln L as log-sum-exp of (ln E, ln A - alpha ln N, ln B - beta ln D)."""
    xp = namespace(N, D, E, A, B, alpha, beta)
    model, data = xp.log(A) - alpha * xp.log(N), xp.log(B) - beta * xp.log(D)
    return xp.logaddexp(xp.logaddexp(model, data), xp.log(E))


def loss(N: Any, D: Any, E: Any, A: Any, B: Any, alpha: Any, beta: Any) -> Any:
    """L = E + A / N^alpha + B / D^beta, in nats per token."""
    return namespace(N, D, E, A, B, alpha, beta).exp(log_loss(N, D, E, A, B, alpha, beta))


def huber(residual: Any, delta: float = HUBER_DELTA) -> Any:
    """r^2/2 up to |r| = delta, delta (|r| - delta/2) beyond."""
    xp = namespace(residual)
    size = xp.abs(residual)
    inner = xp.minimum(size, delta)
    return inner * (size - 0.5 * inner)


class Split(NamedTuple):
    """Compute-optimal parameters and tokens of a budget, and the loss there."""

    N: Any
    D: Any
    loss: Any


def optimal_split(C: Any, E: float, A: float, B: float, alpha: float, beta: float) -> Split:
    """N_opt = G (C/6)^(beta/(alpha+beta)), G = (alpha A / (beta B))^(1/(alpha+beta)); D_opt = C / (6 N_opt)."""
    C = np.asarray(C, np.float64)
    G = (alpha * A / (beta * B)) ** (1.0 / (alpha + beta))
    N = G * (C / 6.0) ** (beta / (alpha + beta))
    D = C / (6.0 * N)
    return Split(N, D, loss(N, D, E, A, B, alpha, beta))


class Optima(NamedTuple):
    """The best N and D found for each budget C, and the loss there; all [K]."""

    C: np.ndarray
    N: np.ndarray
    D: np.ndarray
    loss: np.ndarray


def _columns(**columns: Any) -> list[np.ndarray]:
    arrays = [np.asarray(value, np.float64) for value in columns.values()]
    for name, array in zip(columns, arrays, strict=True):
        if array.ndim != 1 or array.shape != arrays[0].shape:
            raise UserError(f"column {name} has shape {array.shape}; all columns must be equally long")
        if not np.all(np.isfinite(array)) or np.any(array <= 0):
            raise UserError(f"column {name} holds a value that is not a positive number; drop or repair those rows")
    return arrays


def envelope_optima(N: Any, C: Any, loss: Any, bins: int = 1500) -> Optima:
    """Approach 1: the envelope of training curves. Rows (N, C, loss) are points of runs, all [K].

    For each of `bins` budgets, evenly spaced in ln C, every model's curve is interpolated (ln loss over ln C) and the
    best kept, where a smaller and a larger model can be compared with it. Raises UserError where there is none.
    """
    N, C, loss = _columns(N=N, C=C, loss=loss)
    sizes = np.unique(N)
    runs = [(size, *(values[size == N][np.argsort(C[size == N])] for values in (C, loss))) for size in sizes]
    if len(sizes) < 3:
        raise UserError(f"{len(sizes)} model sizes make no envelope; at least 3 are needed")
    budgets = np.geomspace(C.min(), C.max(), bins)
    values = np.stack([np.interp(np.log(budgets), np.log(c), np.log(y), left=np.inf, right=np.inf) for _, c, y in runs])
    best, every = np.argmin(values, axis=0), np.arange(bins)
    # Where no smaller or no larger model has been trained so far, the best of them says nothing about the optimum.
    there = np.cumsum(np.isfinite(values), axis=0)
    inside = (there[best, every] > 1) & (there[-1] > there[best, every])
    if not inside.any():
        raise UserError(
            "at no budget is a model better than both a smaller and a larger one: the training curves do not overlap "
            "in compute, or the optimum lies outside the sizes"
        )
    C, N = budgets[inside], sizes[best[inside]]
    return Optima(C, N, C / (6.0 * N), np.exp(values[best, np.arange(bins)][inside]))


def isoflop_optima(N: Any, C: Any, loss: Any) -> Optima:
    """Approach 2: for each budget C (rows with one C are one IsoFLOP curve) the minimum of a parabola in ln N.

    Raises UserError for a budget with fewer than three sizes, or whose parabola has no minimum within its sizes.
    """
    N, C, loss = _columns(N=N, C=C, loss=loss)
    found = []
    for budget in np.unique(C):
        rows = budget == C
        x, y = np.log(N[rows]), loss[rows]
        if len(np.unique(x)) < 3:
            raise UserError(f"budget {budget:g} has {len(np.unique(x))} model sizes; a parabola needs at least 3")
        middle = x.mean()
        a, b, c = np.polyfit(x - middle, y, 2)
        best = middle - b / (2 * a) if a > 0 else np.nan
        if not x.min() <= best <= x.max():
            raise UserError(
                f"the losses at budget {budget:g} have no minimum between N = {N[rows].min():g} and {N[rows].max():g}; "
                "add sizes on the side where the loss still falls, or leave that budget out"
            )
        size = np.exp(best)
        found.append((budget, size, budget / (6.0 * size), c - b * b / (4 * a)))
    return Optima(*map(np.array, zip(*found, strict=True)))


def log_allocation(C: Any, G: Any, a: Any) -> Any:
    """ln of G C^a."""
    xp = namespace(C, G, a)
    return xp.log(G) + a * xp.log(C)


def allocation(C: Any, G: Any, a: Any) -> Any:
    """Optimal parameters (or tokens) G C^a of budget C."""
    return namespace(C, G, a).exp(log_allocation(C, G, a))


def allocation_inverse(amount: Any, G: Any, a: Any) -> Any:
    """The budget whose optimum is `amount`."""
    xp = namespace(amount, G, a)
    return xp.exp((xp.log(amount) - xp.log(G)) / a)


def allocation_starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The straight line through ln y over ln C."""
    x = np.log(columns[0])
    a = max(np.polyfit(x - x.mean(), y, 1)[0], 1e-3)
    return np.array([[np.exp(y.mean() - a * x.mean()), a]])


def published_grid() -> np.ndarray:
    """The published grid of starts (E, A, B, alpha, beta), float64 [4500, 5]: alpha and beta in 0, .5, .., 2 (0 is
    moved to .01, for they are searched in ln); ln E in -1, -.5, .., 1; ln A and ln B in 0, 5, .., 25."""
    exponents = np.maximum(np.arange(5) * 0.5, 0.01)
    scales = np.exp(np.arange(6) * 5.0)
    grid = np.meshgrid(np.exp(np.arange(-2, 3) * 0.5), scales, scales, exponents, exponents, indexing="ij")
    return np.stack([axis.ravel() for axis in grid], axis=1)


def starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Exponents over a grid; for each, E, A and B that share the loss at the data's middle in several proportions."""
    N, D = (np.log(column).mean() for column in columns)
    level = np.exp(np.median(y))
    found = []
    for alpha in (0.15, 0.35, 0.7):
        for beta in (0.15, 0.35, 0.7):
            for E, model, data in ((0.8, 0.1, 0.1), (0.5, 0.25, 0.25), (0.6, 0.3, 0.1), (0.6, 0.1, 0.3)):
                terms = (E * level, model * level * np.exp(alpha * N), data * level * np.exp(beta * D))
                found.append([*terms, alpha, beta])
    return np.array(found)
