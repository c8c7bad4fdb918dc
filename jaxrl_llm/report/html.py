"""The HTML report of a run: one file, nothing loaded from elsewhere."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np

from jaxrl_llm.report import charts
from jaxrl_llm.report.fitting import DEFAULT_AXIS, describe_fits, forecast_run, forecast_sources, write_atomically
from jaxrl_llm.report.run_files import Record, RunFiles, number, read_run
from jaxrl_llm.report.summary import summarise_files
from jaxrl_llm.report.template import PAGE
from jaxrl_llm.scaling.forecast import Forecast
from jaxrl_llm.scaling.plots import forecast_figure

_SAMPLES = 6  # shown from the start of the run, and as many from its end
_LONGEST_TEXT = 1500
_AXIS_NAMES = {"flops": "FLOPs", "tokens": "tokens", "device_seconds": "device-seconds"}


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run directory, finished or not, and return its path.

    Raises UserError if the directory is not a run's.
    """
    run = read_run(run_dir)
    path = run.path / "report.html"
    write_atomically(path, render_report(run))
    return path


def render_report(run: RunFiles) -> str:
    """The page as text."""
    forecasts, by_source = forecast_run(run), forecast_sources(run)
    summary = summarise_files(run, describe_fits(run, forecasts, by_source))
    main = forecasts[DEFAULT_AXIS]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(PAGE).render(
        name=run.path.resolve().name,
        state=summary["state"],
        summary=summary,
        tiles=_tiles(summary),
        warnings=_warnings(run, summary, main, by_source),
        reason=main.reason,
        curve_figures=_curve_figures(run, main) + _source_figures(run, by_source),
        fit_rows=_fit_rows(
            {_AXIS_NAMES[axis]: found for axis, found in forecasts.items()}
            | {f"{name} over {_AXIS_NAMES[DEFAULT_AXIS]}": found for name, found in by_source.items()}
        ),
        charts=[
            {
                "id": title.lower().replace(" ", "-"),
                "title": title,
                "how": how,
                "src": None if figure is None else charts.image(figure),
            }
            for title, how, figure in charts.training_charts(run)
        ],
        prompts=_prompts(summary),
        totals=_totals(summary),
        samples=_samples(run),
        config_text=run.config_text,
        environment_text=json.dumps(run.environment, indent=1) if run.environment else "",
    )


