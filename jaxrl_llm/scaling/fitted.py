"""One curve from a file with the law fitted to it: parameters, intervals, residuals, forecasts and every doubt."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.scaling.bootstrap import RESAMPLES, Bootstrap, bootstrap
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import Fit, fit
from jaxrl_llm.scaling.protocol import fit_published_protocol
from jaxrl_llm.scaling.sources import NamedCurve
from jaxrl_llm.scaling.table import law_named
from jaxrl_llm.scaling.windows import Window, describe_windows, rolling_windows
from jaxrl_llm.types import UserError

AHEAD = (2.0, 4.0)  # the last compute times these is where a forecast is given


@dataclass(frozen=True)
class Prediction:
    """The fitted reward at one compute, the 95 % band in which an evaluation there should fall (None without a
    bootstrap), and the reward that was measured there (None ahead of the curve)."""

    compute: float
    predicted: float
    low: float | None
    high: float | None
    observed: float | None


@dataclass(frozen=True)
class FittedCurve:
    """`fitted` are the points that the fit used (those up to `upto`), `held_out` the later ones. `fit` is None where
    the points cannot carry one, and then `reason` says why. `windows` are fits of the curve's first eighth, quarter and
    half against what came after (of the entire curve, whatever `upto`; none of the published protocol)."""

    source: NamedCurve
    law: str
    protocol: str
    upto: float | None
    fitted: Curve
    held_out: Curve
    fit: Fit | None
    reason: str | None
    drawn: Bootstrap | None
    predictions: tuple[Prediction, ...]
    windows: tuple[Window, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """The doubts about the file's points, then those about the fit."""
        own = self.fit.warnings if self.fit is not None else ()
        refits = ()
        if self.drawn is not None and self.drawn.converged < 0.95:
            refits = (f"only {self.drawn.converged:.0%} of the resampled fits converged: the bands rest on those",)
        return (*self.source.warnings, *own, *refits)

    @property
    def forecast_error(self) -> float | None:
        """Mean absolute error on the held-out points, in the unit of the reward; None without any."""
        misses = [abs(p.predicted - p.observed) for p in self.predictions if p.observed is not None]
        return float(np.mean(misses)) if misses else None

    def describe(self) -> dict[str, Any]:
        """Plain numbers for strict JSON: what is unknown is None."""
        source = self.source
        found: dict[str, Any] = {
            "curve": source.name,
            "file": str(source.path),
            "x": source.x,
            "y": source.y,
            "law": self.law,
            "protocol": self.protocol,
            "upto": self.upto,
            "params": None,
            "intervals": None,
            "compute": self.fitted.compute.tolist(),
            "reward": self.fitted.reward.tolist(),
            "residuals": None,
            "predictions": [vars(prediction) for prediction in self.predictions],
            "forecast_error": self.forecast_error,
            "windows": describe_windows(self.windows),
            "error": self.reason,
        }
        if self.fit is not None:
            described = self.fit.describe()
            found |= {"params": described.pop("params"), "intervals": described.pop("interval")}
            found["residuals"] = (self.fitted.reward - self.at(self.fitted.compute)).tolist()
            found |= described
        return finite({**found, "warnings": list(self.warnings)})

    def at(self, compute: np.ndarray) -> np.ndarray:
        """The fitted reward after `compute` [M]."""
        assert self.fit is not None
        return self.fit.predict(compute)


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: a float that is neither becomes None, inside any nesting."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def fit_curve(
    source: NamedCurve,
    *,
    law: str = "sigmoid",
    protocol: str = "least_squares",
    upto: float | None = None,
    fixed: Mapping[str, float] | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    at: Sequence[float] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> FittedCurve:
    """Fit one curve: the points up to compute `upto` (default: all), the later ones held out.

    `law` is "sigmoid" or "power_law"; `protocol` "least_squares" or, for the sigmoid, "published" (ScaleRL's grids;
    compute in GPU-hours). `fixed` holds parameters by name, `bounds` those of the reward. Predictions are made at the
    held-out points and at the computes `at` (default: twice and four times the last). A curve that cannot be fitted is
    no error here: the result carries the reason. Raises UserError for options that mean nothing and for a reward
    outside the bounds (with file and line).
    """
    if law_named(law).levels is None:
        raise UserError(f"{law} is no law of reward over compute; choose sigmoid or power_law, or fit a table")
    if protocol not in ("least_squares", "published"):
        raise UserError(f"unknown protocol {protocol!r}; choose least_squares or published")
    if protocol == "published" and (law != "sigmoid" or set(fixed or {}) - {"R0"}):
        raise UserError("the published protocol fits the sigmoid and holds R0 alone; leave the other options out")
    if upto is not None and not upto > 0:
        raise UserError(f"points up to compute {upto:g} are none; give a number above 0")
    source.check_bounds(*bounds)
    curve = source.curve
    if law != "sigmoid":  # other laws have no value at zero compute
        curve = curve.where(curve.compute > 0)
    limit = math.inf if upto is None else upto
    fitted, held_out = curve.where(curve.compute <= limit), curve.where(curve.compute > limit)
    limits = {name: bounds for name in ("A", "R0") if name in law_named(law).names and name not in (fixed or {})}
    found, reason, drawn = None, None, None
    windows: list[Window] = []
    if protocol == "least_squares":
        windows = rolling_windows(curve, law=law, fixed=fixed, bounds=limits)
    try:
        if protocol == "published":
            found = fit_published_protocol(fitted, R0=(fixed or {}).get("R0"), lower=bounds[0], upper=bounds[1])
            fitted = fitted.where(fitted.compute >= found.data.columns[0].min())  # it drops the first epoch
        else:
            found = fit(law, fitted, fixed=fixed, bounds=limits)
            drawn = bootstrap(found, kind="block", resamples=resamples, seed=seed)
    except UserError as error:
        whose = "" if upto is None else f"of {len(curve)} points those up to compute {upto:g} cannot be fitted: "
        reason = f"{whose}{error}"
    predictions = () if found is None else _predictions(found, drawn, curve, held_out, at)
    return FittedCurve(source, law, protocol, upto, fitted, held_out, found, reason, drawn, predictions, tuple(windows))


def _predictions(
    found: Fit, drawn: Bootstrap | None, curve: Curve, held_out: Curve, at: Sequence[float]
) -> tuple[Prediction, ...]:
    ahead = np.array(at or [float(curve.compute[-1]) * times for times in AHEAD], np.float64)
    if np.any(~(ahead > 0)):
        raise UserError("a forecast needs a compute above 0")
    compute = np.concatenate([held_out.compute, ahead])
    observed = [*held_out.reward.tolist(), *[None] * len(ahead)]
    low, high = drawn.band(compute) if drawn is not None else (np.full(len(compute), np.nan),) * 2
    rows = zip(compute.tolist(), found.predict(compute).tolist(), low.tolist(), high.tolist(), observed, strict=True)
    return tuple(Prediction(C, R, finite(a), finite(b), seen) for C, R, a, b, seen in rows)
