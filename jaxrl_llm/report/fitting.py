"""Forecasts of a run from its evaluation curve, and the fit.json that records them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.report.run_files import RunFiles, number, read_run
from jaxrl_llm.scaling.curves import AXES, Axis
from jaxrl_llm.scaling.forecast import Forecast, forecast_curve, no_forecast
from jaxrl_llm.types import UserError

DEFAULT_AXIS: Axis = "flops"


def forecast_run(run: RunFiles) -> dict[str, Forecast]:
    """First half against second half on every compute axis. Deterministic, and never raises for a poor curve."""
    return {axis: _forecast(run, axis) for axis in AXES}


def forecast_sources(run: RunFiles) -> dict[str, Forecast]:
    """The same of each source of a mixture alone, over FLOPs."""
    return {source: _forecast(run, DEFAULT_AXIS, source) for source in run.sources}


def _forecast(run: RunFiles, axis: Axis, source: str | None = None) -> Forecast:
    try:
        return forecast_curve(run.curve(axis, source), axis=axis)
    except UserError as error:
        return no_forecast(axis, str(error))


def describe_fits(
    run: RunFiles, forecasts: Mapping[str, Forecast], by_source: Mapping[str, Forecast]
) -> dict[str, Any]:
    """What fit.json holds: the forecast over FLOPs at the top, all axes and a mixture's sources below it. Plain
    numbers, no nan."""
    axes = {axis: found.describe() for axis, found in forecasts.items()}
    chosen = axes[DEFAULT_AXIS]
    return {
        "metric": run.metric,
        **_stamp(run),
        "axis": DEFAULT_AXIS,
        "fit": chosen["fit"],
        "reason": chosen["reason"],
        "forecast_error": chosen["forecast_error"],
        "full": chosen["full"],
        "full_reason": chosen["full_reason"],
        "axes": axes,
        "sources": {source: found.describe() for source, found in by_source.items()},
    }


def fit_run(run_dir: str | Path) -> dict[str, Any]:
    """Fit a run's evaluation curves, write `fit.json` into its directory and return what was written.

    A curve that cannot be fitted is no error: `fit` is then null and `reason` says why. Raises UserError if the
    directory is not a run's.
    """
    run = read_run(run_dir)
    described = describe_fits(run, forecast_run(run), forecast_sources(run))
    write_atomically(run.path / "fit.json", json.dumps(described, indent=1, allow_nan=False) + "\n")
    return described


def stored_or_new_fit(run: RunFiles) -> dict[str, Any]:
    """The contents of fit.json if it speaks about the evaluations now on disk, else a fit made now (not written)."""
    path = run.path / "fit.json"
    if path.is_file():
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            stored = None  # cut off in mid-write or damaged: the fit is made again from the curve it came from
        if isinstance(stored, dict) and all(stored.get(key) == value for key, value in _stamp(run).items()):
            return stored
    return describe_fits(run, forecast_run(run), forecast_sources(run))


def write_atomically(path: Path, text: str) -> None:
    """Write so that a reader sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(text.encode("utf-8", errors="replace"))  # a completion may hold half of a surrogate pair
    os.replace(part, path)


def _stamp(run: RunFiles) -> dict[str, Any]:
    """Which evaluations a fit was made of, and the layout of what it says: a file of another layout is made anew."""
    last_step = int(number(run.evaluations[-1], "step")) if run.evaluations else None
    return {"layout": 3, "evaluations": len(run.evaluations), "last_step": last_step}
