"""Chinchilla's approach 3 as published: L-BFGS from a grid of starts, on the summed Huber loss.

With the loss averaged over the points instead, the same optimiser's absolute tolerances end it early; `average` shows
that, and the fit then says so.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.optimize

from jaxrl_llm.scaling import chinchilla
from jaxrl_llm.scaling.data import prepare
from jaxrl_llm.scaling.doubts import Flag
from jaxrl_llm.scaling.engine import Solutions
from jaxrl_llm.scaling.fit import Fit, fits_of, solve_many
from jaxrl_llm.scaling.table import law_named

# By how much of itself the summed objective may lie above the best known one; beyond it the optimiser stopped early.
EARLY = 1e-4


def objective(
    p: np.ndarray, log_N: np.ndarray, log_D: np.ndarray, log_loss: np.ndarray, delta: float = chinchilla.HUBER_DELTA
) -> tuple[float, np.ndarray]:
    """The summed Huber loss and its gradient [5] at p = (ln E, ln A, ln B, alpha, beta)."""
    e, a, b, alpha, beta = p
    terms = np.stack([np.full_like(log_N, e), a - alpha * log_N, b - beta * log_D])
    top = terms.max(axis=0)
    shares = np.exp(terms - top)
    total = shares.sum(axis=0)
    residual = top + np.log(total) - log_loss
    shares /= total
    pull = np.clip(residual, -delta, delta)
    gradient = np.array(
        [shares[0] @ pull, shares[1] @ pull, shares[2] @ pull, -(shares[1] * log_N) @ pull, -(shares[2] * log_D) @ pull]
    )
    return float(np.sum(chinchilla.huber(residual, delta))), gradient


def fit_published_chinchilla(
    data: Mapping[str, Any], *, average: bool = False, starts: np.ndarray | None = None
) -> Fit:
    """L-BFGS-B with its usual tolerances from every start [S, 5] (default: the published 4,500), the best one kept.

    `data` has the columns N, D and loss. `average` divides the objective by the number of points, as the publication's
    code is said to have done. The result is held against the batched fitter's optimum: where the optimiser ended above
    it the flag early_stop says by how much and what the optimum is. Raises UserError as `fit.fit` does.
    """
    law = law_named("chinchilla")
    checked = prepare(law, data)
    columns = (np.log(checked.columns[0]), np.log(checked.columns[1]), checked.link)
    scale = 1.0 / len(checked) if average else 1.0

    def scaled(p: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(p, *columns)
        return scale * value, scale * gradient

    best = None
    for start in chinchilla.published_grid() if starts is None else starts:
        begin = np.concatenate([np.log(start[:3]), start[3:]])
        found = scipy.optimize.minimize(scaled, begin, jac=True, method="L-BFGS-B")
        if np.isfinite(found.fun) and (best is None or found.fun < best.fun):
            best = found
    values = np.full(5, np.nan) if best is None else np.concatenate([np.exp(best.x[:3]), best.x[3:]])
    reached = np.inf if best is None else best.fun / scale
    fit = fits_of([checked], Solutions(values[None], np.array([reached]), np.array([True])), protocol="published")[0]
    ours = solve_many(law, [checked])
    optimum = float(ours.objective[0])
    if reached <= optimum * (1 + EARLY) + 1e-12:
        return fit
    known = ", ".join(f"{name} {value:.5g}" for name, value in zip(checked.names, ours.parameters[0], strict=True))
    kind = "averaged" if average else "summed"
    text = (
        f"the optimiser stopped early on the {kind} objective: the summed Huber loss is {reached:.6g} "
        f"where {optimum:.6g} can be had ({known})"
    )
    flag = Flag("early_stop", text, tuple(checked.names))
    return dataclasses.replace(fit, flags=(*fit.flags, flag), converged=False, intervals=dict.fromkeys(fit.intervals))
