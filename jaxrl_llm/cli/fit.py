"""`jaxrl fit`: a law fitted to every curve of files, logs and run directories."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from jaxrl_llm.cli.curves import first_part, pairs, read_all, write_objects
from jaxrl_llm.scaling.fitted import FittedCurve, fit_curve
from jaxrl_llm.scaling.law_data import LawFit, fit_law
from jaxrl_llm.scaling.plots import fits_figure, save_figure
from jaxrl_llm.scaling.table import law_named
from jaxrl_llm.types import UserError


@dataclass(frozen=True)
class FitOptions:
    """What the command line asks for; see `jaxrl fit --help`."""

    law: str
    protocol: str
    upto: str | None
    fixed: Sequence[str]
    at: Sequence[float]
    lower: float
    upper: float
    x: str | None
    y: str | None
    group: str | None
    json: str | None
    plot: Path | None


def fit_sources(sources: Sequence[Path], options: FitOptions) -> None:
    """Fit, print or write, plot. Raises UserError, after everything else is out, where a curve could not be fitted."""
    fixed = pairs(options.fixed, "--fix")
    results: list[FittedCurve] | list[LawFit]
    if law_named(options.law).levels is None:
        results = _tables(sources, options, fixed)
    else:
        curves = [
            fit_curve(
                source,
                law=options.law,
                protocol=options.protocol,
                upto=first_part(source.curve, options.upto),
                fixed=fixed,
                bounds=(options.lower, options.upper),
                at=options.at,
            )
            for source in read_all(sources, options.x, options.y, options.group)
        ]
        if options.plot is not None:
            save_figure(fits_figure(curves), options.plot)
        results = curves
    if options.json is not None:
        write_objects([result.describe() for result in results], options.json)
    if options.json != "-":
        for result in results:
            typer.echo("\n".join(_lines(result)))
    lost = [result for result in results if result.fit is None]
    if lost:
        more = f" (and {len(lost) - 1} other curves)" if len(lost) > 1 else ""
        raise UserError(f"{_name(lost[0])}{more} could not be fitted: {lost[0].reason}")


def _tables(sources: Sequence[Path], options: FitOptions, fixed: dict[str, float]) -> list[LawFit]:
    if options.plot is not None:
        raise UserError(f"--plot draws rewards over compute, which {options.law} does not fit; leave it out")
    if options.protocol != "least_squares":
        raise UserError(f"the protocol {options.protocol} is one of the sigmoid, not of {options.law}")
    upto = None
    if options.upto is not None:
        try:
            upto = float(options.upto)
        except ValueError:
            raise UserError(f"--upto {options.upto} must be a number for {options.law}") from None
    return [
        found
        for path in sources
        for found in fit_law(
            path,
            options.law,
            x=options.x,
            y=options.y,
            group=options.group,
            upto=upto,
            fixed=fixed,
            ahead=options.at,
        )
    ]


def _name(result: FittedCurve | LawFit) -> str:
    return result.source.name if isinstance(result, FittedCurve) else result.name


def _lines(result: FittedCurve | LawFit) -> list[str]:
    """One fit for a person; a number that the data does not tell is not printed as one."""
    head = f"{_name(result)}: {result.law}"
    if result.fit is None:
        return [head, f"  no fit: {result.reason}", *(f"  warning: {text}" for text in result.warnings)]
    found = result.fit
    if isinstance(result, FittedCurve):
        protocol = "" if result.protocol == "least_squares" else f", {result.protocol} protocol"
        head += f"{protocol}, {found.points} points up to {result.source.x} {result.fitted.compute[-1]:.4g}"
    else:
        head += f", {found.points} points"
    lines = [head, *(f"  {found.text(name)}" for name in found.params)]
    lines.append(f"  residual noise {found.noise:.3g}")
    if result.forecast_error is not None:
        held_out = len(result.held_out) if isinstance(result, FittedCurve) else int((~result.used).sum())
        lines.append(f"  held out: {held_out} points, mean absolute error {result.forecast_error:.4g}")
    lines.extend(_ahead(result))
    if isinstance(result, FittedCurve) and any(window.error is not None for window in result.windows):
        shares = ", ".join(
            f"{window.fraction:g}: {'no fit' if window.error is None else format(window.error, '.3g')}"
            for window in result.windows
        )
        lines.append(f"  mean absolute error on the rest after a first part of {shares}")
    return [*lines, *(f"  warning: {text}" for text in result.warnings)]


def _ahead(result: FittedCurve | LawFit) -> list[str]:
    assert result.fit is not None
    if isinstance(result, LawFit):
        column = law_named(result.law).columns[0].name
        return [f"  at {column} {value:.4g}: {float(result.fit.predict(value)):.4g}" for value in result.ahead]
    lines = []
    for prediction in result.predictions:
        if prediction.observed is None:
            value = f"{prediction.predicted:.4g}"
            if "A" in result.fit.undetermined and prediction.compute > result.source.curve.compute[-1]:
                value = "not determined, for A is not"
            elif prediction.low is not None and prediction.high is not None:
                value += f" (95%: {prediction.low:.4g} to {prediction.high:.4g})"
            lines.append(f"  at {result.source.x} {prediction.compute:.4g}: {value}")
    return lines
