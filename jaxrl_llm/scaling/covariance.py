"""Linearised covariance of a fit in search coordinates, and the parameters that the data leaves open."""

from dataclasses import dataclass

import numpy as np
import scipy.stats

from jaxrl_llm.scaling.data import Data
from jaxrl_llm.scaling.doubts import Flag


@dataclass(frozen=True)
class Estimate:
    """Covariance `matrix` [F, F] of the parameters `names` (free ones first, measured ones last), the residuals'
    standard deviation and the degrees of freedom that it was estimated with."""

    names: tuple[str, ...]
    matrix: np.ndarray
    noise: float
    freedom: int


def search_covariance(
    data: Data, jacobian: np.ndarray, residuals: np.ndarray, moving: np.ndarray, measured: np.ndarray
) -> Estimate:
    """Covariance of the `moving` [P] bool parameters, and of the `measured` ones, from the Jacobian [N, P].

    Least squares: s^2 (J^T W J)^-1 with N - F degrees of freedom. Where rows share a measurement, the sandwich of the
    measurements' summed scores. A parameter measured apart (R0 at zero compute) was held in the fit: its noise reaches
    the others through -(J^T W J)^-1 J^T W j, j its own column.
    Huber loss: the sandwich b / a^2 (J^T J)^-1 of an M-estimator, with b the mean square of the loss's derivative and a
    the share of the residuals' density within delta of 0, smoothed since few of them lie there.
    """
    with np.errstate(all="ignore"):  # of a parameter on its bound the Jacobian may over- or underflow
        return _search_covariance(data, jacobian, residuals, moving, measured)


def _search_covariance(
    data: Data, jacobian: np.ndarray, residuals: np.ndarray, moving: np.ndarray, measured: np.ndarray
) -> Estimate:
    names = [data.names[index] for index in np.flatnonzero(moving)]
    J, weights = jacobian[:, moving], data.weights
    inverse = _inverse((J * weights[:, None]).T @ J) if names else np.zeros((0, 0))
    measurements = len(data) if data.measurements is None else int(data.measurements.max()) + 1
    freedom = max(measurements - len(names), 1)
    noise = float(np.sqrt(np.sum(weights * residuals**2) / freedom))
    if data.law.huber is not None:
        matrix = _sandwich(residuals, data.law.huber) * measurements / freedom * inverse
    elif data.measurements is not None:
        scores = np.zeros((measurements, len(names)))
        np.add.at(scores, data.measurements, J * (weights * residuals)[:, None])
        matrix = inverse @ (scores.T @ scores) @ inverse * measurements / freedom
    else:
        matrix = noise**2 * inverse
    if not measured.any():
        return Estimate(tuple(names), matrix, noise, freedom)
    own = jacobian[:, measured]
    passed_on = -inverse @ (J * weights[:, None]).T @ own  # [F, 1]
    # The wrong R0 leaves a misfit behind as well, which the residuals' noise must not be charged with.
    misfit = float(np.sum(weights[:, None] * (own + J @ passed_on) ** 2)) / len(data.zeros)
    # With a parameter on its bound the Jacobian may have overflowed: then nothing is known of the misfit.
    shrink = freedom / (freedom + misfit) if np.isfinite(misfit) else 1.0
    noise, matrix = noise * np.sqrt(shrink), matrix * shrink
    variance = noise**2 / len(data.zeros)
    cross = variance * passed_on
    whole = np.block([[matrix + cross @ passed_on.T, cross], [cross.T, np.full((1, 1), variance)]])
    return Estimate((*names, data.names[int(np.flatnonzero(measured)[0])]), whole, noise, freedom)


def _inverse(normal: np.ndarray) -> np.ndarray:
    """The inverse, scaled to unit diagonal first; directions that the data does not tell come out huge, never small."""
    scale = np.sqrt(np.maximum(np.diag(normal), 1e-300))
    scaled = normal / np.outer(scale, scale)
    if not np.all(np.isfinite(scaled)):
        return np.full_like(normal, np.inf)
    values, vectors = np.linalg.eigh(scaled)
    values = np.maximum(values, 1e-15)
    return (vectors / values) @ vectors.T / np.outer(scale, scale)


def _sandwich(residuals: np.ndarray, delta: float) -> float:
    if not np.any(residuals):
        return 0.0
    derivative = np.clip(residuals, -delta, delta)
    # The median absolute deviation of a normal sample is .6745 of its standard deviation; 1.06 s n^-1/5 is the usual
    # width of a normal kernel.
    spread = np.median(np.abs(residuals)) / 0.6745
    width = max(1.06 * spread * len(residuals) ** -0.2, 1e-300)
    near = scipy.stats.norm.cdf((delta - residuals) / width) - scipy.stats.norm.cdf((-delta - residuals) / width)
    return float(np.mean(derivative**2) / np.mean(near) ** 2)


def unidentified(names: tuple[str, ...], jacobian: np.ndarray) -> list[Flag]:
    """A doubt where free parameters can change together without a trace at the points: Jacobian [N, F] of low rank."""
    if not names:
        return []
    scale = np.maximum(np.linalg.norm(jacobian, axis=0), 1e-300)
    _, sizes, directions = np.linalg.svd(jacobian / scale, full_matrices=False)
    lost = directions[sizes < 1e-7]
    if not len(lost):
        return []
    part = np.flatnonzero(np.max(np.abs(lost), axis=0) > 0.05)
    blamed = tuple(names[index] for index in part)
    text = f"the data does not tell {', '.join(blamed)} apart: they can change together without changing the fit"
    return [Flag("not_identified", text, blamed)]
