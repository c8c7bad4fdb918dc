"""Laws of several columns (Tan, IsoCompute, Kaplan, Chinchilla) fitted to tables from files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.scaling.files import read_table
from jaxrl_llm.scaling.fit import Fit, fit
from jaxrl_llm.scaling.fitted import finite
from jaxrl_llm.scaling.law import Law
from jaxrl_llm.scaling.sources import split_groups
from jaxrl_llm.scaling.table import law_named
from jaxrl_llm.scaling.tan import both_axes
from jaxrl_llm.types import UserError


@dataclass(frozen=True)
class LawFit:
    """A law fitted to the rows of a table. `data` holds the law's columns and its response by name [N], `used` marks
    the rows that were fitted (the others are held out), `labels` [N] the groups of laws with a parameter for each.
    `fit` is None where the rows cannot carry one, and then `reason` says why. `ahead` [K] are further values of a
    single column at which a prediction is asked for."""

    name: str
    path: Path
    law: str
    data: Mapping[str, np.ndarray]
    used: np.ndarray
    labels: tuple[str, ...] | None
    fit: Fit | None
    reason: str | None
    ahead: tuple[float, ...]

    def predicted(self) -> np.ndarray:
        """The fitted response at every row [N]."""
        assert self.fit is not None
        columns = [self.data[column.name] for column in law_named(self.law).columns]
        if self.labels is None or not any(parameter.per_group for parameter in law_named(self.law).parameters):
            return self.fit.predict(*columns)
        values = np.full(len(columns[0]), np.nan)
        for label in dict.fromkeys(self.labels):
            rows = np.array([other == label for other in self.labels])
            if label in self.fit.data.labels:  # a model without a fitted row has no intercept
                values[rows] = self.fit.predict(*(column[rows] for column in columns), group=label)
        return values

    @property
    def forecast_error(self) -> float | None:
        """Mean absolute error on the held-out rows, in the response's unit; None without any."""
        if self.fit is None or self.used.all():
            return None
        misses = np.abs(self.predicted() - self.data[law_named(self.law).response.name])[~self.used]
        return float(np.mean(misses)) if np.all(np.isfinite(misses)) else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The doubts about the fit."""
        return self.fit.warnings if self.fit is not None else ()

    def describe(self) -> dict[str, Any]:
        """Plain numbers for strict JSON: what is unknown is None."""
        law = law_named(self.law)
        found: dict[str, Any] = {
            "curve": self.name,
            "file": str(self.path),
            "law": self.law,
            "params": None,
            "intervals": None,
            **{column.name: self.data[column.name].tolist() for column in (*law.columns, law.response)},
            "fitted": self.used.tolist(),
            "residuals": None,
            "predictions": [],
            "forecast_error": self.forecast_error,
            "error": self.reason,
        }
        if self.fit is not None:
            described = self.fit.describe()
            found |= {"params": described.pop("params"), "intervals": described.pop("interval"), **described}
            predicted, response = self.predicted(), self.data[law.response.name]
            # In the law's own link: laws of losses are fitted in ln.
            link = np.log if law.log_function is not None else np.asarray
            found["residuals"] = (link(response) - link(predicted))[self.used].tolist()
            for row in np.flatnonzero(~self.used).tolist():
                found["predictions"].append(self._prediction(law, row, float(predicted[row]), float(response[row])))
            for value in self.ahead:
                entry = {law.columns[0].name: value, "predicted": float(self.fit.predict(value)), "observed": None}
                found["predictions"].append(entry)
        return finite({**found, "warnings": list(self.warnings)})

    def _prediction(self, law: Law, row: int, predicted: float, observed: float) -> dict[str, Any]:
        at = {column.name: float(self.data[column.name][row]) for column in law.columns}
        label = {} if self.labels is None else {"group": self.labels[row]}
        return {**at, **label, "predicted": predicted, "observed": observed}


def fit_law(
    path: str | Path,
    law: str,
    *,
    x: str | None = None,
    y: str | None = None,
    group: str | None = None,
    upto: float | None = None,
    fixed: Mapping[str, float] | None = None,
    ahead: Sequence[float] = (),
) -> list[LawFit]:
    """Fit a law of `table.LAWS` to a CSV, JSONL or JSON file.

    Columns have the law's own names, or those of `x` (in the law's order, with commas) and `y`. "tan_both" reads N, C
    and D. `group` names the column of models for laws with a parameter for each model; for other laws it makes a fit
    for each of its values. With `upto` only rows whose last column (the compute or data) is at most that are fitted.
    Raises UserError naming file and line for what cannot be read.
    """
    rule = law_named(law)
    if rule.levels is not None:
        raise UserError(f"{law} is a law of reward over compute: it is fitted to curves")
    table = read_table(path)
    names = ["N", "C", "D"] if law == "tan_both" else [column.name for column in rule.columns]
    given = names if x is None else [name.strip() for name in x.split(",")]
    if len(given) != len(names):
        raise UserError(f"{law} has the columns {', '.join(names)}; --x names {len(given)}: {x}")
    if upto is not None and (
        law == "tan_both" or names[-1] not in ("C", "X", "D") or law in ("kaplan_ND", "chinchilla")
    ):
        raise UserError(f"{law} has no compute axis to fit a first part of; leave --upto out")
    if ahead and len(names) > 1:
        raise UserError(
            f"{law} has {len(names)} columns, so --at cannot name a point of it; use the predictions of a plan"
        )
    per_model = any(parameter.per_group for parameter in rule.parameters)
    parts = [(Path(path).stem, table)] if group is None or per_model else split_groups(table, group)
    made = []
    for name, part in parts:
        data = {column: part.numbers(own) for column, own in zip(names, given, strict=True)}
        data[rule.response.name] = part.numbers(y or rule.response.name)
        labels = tuple(map(str, part.values(group))) if group is not None and per_model else None
        made.append(_fit_part(name, Path(path), law, data, labels, upto, fixed, tuple(ahead)))
    return made


def _fit_part(
    name: str,
    path: Path,
    law: str,
    data: dict[str, np.ndarray],
    labels: tuple[str, ...] | None,
    upto: float | None,
    fixed: Mapping[str, float] | None,
    ahead: tuple[float, ...],
) -> LawFit:
    weights: np.ndarray | None = None
    measurements: np.ndarray | None = None
    if law == "tan_both":
        data, options = both_axes(data["N"], data["C"], data["D"], data["loss"])
        weights, measurements = options["weights"], options["measurements"]
        labels = None if labels is None else labels + labels
    last = law_named(law).columns[-1].name
    used = np.ones(len(data[last]), bool) if upto is None else data[last] <= upto
    found, reason = None, None
    try:
        found = fit(
            law,
            {column: values[used] for column, values in data.items()},
            groups=None if labels is None else [label for label, kept in zip(labels, used, strict=True) if kept],
            fixed=fixed,
            weights=weights,
            measurements=measurements,
        )
    except UserError as error:
        reason = str(error)
    return LawFit(name, path, law, data, used, labels, found, reason, ahead)