def _tiles(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    fit = summary["fit"]
    forecast_note = "no forecast, see below"
    if fit is not None:
        low, high = fit["interval"]["A"]
        forecast_note = f"95 %: {low:.3f} to {high:.3f}"
        if "A" in fit["undetermined"]:
            forecast_note = "not determined by the first half, see below"
    known_A = fit["A"] if fit is not None and "A" not in fit["undetermined"] else None
    metric = summary["metric"] or "evaluation"
    return [
        _tile(f"{metric}, last", summary["eval_last"], ".3f", f"first {_text(summary['eval_first'], '.3f')}"),
        _tile(f"{metric}, best", summary["eval_best"], ".3f", f"{summary['evaluations']} evaluations"),
        _tile("forecast asymptote A", known_A, ".3f", forecast_note),
        _tile("forecast error", summary["forecast_error"], ".4f", "mean absolute, held-out half"),
        _tile("largest lag", summary["lag_max"], "d", f"bound {_text(summary['lag_bound'], 'd')}"),
        _tile("largest mismatch", summary["mismatch_max"], ".2e", "nats, sampler against trainer"),
        _tile("truncated completions", summary["truncation_rate"], ".2%", "of all training completions"),
        _tile("throughput", summary["tokens_per_s"], ",.0f", "generated tokens per second"),
    ]


def _tile(label: str, value: float | None, form: str, note: str) -> dict[str, str]:
    return {"label": label, "value": _text(value, form), "note": note}


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _warnings(
    run: RunFiles, summary: Mapping[str, Any], main: Forecast, by_source: Mapping[str, Forecast]
) -> list[str]:
    named = {"Forecast": main} | {f"Forecast of {name}": forecast for name, forecast in by_source.items()}
    found = [f"{name}: {text}." for name, f in named.items() for text in (f.fit.warnings if f.fit else ())]
    if (
        summary["lag_max"] is not None
        and summary["lag_bound"] is not None
        and summary["lag_max"] > summary["lag_bound"]
    ):
        found.append(f"The lag reached {summary['lag_max']}, beyond its bound {summary['lag_bound']}.")
    if (head := run.environment.get("head_dtype", "float32")) != "float32":
        found.append(f"Ablation: the output head computed in {head}, in trainer and sampler.")
    if (summary["truncation_rate"] or 0) > 0.10:
        found.append(
            f"{summary['truncation_rate']:.1%} of the completions were truncated; 10 to 15 % precede instability."
        )
    missing = _unaccounted(summary)
    if missing:
        found.append(
            f"The ledger does not add up: {missing} prompts issued are neither trained, dropped nor in flight."
        )
    broken = sum(1 for line in run.metrics if _holds_non_finite(line))
    if broken:
        found.append(f"{broken} steps hold numbers that are not finite; the charts leave those numbers out.")
    found.extend(
        f"{count} lines of {name} could not be read and were left out." for name, count in run.unreadable.items()
    )
    return found


def _holds_non_finite(line: Record) -> bool:
    return any(isinstance(value, float) and not math.isfinite(value) for value in line.values())


def _unaccounted(summary: Mapping[str, Any]) -> int | None:
    counts = [summary[key] for key in ("prompts_issued", "prompts_trained", "prompts_in_flight")]
    if any(count is None for count in counts):
        return None
    issued, trained, in_flight = counts
    return issued - trained - in_flight - sum(summary["prompts_dropped"].values())


def _curve_figures(run: RunFiles, main: Forecast) -> list[dict[str, str]]:
    """The curve on both axes, each where two points at least have a place on it (the accuracy chart has them all)."""
    metric = (run.metric or "reward").replace("$", r"\$")
    scales: list[tuple[Literal["linear", "log"], str]] = []
    if len(main.curve) > 1:
        scales.append(("linear", "Evaluation curve"))
    if np.count_nonzero(main.curve.compute) > 1:
        scales.append(("log", "Evaluation curve, logarithmic compute"))
    return [
        {"title": title, "src": charts.image(forecast_figure(main, x_scale=scale, y_label=metric))}
        for scale, title in scales
    ]


def _source_figures(run: RunFiles, by_source: Mapping[str, Forecast]) -> list[dict[str, str]]:
    """The curve of each source of a mixture."""
    metric = run.metric or "reward"
    return [
        {
            "title": f"Evaluation curve of {name}",
            "src": charts.image(forecast_figure(found, y_label=f"{metric}, {name}".replace("$", r"\$"))),
        }
        for name, found in by_source.items()
        if len(found.curve) > 1
    ]


def _fit_rows(forecasts: Mapping[str, Forecast]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, found in forecasts.items():
        parts = [(f"first half, {name}", found.fit, found.reason, found.forecast_error)]
        parts.append((f"entire curve, {name}", found.full, found.full_reason, None))
        for label, part, reason, error in parts:
            if part is None:
                rows.append({"label": label, "reason": reason})
                continue
            fit, interval = part.fit, part.interval
            rows.append(
                {
                    "label": label,
                    "reason": None,
                    "points": fit.points,
                    **{
                        key: "not determined" if key in fit.undetermined else format(fit.params[key], form)
                        for key, form in (("A", ".3f"), ("B", ".3g"), ("C_mid", ".3g"), ("R0", ".3f"))
                    },
                    "error": _text(error, ".4f"),
                    **{
                        f"{key}_interval": "{:{form}} to {:{form}}".format(*interval[key], form=form)
                        for key, form in (("A", ".3f"), ("B", ".3g"), ("C_mid", ".3g"))
                    },
                }
            )
    # Where nothing could be fitted the page gives the reason once, above.
    return rows if any(row["reason"] is None for row in rows) else []


def _prompts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    dropped = summary["prompts_dropped"]
    rows = [("issued", _text(summary["prompts_issued"], ",d")), ("trained", _text(summary["prompts_trained"], ",d"))]
    rows.extend((f"dropped: {reason}", f"{count:,d}") for reason, count in sorted(dropped.items()))
    if not dropped:
        rows.append(("dropped", "0" if summary["prompts_issued"] is not None else "-"))
    rows.append(("in flight", _text(summary["prompts_in_flight"], ",d")))
    unaccounted = _unaccounted(summary)
    if unaccounted is not None:
        rows.append(("unaccounted for", f"{unaccounted:,d}"))
    return rows


def _totals(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("tokens generated", _text(summary["tokens_generated"], ",d")),
        ("tokens trained", _text(summary["tokens_trained"], ",d")),
        ("FLOPs, training and sampling", _text(summary["flops"], ".3e")),
        ("device-seconds", _text(summary["device_seconds"], ",.1f")),
        ("wall clock, seconds", _text(summary["wall_s"], ",.1f")),
    ]


def _samples(run: RunFiles) -> list[dict[str, str]]:
    samples = run.samples
    if len(samples) > 2 * _SAMPLES:
        samples = samples[:_SAMPLES] + samples[-_SAMPLES:]
    shown = []
    for sample in samples:
        reward = number(sample, "reward")
        shown.append(
            {
                "step": str(sample.get("step", "")),
                "reward": f"{reward:g}" if math.isfinite(reward) else "-",
                "finish": str(sample.get("finish", "")),
                **{key: _shortened(sample.get(key)) for key in ("prompt", "completion", "answer")},
            }
        )
    return shown


def _shortened(value: Any) -> str:
    text = "" if value is None else str(value)
    return (
        text
        if len(text) <= _LONGEST_TEXT
        else f"{text[:_LONGEST_TEXT]} [... {len(text) - _LONGEST_TEXT} more characters]"
    )
