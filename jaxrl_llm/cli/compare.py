"""`jaxrl compare`: which recipe is better, and whether a run is worth going on with."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from jaxrl_llm.cli.curves import first_part, write_objects
from jaxrl_llm.scaling.compare import Advice, Comparison, compare, stop_early
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fitted import finite, fit_curve
from jaxrl_llm.scaling.plots import fits_figure, save_figure
from jaxrl_llm.scaling.sources import NamedCurve, read_curves
from jaxrl_llm.types import UserError

_ARRIVED = 0.98  # a run that has come this far of the horizon is not asked to stop


@dataclass(frozen=True)
class CompareOptions:
    """What the command line asks for; see `jaxrl compare --help`."""

    margin: float
    level: float
    upto: str | None
    at: float | None
    lower: float
    upper: float
    x: str | None
    y: str | None
    group: str | None
    seed: str | None
    json: str | None
    plot: Path | None


def compare_sources(sources: Sequence[str], options: CompareOptions) -> None:
    """Read recipes, compare, advise, print or write, plot."""
    bounds = (options.lower, options.upper)
    recipes = read_recipes(sources, options)
    for seeds in recipes.values():
        for named in seeds.values():
            named.check_bounds(*bounds)
    curves = {
        recipe: {seed: _cut(named.curve, options.upto) for seed, named in seeds.items()}
        for recipe, seeds in recipes.items()
    }
    comparison = compare(curves, margin=options.margin, level=options.level, bounds=bounds)
    advice = advise(curves, options.at, options.level, bounds)
    if options.plot is not None:
        drawn = [
            fit_curve(named, upto=first_part(named.curve, options.upto), bounds=bounds)
            for seeds in recipes.values()
            for named in seeds.values()
        ]
        kinds = [recipe for recipe, seeds in recipes.items() for _ in seeds]
        save_figure(fits_figure(drawn, kinds=kinds), options.plot)
    warnings = [
        f"{recipe}: {seed}: {text}"
        for recipe, seeds in recipes.items()
        for seed, named in seeds.items()
        for text in named.warnings
    ]
    described = comparison.describe()
    described["warnings"] = warnings + described["warnings"]
    if options.json is not None:
        write_objects([finite({**described, "stop_early": [asdict(one) for one in advice]})], options.json)
    if options.json != "-":
        typer.echo("\n".join(_lines(comparison, described, advice)))


def read_recipes(sources: Sequence[str], options: CompareOptions) -> dict[str, dict[str, NamedCurve]]:
    """Recipes with their seeds: [NAME=]PATH, where a name given several times gathers seeds; the groups of a table."""
    if options.seed is not None and options.group is None:
        raise UserError("--seed tells the seeds of one recipe apart, so --group must name the column of recipes")
    recipes: dict[str, dict[str, NamedCurve]] = {}
    for source in sources:
        name, equals, path = source.partition("=")
        named = bool(equals) and not Path(source).exists()
        place = Path(path if named else source)
        group = options.group if options.seed is None else f"{options.group},{options.seed}"
        for curve in read_curves(place, x=options.x, y=options.y, group=group):
            recipe, seed = (name, curve.name) if named else (curve.name, curve.name)
            if options.seed is not None and not named:
                recipe, seed = curve.name.rsplit("/", 1)
            seeds = recipes.setdefault(recipe, {})
            if seed in seeds:
                seed = f"{place}:{seed}"
            if seed in seeds or any(other.path == curve.path and other.name == curve.name for other in seeds.values()):
                raise UserError(f"{place} is given twice for {recipe}")
            seeds[seed] = curve
    return recipes


def advise(
    curves: Mapping[str, Mapping[str, Curve]], at: float | None, level: float, bounds: tuple[float, float]
) -> list[Advice]:
    """Advice on every run that has not come as far as the longest one (or as `at`), against runs of other recipes."""
    last = [float(curve.compute[-1]) for seeds in curves.values() for curve in seeds.values() if len(curve)]
    horizon = max(last, default=0.0) if at is None else at
    found = []
    for recipe, seeds in curves.items():
        others = {
            f"{other}/{seed}" if seed != other else other: curve
            for other, theirs in curves.items()
            if other != recipe
            for seed, curve in theirs.items()
        }
        for seed, curve in seeds.items():
            if len(curve) and curve.compute[-1] < _ARRIVED * horizon:
                name = f"{recipe}/{seed}" if seed != recipe else recipe
                found.append(stop_early(name, {**others, name: curve}, at=horizon, level=level, bounds=bounds))
    return found


def _cut(curve: Curve, upto: str | None) -> Curve:
    limit = first_part(curve, upto) if len(curve) else None
    return curve if limit is None else curve.where(curve.compute <= limit)


def _lines(comparison: Comparison, described: Mapping[str, Any], advice: Sequence[Advice]) -> list[str]:
    rows = described["leave_one_out"]
    width = max(len(row["recipe"]) for row in rows)
    common = "" if comparison.common_A is None else f" at A = {comparison.common_A:.3f}"
    lines = [f"{'recipe':<{width}}  seeds  {'A':<24}{'A - reference':<15}B{common}"]
    for row in rows:
        A = _with_interval(row["A"], row["A_interval"], ".3f")
        against = "" if row["A_minus_reference"] is None else f"{row['A_minus_reference']:+.3f}"
        B = _with_interval(row["B_at_common_A"], row["B_interval"], ".3g")
        lines.append(f"{row['recipe']:<{width}}  {row['seeds']:<5}  {A:<24}{against:<15}{B}".rstrip())
    lines += [f"{verdict.first} and {verdict.second}: {verdict.text}" for verdict in comparison.verdicts]
    lines += [f"{one.run}: {one.text}" for one in advice]
    return [*lines, *(f"warning: {text}" for text in described["warnings"])]


def _with_interval(value: float | None, ends: Sequence[float] | None, form: str) -> str:
    if value is None or ends is None:
        return "-"
    low, high = (format(float(np.clip(end, -1e300, 1e300)), form) for end in ends)
    return f"{value:{form}} ({low} to {high})"
