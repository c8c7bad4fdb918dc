"""Which recipe is better, as ScaleRL decides it: A first; between equal ones B, refitted at a common A.

A recipe is one run or several seeds of it. Each seed is fitted alone (seeds may start from different rewards); a
recipe's A and ln B are the means of its seeds'. Their error is the larger of two: what the fits themselves say, and the
spread between seeds, pooled over all recipes because each has only a few.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.stats

from jaxrl_llm.scaling.bootstrap import bootstrap
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import LEVEL, Fit, fit
from jaxrl_llm.types import UserError

MARGIN = 0.02  # ScaleRL's error of A from run to run
RESAMPLES = 400


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard error and the degrees of freedom that the error was estimated with."""

    value: float
    error: float
    freedom: float


@dataclass(frozen=True)
class Recipe:
    """One recipe's fits. `fits` holds the seeds whose A the data determines, `lost` why others have none (by name);
    `A` is None where no seed is left. `common` are the fits with A held at the comparison's common A and `log_B` is
    ln B there; None where the recipe's A is not within the margin of the reference's. `lost_B` says why seeds of
    `fits` are not among `common`."""

    name: str
    fits: dict[str, Fit]
    lost: dict[str, str]
    A: Estimate | None
    common: dict[str, Fit] | None = None
    log_B: Estimate | None = None
    lost_B: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """One pair. `by` says what decided: "A", "B", or "none" (the data does not tell, `text` says why). `better` is None
    unless the confidence reaches the level asked for. `confidence` is the probability that the difference has the sign
    it seems to have; `holds` how many of `left_out` verdicts without one seed come out the same."""

    first: str
    second: str
    by: Literal["A", "B", "none"]
    difference: float | None
    better: str | None
    confidence: float | None
    holds: int
    left_out: int
    text: str


