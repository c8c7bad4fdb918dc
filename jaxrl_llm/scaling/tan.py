"""Tan et al.: ln L = -k(N) ln X + E(N), with k(N) = K_max / (1 + N_0 / N) and L = 1 - R / R_max.

X is compute C (FLOPs, 6 N T) or data D (samples); E is free for each model. Inter-model: fit some models, predict
another. Intra-model: fit the first part of a model's run, predict the rest. N and N_0 share one unit.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.scaling.laws import namespace


class Slope(NamedTuple):
    """Published constants of k(N); N_0 in billions of parameters."""

    K_max: float
    N_0: float


# (model, axis, mode) -> constants, from the paper's table.
PUBLISHED = {
    ("base", "C", "intra"): Slope(0.1349, 13.09),
    ("base", "C", "inter"): Slope(0.1518, 17.37),
    ("base", "D", "intra"): Slope(0.1348, 11.52),
    ("base", "D", "inter"): Slope(0.1631, 16.95),
    ("instruct", "C", "intra"): Slope(0.1276, 17.27),
    ("instruct", "C", "inter"): Slope(0.1443, 28.33),
    ("instruct", "D", "intra"): Slope(0.1325, 17.08),
    ("instruct", "D", "inter"): Slope(0.1484, 27.15),
}


def loss_of_reward(R: Any, R_max: float = 1.0) -> Any:
    """L = 1 - R / R_max."""
    return 1.0 - R / R_max


def reward_of_loss(L: Any, R_max: float = 1.0) -> Any:
    """R = R_max (1 - L), the inverse of `loss_of_reward`."""
    return R_max * (1.0 - L)


def slope(N: Any, K_max: Any, N_0: Any) -> Any:
    """k(N) = K_max / (1 + N_0 / N)."""
    return K_max / (1.0 + N_0 / N)


def log_loss(N: Any, X: Any, K_max: Any, N_0: Any, E: Any) -> Any:
    """ln L = -k(N) ln X + E."""
    return -slope(N, K_max, N_0) * namespace(N, X, K_max, N_0, E).log(X) + E


def loss(N: Any, X: Any, K_max: Any, N_0: Any, E: Any) -> Any:
    """L = exp(E) X^-k(N)."""
    return namespace(N, X, K_max, N_0, E).exp(log_loss(N, X, K_max, N_0, E))


def line_log_loss(X: Any, k: Any, E: Any) -> Any:
    """ln L = -k ln X + E of one model."""
    return -k * namespace(X, k, E).log(X) + E


def line_loss(X: Any, k: Any, E: Any) -> Any:
    """L = exp(E) X^-k of one model."""
    return namespace(X, k, E).exp(line_log_loss(X, k, E))


def line_inverse(L: Any, k: Any, E: Any) -> Any:
    """The X at which one model's loss is L."""
    xp = namespace(L, k, E)
    return xp.exp((E - xp.log(L)) / k)


def both_axes_log_loss(N: Any, X: Any, compute: Any, K_max: Any, N_0: Any, phi: Any, E: Any) -> Any:
    """ln L with one k(N) for both axes: C = N D phi makes k_C = k_D and E_C = E_D + k ln(N phi).

    `compute` is 1 where X is C and 0 where X is D; `E` is E_D.
    """
    xp = namespace(N, X, compute, K_max, N_0, phi, E)
    return -slope(N, K_max, N_0) * (xp.log(X) - compute * xp.log(N * phi)) + E


def both_axes_loss(N: Any, X: Any, compute: Any, K_max: Any, N_0: Any, phi: Any, E: Any) -> Any:
    """exp of `both_axes_log_loss`."""
    return namespace(N, X, compute, K_max, N_0, phi, E).exp(both_axes_log_loss(N, X, compute, K_max, N_0, phi, E))


def compute_intercept(E_D: Any, k: Any, N: Any, phi: Any) -> Any:
    """E_C = E_D + k ln(N phi)."""
    return E_D + k * namespace(E_D, k, N, phi).log(N * phi)


def intercept(N: Any, X: Any, L: Any, K_max: Any, N_0: Any) -> float:
    """E of a model that the fit of k(N) has not seen, from points (X, L) of its own run: mean of ln L + k(N) ln X."""
    return float(np.mean(np.log(L) + slope(N, K_max, N_0) * np.log(X)))


def both_axes(N: Any, C: Any, D: Any, L: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Columns for the law "tan_both" and options for its fit, from runs with C and D at each loss, all [N].

    Every measurement appears twice, once for each axis, at weight 1/2, and says that it is one. Group labels must be
    given twice over as well.
    """
    N, C, D, L = (np.asarray(value, np.float64) for value in (N, C, D, L))
    data = {
        "N": np.concatenate([N, N]),
        "X": np.concatenate([C, D]),
        "compute_axis": np.concatenate([np.ones(len(C)), np.zeros(len(D))]),
        "loss": np.concatenate([L, L]),
    }
    return data, {"weights": np.full(2 * len(L), 0.5), "measurements": np.tile(np.arange(len(L)), 2)}


def starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """K_max and N_0 over a grid; each E is the best for its start."""
    N, X = columns[0], np.log(columns[1])
    found = []
    for N_0 in np.geomspace(0.1 * N.min(), 10 * N.max(), 6):
        saturation = 1.0 / (1.0 + N_0 / N)
        for K_max in (0.05, 0.15, 0.4):
            E = groups @ (y + K_max * saturation * X) / groups.sum(axis=1)
            found.append([K_max, N_0, *E])
    return np.array(found)


def both_axes_starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """As `starts`, with phi from the mean distance of the two axes."""
    N, X, compute = columns
    on = compute > 0.5
    phi = (
        np.exp(np.mean(np.log(X[on])) - np.mean(np.log(X[~on])) - np.mean(np.log(N[on])))
        if 0 < on.sum() < len(on)
        else 1.0
    )
    plain = starts((N, np.where(on, X / (N * phi), X)), y, groups)
    return np.insert(plain, 2, phi, axis=1)


def line_starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The straight line through all points, and two tilted ones."""
    x = np.log(columns[0])
    k = -np.polyfit(x - x.mean(), y, 1)[0]
    slopes = np.maximum([k, 0.5 * k, 2 * k], 1e-4)
    return np.stack([slopes, y.mean() + slopes * x.mean()], axis=1)
