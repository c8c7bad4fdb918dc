"""One JSON object that says how a run went, from its files alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.report.fitting import stored_or_new_fit
from jaxrl_llm.report.run_files import Record, RunFiles, last, number, read_run, series
from jaxrl_llm.scaling.eval_log import VALUE


def summarise(run_dir: str | Path) -> dict[str, Any]:
    """Summary of a run, finished or not; what the files do not say is None, so it is always strict JSON.

    `steps` are the steps done, `steps_planned` those asked for. `fit` is the sigmoid fitted on the first half of the
    evaluation curve (by FLOPs), None with a `fit_reason` where that half cannot carry one; `forecast_error` is its
    mean absolute error on the second half; `sources` has these of each source of a mixture alone. `truncation_rate` is
    over all training completions, the other rates and maxima over all steps, counts are cumulative. Raises UserError if
    the directory is not a run's.
    """
    run = read_run(run_dir)
    return summarise_files(run, stored_or_new_fit(run))


def summarise_files(run: RunFiles, fits: dict[str, Any]) -> dict[str, Any]:
    """`summarise` for files already read and fits (the contents of fit.json) already made."""
    metrics = run.metrics
    steps = number(run.state, "step", number(metrics[-1], "step") if metrics else 0)
    wall = last(metrics, "wall_s")
    return {
        "run": run.path.name,
        "state": str(run.state.get("state", "unknown")),
        "message": None if run.state.get("message") is None else str(run.state["message"]),
        "steps": int(steps),
        "steps_planned": _count(run.state.get("steps")),
        "metric": run.metric,
        "evaluations": len(run.evaluations),
        **_curve(run, VALUE, fits),
        "fit_axis": fits["axis"],
        "sources": {name: _curve(run, f"{VALUE}/{name}", found) for name, found in fits["sources"].items()},
        "lag_max": _count(_largest(metrics, "lag_max")),
        "lag_bound": _count(last(metrics, "lag_bound")),
        "mismatch_max": _plain(_largest(run.evaluations, "mismatch_max")),
        "truncation_rate": _plain(truncation_rate(metrics)),
        "prompts_issued": _count(last(metrics, "prompts_issued")),
        "prompts_trained": _count(last(metrics, "prompts_trained")),
        "prompts_dropped": _reasons(last(metrics, "prompts_dropped")),
        "prompts_in_flight": _count(last(metrics, "prompts_in_flight")),
        "tokens_generated": _count(last(metrics, "tokens_generated")),
        "tokens_trained": _count(last(metrics, "tokens_trained")),
        "flops": _plain(last(metrics, "flops")),
        "device_seconds": _plain(last(metrics, "device_seconds")),
        "tokens_per_s": _plain(throughput(metrics)),
        "trainer_wait_share": _plain(share_of_time(metrics, "trainer_wait_s")),
        "sampler_wait_share": _plain(share_of_time(metrics, "sampler_wait_s")),
        "lag_mean": _plain(_mean(metrics, "lag_mean")),
        "wall_s": _plain(wall),
    }


def _curve(run: RunFiles, key: str, fits: Mapping[str, Any]) -> dict[str, Any]:
    """What one evaluation curve reached, and the forecast from its first half."""
    _, values = series(run.evaluations, key)
    fit = fits["fit"]
    return {
        "eval_first": _plain(values[0]) if values.size else None,
        "eval_last": _plain(values[-1]) if values.size else None,
        "eval_best": _plain(values.max()) if values.size else None,
        "fit": None
        if fit is None
        else {key: fit[key] for key in ("law", "A", "B", "C_mid", "R0", "interval", "undetermined", "warnings")},
        "fit_reason": fits["reason"],
        "forecast_error": fits["forecast_error"],
    }


def truncation_rate(metrics: Sequence[Record]) -> float | None:
    """Share of all training completions cut off at the length limit: the steps' rates weighted by their groups."""
    pairs = [(number(line, "truncation_rate"), number(line, "groups", 1.0)) for line in metrics]
    kept = np.array([pair for pair in pairs if np.isfinite(pair).all()]).reshape(-1, 2)
    total = kept[:, 1].sum()
    return float(kept[:, 0] @ kept[:, 1] / total) if total > 0 else None


def share_of_time(metrics: Sequence[Record], key: str) -> float | None:
    """The seconds under `key` of all steps over the seconds of those steps."""
    pairs = [(number(line, key), number(line, "step_s")) for line in metrics]
    kept = np.array([pair for pair in pairs if np.isfinite(pair).all()]).reshape(-1, 2)
    total = kept[:, 1].sum()
    return float(kept[:, 0].sum() / total) if total > 0 else None


def throughput(metrics: Sequence[Record]) -> float | None:
    """Tokens generated per second of the run's wall clock."""
    tokens, wall = last(metrics, "tokens_generated"), last(metrics, "wall_s")
    return tokens / wall if tokens is not None and wall else None


def _largest(metrics: Sequence[Record], key: str) -> float | None:
    _, values = series(metrics, key)
    return float(values.max()) if values.size else None


def _mean(metrics: Sequence[Record], key: str) -> float | None:
    _, values = series(metrics, key)
    return float(values.mean()) if values.size else None


def _plain(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _reasons(value: Any) -> dict[str, int]:
    return {str(reason): int(count) for reason, count in value.items()} if isinstance(value, dict) else {}