@dataclass(frozen=True)
class Comparison:
    """Recipes in the order given; the first is the reference of the leave-one-out table and of the verdicts."""

    recipes: tuple[Recipe, ...]
    margin: float
    level: float
    common_A: float | None
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Plain numbers for JSON, without nan."""
        rows = []
        for recipe in self.recipes:
            row: dict[str, Any] = {"recipe": recipe.name, "seeds": len(recipe.fits) + len(recipe.lost)}
            row["A"], row["A_interval"] = _ends(recipe.A, self.level)
            log_B, ends = _ends(recipe.log_B, self.level)
            row["B_at_common_A"] = None if log_B is None else float(np.exp(log_B))
            row["B_interval"] = None if ends is None else [float(np.exp(end)) for end in ends]
            reference = self.recipes[0]
            row["A_minus_reference"] = (
                None if recipe.A is None or reference.A is None else recipe.A.value - reference.A.value
            )
            row["not_fitted"] = dict(recipe.lost)
            rows.append(row)
        return {
            "reference": self.recipes[0].name,
            "margin": self.margin,
            "level": self.level,
            "common_A": self.common_A,
            "leave_one_out": rows,
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
            "warnings": list(self.warnings),
        }


def compare(
    recipes: Mapping[str, Mapping[str, Curve]],
    *,
    margin: float = MARGIN,
    level: float = LEVEL,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Comparison:
    """Compare recipes: name -> (seed's name -> curve). The first one is the reference.

    Raises UserError for fewer than two recipes. A curve that cannot be fitted, or does not determine A, is named in its
    recipe's `lost`; verdicts then say that the data does not tell.
    """
    if len(recipes) < 2:
        raise UserError(f"a comparison needs at least two recipes, got {len(recipes)}")
    if not margin >= 0 or not 0.5 < level < 1:
        raise UserError(f"margin {margin:g} must be at least 0 and level {level:g} between .5 and 1")
    found = {name: _fit_seeds(curves, bounds, None) for name, curves in recipes.items()}
    values = {name: {seed: one.params["A"] for seed, one in fits.items()} for name, (fits, _) in found.items()}
    errors = {name: {seed: _error(one, "A") for seed, one in fits.items()} for name, (fits, _) in found.items()}
    made = [Recipe(name, fits, lost, _mean(values, errors, name)) for name, (fits, lost) in found.items()]
    reference = made[0].A
    common_A = None
    if reference is not None:
        near = [r for r in made if r.A is not None and abs(r.A.value - reference.value) <= margin]
        if len(near) > 1:
            common_A = float(np.average([r.A.value for r in near if r.A], weights=[len(r.fits) for r in near]))
            made = _refit(made, [r.name for r in near], recipes, common_A, bounds)
    verdicts = tuple(_verdict(made[0], other, made, margin, level, common_A) for other in made[1:])
    return Comparison(tuple(made), margin, level, common_A, verdicts, tuple(_warnings(made)))


def _fit_seeds(
    curves: Mapping[str, Curve], bounds: tuple[float, float], A: float | None
) -> tuple[dict[str, Fit], dict[str, str]]:
    fits, lost = {}, {}
    for seed, curve in curves.items():
        try:
            limits = {"R0": bounds} if A is not None else {"A": bounds, "R0": bounds}
            one = fit("sigmoid", curve, bounds=limits, fixed=None if A is None else {"A": A})
        except UserError as error:
            lost[seed] = str(error)
            continue
        reason = one.undetermined.get("A" if A is None else "B")
        if reason is None:
            fits[seed] = one
        else:
            lost[seed] = reason
    return fits, lost


def _refit(
    made: Sequence[Recipe],
    near: Sequence[str],
    recipes: Mapping[str, Mapping[str, Curve]],
    common_A: float,
    bounds: tuple[float, float],
) -> list[Recipe]:
    refits = {
        recipe.name: _fit_seeds({seed: recipes[recipe.name][seed] for seed in recipe.fits}, bounds, common_A)
        for recipe in made
        if recipe.name in near
    }
    values = {
        name: {seed: float(np.log(one.params["B"])) for seed, one in fits.items()} for name, (fits, _) in refits.items()
    }
    errors = {name: {seed: _error(one, "B") for seed, one in fits.items()} for name, (fits, _) in refits.items()}
    return [
        dataclasses.replace(
            recipe,
            common=refits[recipe.name][0],
            log_B=_mean(values, errors, recipe.name),
            lost_B=refits[recipe.name][1],
        )
        if recipe.name in refits
        else recipe
        for recipe in made
    ]


def _error(one: Fit, name: str) -> float:
    """Standard error of a free parameter in its search coordinate (A itself, ln B)."""
    at = one.free.index(name)
    return float(np.sqrt(one.covariance[at, at]))


def _mean(
    values: Mapping[str, Mapping[str, float]],
    errors: Mapping[str, Mapping[str, float]],
    name: str,
) -> Estimate | None:
    """The mean over a recipe's seeds; its error is the fits' own, or the seeds' spread pooled over all recipes."""
    own = list(values[name].values())
    if not own:
        return None
    within = np.sqrt(np.mean(np.square(list(errors[name].values()))) / len(own))
    squares = sum(
        float(np.sum((np.array(list(v.values())) - np.mean(list(v.values()))) ** 2)) for v in values.values() if v
    )
    freedom = sum(len(v) - 1 for v in values.values() if v)
    between = np.sqrt(squares / freedom / len(own)) if freedom else 0.0
    if between > within:
        return Estimate(float(np.mean(own)), float(between), float(freedom))
    return Estimate(float(np.mean(own)), float(within), np.inf)


def _confidence(first: Estimate, second: Estimate) -> float:
    """Probability that the difference has the sign that it seems to have (Welch)."""
    variances = np.array([first.error**2, second.error**2])
    total = variances.sum()
    if total == 0:
        return 1.0 if first.value != second.value else 0.5
    freedom = total**2 / float(np.sum(variances**2 / np.array([first.freedom, second.freedom])) or 1e-300)
    return float(scipy.stats.t.cdf(abs(first.value - second.value) / np.sqrt(total), min(freedom, 1e6)))


def _verdict(
    first: Recipe, second: Recipe, made: Sequence[Recipe], margin: float, level: float, common_A: float | None
) -> Verdict:
    for recipe in (first, second):
        if recipe.A is None:
            text = f"cannot tell: A of {recipe.name} is not determined ({next(iter(recipe.lost.values()), 'no curve')})"
            return Verdict(first.name, second.name, "none", None, None, None, 0, 0, text)
    assert first.A is not None
    assert second.A is not None
    by, one, two = _decided_by(first, second, first.A, second.A, margin)
    if one is None or two is None:
        text = f"A is equal within {margin:g}, and at the common A = {common_A:.3g} the data does not determine B"
        return Verdict(first.name, second.name, "none", None, None, None, 0, 0, text)
    confidence, difference = _confidence(one, two), one.value - two.value
    ahead = first if difference > 0 else second
    holds, left_out = _left_out(first, second, made, by, ahead.name)
    if by == "A":
        what = f"A {first.A.value:.3f} and {second.A.value:.3f} differ by more than {margin:g}"
        claim = f"{ahead.name} has the higher ceiling"
    else:
        what = f"A {first.A.value:.3f} and {second.A.value:.3f} are equal within {margin:g}"
        B = " and ".join(f"{np.exp(e.value):.3g}" for e in (one, two))
        what += f"; at the common A = {common_A:.3f} B is {B}"
        claim = f"{ahead.name} is more efficient"
    certain = confidence >= level
    sure = f"confidence {_percent(confidence)}"
    verdict = f"{claim} ({sure})" if certain else f"not decided: {claim} only with {sure}"
    stable = f"; {holds} of {left_out} comparisons without one seed agree" if left_out else ""
    return Verdict(
        first.name, second.name, by, difference, ahead.name if certain else None, confidence, holds, left_out,
        f"{what}: {verdict}{stable}",
    )  # fmt: skip


def _percent(probability: float) -> str:
    """Never certain: a probability of .9999 is "over 99 %"."""
    if 0.01 <= probability <= 0.99:
        return f"{probability:.0%}".replace("%", " %")
    return "over 99 %" if probability > 0.5 else "under 1 %"


def _decided_by(
    first: Recipe, second: Recipe, A1: Estimate, A2: Estimate, margin: float
) -> tuple[Literal["A", "B"], Estimate | None, Estimate | None]:
    if abs(A1.value - A2.value) > margin:
        return "A", A1, A2
    return "B", first.log_B, second.log_B


def _left_out(
    first: Recipe, second: Recipe, made: Sequence[Recipe], by: Literal["A", "B"], ahead: str
) -> tuple[int, int]:
    """How many comparisons without one seed put the same recipe ahead, and how many there are."""

    def seeds(recipe: Recipe) -> dict[str, float]:
        fits = recipe.fits if by == "A" else recipe.common or {}
        return {seed: one.params["A"] if by == "A" else float(np.log(one.params["B"])) for seed, one in fits.items()}

    values = {recipe.name: seeds(recipe) for recipe in (first, second)}
    holds = left_out = 0
    for recipe in (first, second):
        if len(values[recipe.name]) < 2:
            continue
        for seed in values[recipe.name]:
            means = {
                name: np.mean([v for s, v in own.items() if name != recipe.name or s != seed])
                for name, own in values.items()
            }
            left_out += 1
            holds += (first.name if means[first.name] > means[second.name] else second.name) == ahead
    return holds, left_out


def _warnings(made: Sequence[Recipe]) -> list[str]:
    found = [f"{recipe.name}: {seed} is left out ({reason})" for recipe in made for seed, reason in recipe.lost.items()]
    found += [
        f"{recipe.name}: {seed} is left out of B at the common A ({reason})"
        for recipe in made
        for seed, reason in recipe.lost_B.items()
    ]
    found += [
        f"{recipe.name}: {seed}: {text}"
        for recipe in made
        for seed, one in recipe.fits.items()
        for text in one.warnings
    ]
    if all(len(recipe.fits) < 2 for recipe in made):
        found.append(
            "at most one seed of each recipe can be used: the confidence knows the noise along a run, not how far "
            f"seeds differ (ScaleRL: A within {MARGIN:g})"
        )
    return found


def _ends(estimate: Estimate | None, level: float) -> tuple[float | None, list[float] | None]:
    if estimate is None:
        return None, None
    tail = scipy.stats.t.ppf((1 + level) / 2, min(estimate.freedom, 1e6)) * estimate.error
    return estimate.value, [float(estimate.value - tail), float(estimate.value + tail)]


@dataclass(frozen=True)
class Advice:
    """Whether to end a run early: "stop", "continue" or "cannot tell"; `below` is the probability that at compute `at`
    the run's reward lies below that of `best`, the run with the highest predicted reward there."""

    run: str
    best: str
    at: float
    action: Literal["stop", "continue", "cannot tell"]
    below: float | None
    text: str


def stop_early(
    run: str,
    curves: Mapping[str, Curve],
    *,
    at: float | None = None,
    level: float = LEVEL,
    bounds: tuple[float, float] = (0.0, 1.0),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Advice:
    """Is the forecast of `run` already below another's? All `curves` by name, `run` among them.

    The rewards of all runs at compute `at` (default: where the longest curve ends) are drawn from their block
    bootstraps. "stop" where the run lies below the best with probability `level`, "continue" where it does not with
    that probability or leads; "cannot tell" between the two, and where its own data does not determine A.
    """
    if run not in curves or len(curves) < 2:
        raise UserError(f"advice on {run!r} needs its curve and at least one other, there are {', '.join(curves)}")
    horizon = max(float(curve.compute[-1]) for curve in curves.values() if len(curve)) if at is None else float(at)
    drawn: dict[str, np.ndarray] = {}
    for name, curve in curves.items():
        try:
            found = fit("sigmoid", curve, bounds={"A": bounds, "R0": bounds})
        except UserError as error:
            if name == run:
                return Advice(run, "", horizon, "cannot tell", None, f"cannot tell: {run} has no fit ({error})")
            continue
        reason = found.undetermined.get("A")
        # Where a curve has arrived its level is known, whatever its A.
        if reason is not None and horizon > curve.compute[-1]:
            if name == run:
                return Advice(run, "", horizon, "cannot tell", None, f"cannot tell: {reason}")
            continue
        drawn[name] = bootstrap(found, kind="block", resamples=resamples, seed=seed).curves(np.array([horizon]))[:, 0]
    others = {name: float(np.median(values)) for name, values in drawn.items() if name != run}
    if not others:
        return Advice(run, "", horizon, "cannot tell", None, "cannot tell: no other run has a forecast")
    best = max(others, key=lambda name: others[name])
    # The two bootstraps are independent: every draw of one meets every draw of the other.
    below = float(np.mean(drawn[run][:, None] < drawn[best][None, :]))
    mine = float(np.median(drawn[run]))
    facts = f"at compute {horizon:.4g} {run} is forecast at {mine:.3f} and {best} at {others[best]:.3f}"
    action: Literal["stop", "continue", "cannot tell"]
    if below >= level:
        action, claim = "stop", f"below with a probability of {_percent(below)}"
    elif below <= 1 - level or mine >= others[best]:
        action, claim = "continue", f"below with a probability of {_percent(below)} only"
    else:
        action, claim = "cannot tell", f"below with a probability of {_percent(below)}, neither certain nor unlikely"
    return Advice(run, best, horizon, action, below, f"{action}: {facts}, {claim}")
