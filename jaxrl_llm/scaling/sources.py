"""Curves from files: tables, TensorBoard logs, Weights & Biases exports and our run directories.

Whatever does not make a curve is an error that names file and line; whatever makes one doubtful is a warning that
travels with it. Nothing is repaired silently.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.eval_log import VALUE, is_run, read_lines, source_names
from jaxrl_llm.scaling.files import Table, missing, number, read_table
from jaxrl_llm.scaling.tensorboard import EventRun, has_events, is_event_file, read_events
from jaxrl_llm.types import UserError

X, Y = "compute", "reward"
MOST_POINTS = 512
_TELLS_RUNS = {
    "run", "run_id", "run_name", "runname", "name", "id", "seed", "group", "recipe", "experiment", "method",
    "algorithm", "config", "label", "curve", "trial",
}  # fmt: skip
_WANDB_OWN = {"_step", "_runtime", "_timestamp", "_wandb"}


@dataclass(frozen=True)
class NamedCurve:
    """A curve with where it came from: `x` and `y` name its columns, `places` the line or step of each point."""

    name: str
    path: Path
    x: str
    y: str
    curve: Curve
    places: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def check_bounds(self, lower: float, upper: float) -> None:
        """Raise UserError naming file and line of a reward outside [lower, upper], or bounds that are none."""
        if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
            raise UserError(f"the reward's bounds {lower:g} and {upper:g} are not a lower and a higher number")
        outside = np.flatnonzero((self.curve.reward < lower) | (self.curve.reward > upper))
        if outside.size:
            at = outside[0]
            raise UserError(
                f"{self.path} {self.places[at]}: {self.y} is {self.curve.reward[at]:g}, outside [{lower:g}, {upper:g}] "
                f"({outside.size} such points); give the reward's own bounds (--lower, --upper)"
            )


def read_curves(
    path: str | Path,
    *,
    x: str | None = None,
    y: str | None = None,
    group: str | None = None,
    by_source: bool = False,
) -> list[NamedCurve]:
    """Every curve of a file or directory.

    CSV, JSONL and JSON tables have columns `x` ("compute") and `y` ("reward") and one curve, or one for each value of
    the columns `group` (several: with commas). Exports of Weights & Biases (a chart's CSV with its "run - metric"
    columns, a run's history) and TensorBoard logs have a curve for each run; there `y` is the metric or tag, `x`
    another or the step. Our run directories: `x` is "flops" and `y` "value" unless other keys of eval.jsonl are named;
    `by_source` asks for the curve of each source of a mixture too, named RUN/SOURCE, unless `y` names one.
    Raises UserError naming file and line.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; give a CSV, JSONL or JSON file, a TensorBoard log or a run directory")
    if path.is_dir() or is_event_file(path):
        if group is not None:
            raise UserError(f"{path} is a log of runs, which has no column {group!r}; --group is for tables")
        # Other programs' logs may have a config.yaml too.
        if path.is_dir() and ((path / "eval.jsonl").is_file() or (is_run(path) and not has_events(path))):
            return _run_curves(path, x, y, by_source)
        return [_event_curve(path, run, x, y) for run in read_events(path) if run.tags]
    table = read_table(path)
    chart = _chart_columns(table)
    if chart:
        if group is not None:
            raise UserError(f"{path} is a chart's export, one column for each run; it has no column to --group by")
        return _chart_curves(table, chart, x, y)
    history = "_step" in table.columns
    warnings: list[str] = []
    if x is None and history and X not in table.columns:
        x, warnings = "_step", [_step_warning("_step")]
    x, y = x or X, y or Y
    if history:  # a row for each call of log(), each with some of the metrics
        table = table.keep(i for i, value in enumerate(table.values(y)) if not missing(value))
        if not len(table):
            raise UserError(f"{path} has no row with a {y}")
    return [
        _build(name, path, x, y, part.numbers(x), part.numbers(y), part.places, warnings, _hint(part, x, y))
        for name, part in _groups(table, x, y, group)
    ]


def read_curve(path: str | Path, x: str | None = None, y: str | None = None) -> Curve:
    """The one curve of a file or directory; see `read_curves`. Raises UserError where it holds several."""
    found = read_curves(path, x=x, y=y)
    if len(found) != 1:
        raise UserError(f"{path} holds {len(found)} curves ({', '.join(c.name for c in found[:6])}); use read_curves")
    return found[0].curve


def _groups(table: Table, x: str, y: str, group: str | None) -> list[tuple[str, Table]]:
    if group is None:
        for column in _telling(table, x, y):
            values = dict.fromkeys(map(str, table.values(column)))
            raise UserError(
                f"{table.path} seems to hold several runs: {column} is {', '.join(list(values)[:4])}"
                f"{', ...' if len(values) > 4 else ''}; name the column that tells them apart (--group {column})"
            )
        return [(table.path.stem, table)]
    return split_groups(table, group)


def split_groups(table: Table, group: str) -> list[tuple[str, Table]]:
    """A table's rows by the values of its columns `group` (several: with commas), in order of first appearance.

    Raises UserError naming file and line of a row that has no value there.
    """
    columns = [name.strip() for name in group.split(",")]
    for column in columns:
        for place, value in zip(table.places, table.values(column), strict=True):
            if missing(value):
                raise UserError(f"{table.path} {place} has no {column}, so it belongs to no group; fill it in")
    keys = ["/".join(map(str, row)) for row in zip(*(table.values(column) for column in columns), strict=True)]
    rows: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        rows.setdefault(key, []).append(index)
    return [(key, table.keep(own)) for key, own in rows.items()]


def _telling(table: Table, x: str, y: str) -> list[str]:
    """Columns whose name and values say that several runs stand in the table: a few values, each on several rows."""
    found = []
    for column in table.columns:
        if column.lower() in _TELLS_RUNS and column not in (x, y) and table.columns.count(column) == 1:
            different = len(set(map(str, table.values(column))))
            if 1 < different <= len(table) // 2:
                found.append(column)
    return found


def _hint(table: Table, x: str, y: str) -> str:
    others = [column for column in table.columns if column not in (x, y)]
    columns = f" (its other columns: {', '.join(others[:8])})" if others else ""
    return (
        f"sort the rows and average repeated ones; different runs need a column that tells them apart, --group{columns}"
    )


def _build(
    name: str,
    path: Path,
    x: str,
    y: str,
    compute: np.ndarray,
    reward: np.ndarray,
    places: Sequence[str],
    warnings: Iterable[str],
    hint: str,
) -> NamedCurve:
    """The curve of checked numbers. Raises UserError naming the place of the first compute that is out of order."""
    where = f"{path}" if name in (path.stem, path.name) else f"{path} ({name})"
    negative = np.flatnonzero(compute < 0)
    if negative.size:
        raise UserError(f"{where} {places[negative[0]]}: {x} is {compute[negative[0]]:g}; it cannot be negative")
    order = np.flatnonzero(np.diff(compute) <= 0)
    if order.size:
        at = order[0] + 1
        before, after = compute[at - 1], compute[at]
        what = f"repeats {after:g}" if before == after else f"falls from {before:g} to {after:g}"
        raise UserError(f"{where} {places[at]}: {x} {what} ({order.size} such rows); {hint}")
    found = list(warnings)
    if len(compute) > MOST_POINTS:
        found.append(
            f"{len(compute)} points are more than {MOST_POINTS}: neighbours were averaged into {MOST_POINTS} points"
        )
        blocks = np.array_split(np.arange(len(compute)), MOST_POINTS)
        compute = np.array([compute[block].mean() for block in blocks])
        reward = np.array([reward[block].mean() for block in blocks])
        places = [f"{places[block[0]]} to {places[block[-1]]}" for block in blocks]
    return NamedCurve(name, path, x, y, Curve(compute, reward), tuple(places), tuple(found))


def _step_warning(x: str) -> str:
    return f"compute is {x}, a count of steps: runs whose steps cost differently cannot be compared by it"


def _chart_columns(table: Table) -> dict[str, dict[str, str]]:
    """{metric: {run: column}} of a chart's export from Weights & Biases; empty for other tables.

    Such a file has for each run "RUN - METRIC", "RUN - METRIC__MIN" and "RUN - METRIC__MAX" beside the x axis.
    """
    found: dict[str, dict[str, str]] = {}
    for column in table.columns[1:]:
        if " - " in column and f"{column}__MIN" in table.columns and f"{column}__MAX" in table.columns:
            run, metric = column.rsplit(" - ", 1)
            found.setdefault(metric, {})[run] = column
    return found


def _chart_curves(table: Table, chart: dict[str, dict[str, str]], x: str | None, y: str | None) -> list[NamedCurve]:
    axis = table.columns[0]
    metrics = [metric for metric in chart if metric not in _WANDB_OWN and metric != x]
    if y is None and len(metrics) != 1:
        raise UserError(f"{table.path} exports several metrics; choose one with --y: {', '.join(metrics)}")
    metric = metrics[0] if y is None else y
    if metric not in chart:
        raise UserError(f"{table.path} exports no metric {metric!r}, only {', '.join(metrics)}")
    if x is not None and x != axis and x not in chart:
        raise UserError(
            f"{table.path} has no x axis {x!r}, only {', '.join([axis, *(name for name in chart if name != metric)])}"
        )
    curves = []
    for run, column in chart[metric].items():
        part = table.keep(i for i, value in enumerate(table.values(column)) if not missing(value))
        if not len(part):
            raise UserError(f"{table.path} has no value of {metric} for the run {run!r}")
        own = axis if x in (None, axis) else chart[str(x)].get(run)
        if own is None:
            raise UserError(f"{table.path} has no {x} for the run {run!r}")
        warnings = (
            [_step_warning(axis)] if own == axis and axis.lower() in ("step", "_step", "trainer/global_step") else []
        )
        reward = part.numbers(column)
        least, greatest = part.numbers(f"{column}__MIN"), part.numbers(f"{column}__MAX")
        merged = int(np.sum(least != greatest))
        if merged:
            warnings.append(f"{merged} points are averages of several logged values (their __MIN and __MAX differ)")
        hint = "export the chart without smoothing, over an axis that only grows"
        x_name = axis if own == axis else str(x)
        compute = part.numbers(own)
        curves.append(_build(run, table.path, x_name, metric, compute, reward, part.places, warnings, hint))
    return curves


def _run_curves(path: Path, x: str | None, y: str | None, by_source: bool) -> list[NamedCurve]:
    run = path.resolve().name
    records, bad = read_lines(path / "eval.jsonl")
    if not records:
        raise UserError(f"{path} has no evaluations yet (eval.jsonl); there is nothing to fit")
    curves = {run: y or VALUE}
    if by_source and y is None:
        curves |= {f"{run}/{source}": f"{VALUE}/{source}" for source in source_names(records)}
    x = x or "flops"
    for key in (x, *curves.values()):
        if not any(key in record for record in records):
            raise UserError(f"{path}/eval.jsonl has no key {key!r}, only {', '.join(records[-1])}")
    places = [f"step {record['step']}" for record in records]

    def column(key: str) -> np.ndarray:
        cells = zip(records, places, strict=True)
        return np.array([number(record.get(key), f"{path}/eval.jsonl {place}: {key}") for record, place in cells])

    warnings = [f"{bad} lines of eval.jsonl are no records and were left out"] if bad else []
    return [
        _build(name, path, x, key, column(x), column(key), places, warnings, "was eval.jsonl edited?")
        for name, key in curves.items()
    ]


def _event_curve(path: Path, run: EventRun, x: str | None, y: str | None) -> NamedCurve:
    tags = ", ".join(list(run.tags)[:12]) + (", ..." if len(run.tags) > 12 else "")
    if y is None:
        y = "eval/value" if "eval/value" in run.tags else next(iter(run.tags)) if len(run.tags) == 1 else None
        if y is None:
            raise UserError(f"{run.folder} has several tags; choose one with --y: {tags}")
        if x is None and y == "eval/value" and "eval/flops" in run.tags:
            x = "eval/flops"
    if y not in run.tags:
        raise UserError(f"{run.folder} has no tag {y!r}, only {tags}")
    warnings = list(run.warnings)
    if x is None:
        x = X if X in run.tags else "step"
    if x == "step":
        warnings.append(_step_warning(x))
    elif x not in run.tags:
        raise UserError(f"{run.folder} has no tag {x!r} for the compute, only step, {tags}")
    values = run.tags[y].values
    if x != "step":
        newest = max(run.tags[x].values)
        late = [step for step in values if step > newest]
        if late:
            warnings.append(
                f"{y} of {len(late)} steps from step {late[0]} on is left out: their {x} is not written yet"
            )
            values = {step: value for step, value in values.items() if step <= newest}
    places = [f"step {step}" for step in values]
    reward = np.array([number(v, f"{run.folder} {p}: {y}") for v, p in zip(values.values(), places, strict=True)])
    if x == "step":
        compute = np.array(list(values), np.float64)
    else:
        compute = np.array([_latest(run, x, step) for step in values])
    name = run.folder.resolve().name if run.folder == path or path.is_file() else str(run.folder.relative_to(path))
    return _build(name, run.folder, x, y, compute, reward, places, warnings, "write each run to a folder of its own")


def _latest(run: EventRun, tag: str, step: int) -> float:
    """A counter's value at a step: what was last written at or before it."""
    known: dict[int, Any] = run.tags[tag].values
    at = step if step in known else max((other for other in known if other <= step), default=None)
    return number(math.nan if at is None else known[at], f"{run.folder} step {step}: {tag}")
