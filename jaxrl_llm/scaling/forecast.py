"""Forecast a run: fit the first half of its evaluation curve, see how the second half came out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.scaling.bootstrap import RESAMPLES, Bootstrap, bootstrap
from jaxrl_llm.scaling.curves import Axis, Curve, curve_of_points
from jaxrl_llm.scaling.doubts import reaches
from jaxrl_llm.scaling.fit import LEVEL, Fit, fit
from jaxrl_llm.types import RunPoint, UserError

_GRID = 160  # computes at which the band is drawn


@dataclass(frozen=True)
class FittedPart:
    """One fit with its uncertainty: 95 % intervals of A, B and C_mid, share of resamples whose refit converged, and
    the prediction band over `grid` [M] (compute, from the curve's least positive compute to its last)."""

    fit: Fit
    interval: dict[str, tuple[float, float]]
    refits_converged: float
    grid: np.ndarray
    band_low: np.ndarray
    band_high: np.ndarray
    warnings: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        fit = self.fit
        return {
            "law": fit.law,
            **fit.params,
            "r0_source": fit.r0_source,
            "interval": {name: list(bounds) for name, bounds in self.interval.items()},
            "level": LEVEL,
            "noise": fit.noise,
            "ssr": fit.objective,
            "points": fit.points,
            "converged": fit.converged,
            "refits_converged": self.refits_converged,
            "undetermined": self.fit.undetermined,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Forecast:
    """The first part's fit against the held-out rest.

    `fit` is None where the first part cannot carry one, and then `reason` says why; likewise `full` (the fit of the
    entire curve) and `full_reason`. `forecast_error` is the mean absolute error on the held-out points, in the unit
    of the reward; None without a fit or without such points.
    """

    axis: str
    curve: Curve
    split: float  # points up to this compute were fitted
    fit: FittedPart | None
    reason: str | None
    full: FittedPart | None
    full_reason: str | None
    predicted: np.ndarray  # at the held-out points
    forecast_error: float | None

    @property
    def held_out(self) -> Curve:
        """The points beyond `split`."""
        return self.curve.where(self.curve.compute > self.split)

    def describe(self) -> dict[str, Any]:
        """Plain numbers for JSON, without nan: what is unknown is None."""
        held_out = self.held_out
        return {
            "axis": self.axis,
            "points": len(self.curve),
            "split": self.split,
            "fit": None if self.fit is None else self.fit.describe(),
            "reason": self.reason,
            "forecast_error": self.forecast_error,
            "held_out": {
                "compute": held_out.compute.tolist(),
                "reward": held_out.reward.tolist(),
                "predicted": self.predicted.tolist(),
            },
            "full": None if self.full is None else self.full.describe(),
            "full_reason": self.full_reason,
        }


def forecast(
    points: Sequence[RunPoint], axis: Axis = "flops", *, resamples: int = RESAMPLES, seed: int = 0
) -> Forecast:
    """Fit the first half (by compute) of a run's evaluation curve on one axis and predict the second half.

    Never raises for a curve that cannot be fitted: the result then carries the reason.
    """
    try:
        curve = curve_of_points(points, axis)
    except UserError as error:
        return no_forecast(axis, str(error))
    return forecast_curve(curve, axis=axis, resamples=resamples, seed=seed)


def no_forecast(axis: str, reason: str) -> Forecast:
    """The forecast of a run whose points are no curve on this axis."""
    nothing = Curve(np.array([]), np.array([]))
    return Forecast(axis, nothing, 0.0, None, reason, None, reason, np.array([]), None)


def forecast_curve(
    curve: Curve,
    *,
    axis: str = "compute",
    upto: float | None = None,
    lower: float = 0.0,
    upper: float = 1.0,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Forecast:
    """`forecast` for any curve; the points up to compute `upto` (default: half of the last) are fitted."""
    last = float(curve.compute[-1]) if len(curve) else 0.0
    split = last / 2 if upto is None else float(upto)
    part, reason = _fit_part(curve, curve.where(curve.compute <= split), lower, upper, resamples, seed)
    if reason is not None:
        reason = f"of {len(curve)} points those up to compute {split:.4g} cannot be fitted: {reason}"
    full, full_reason = _fit_part(curve, curve, lower, upper, resamples, seed)
    held_out = curve.where(curve.compute > split)
    predicted, error = np.array([]), None
    if part is not None and len(held_out):
        predicted = part.fit.predict(held_out.compute)
        error = float(np.mean(np.abs(predicted - held_out.reward)))
    return Forecast(axis, curve, split, part, reason, full, full_reason, predicted, error)


def _fit_part(
    curve: Curve, part: Curve, lower: float, upper: float, resamples: int, seed: int
) -> tuple[FittedPart | None, str | None]:
    try:
        found = fit("sigmoid", part, bounds={"A": (lower, upper), "R0": (lower, upper)})
    except UserError as error:
        return None, str(error)
    drawn = bootstrap(found, resamples=resamples, seed=seed)
    positive = curve.compute[curve.compute > 0]
    grid = np.geomspace(positive[0], positive[-1], _GRID)
    low, high = drawn.band(grid)
    interval = {name: drawn.interval()[name] for name in ("A", "B", "C_mid")}
    warnings = (*found.warnings, *_interval_warnings(found, interval, drawn, upper))
    return FittedPart(found, interval, drawn.converged, grid, low, high, tuple(dict.fromkeys(warnings))), None


def _interval_warnings(fit: Fit, interval: dict[str, tuple[float, float]], drawn: Bootstrap, upper: float) -> list[str]:
    found = []
    low, high = interval["A"]
    if reaches(high, upper) and not reaches(fit.params["A"], upper):
        found.append(f"the interval of A reaches its bound {upper:g}: the data hardly limits A from above")
    if high - low > fit.params["A"] - fit.params["R0"] and not any(flag.code == "wide_interval" for flag in fit.flags):
        found.append(f"the interval of A, {low:.3g} to {high:.3g}, is wider than the fitted gain A - R0")
    if drawn.converged < 0.95:
        found.append(f"only {drawn.converged:.0%} of the resampled fits converged")
    return found
