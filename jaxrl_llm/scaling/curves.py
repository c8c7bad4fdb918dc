"""A curve of reward against compute, checked where it is born, and how to read one from a file or from a run."""

import csv
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxrl_llm.types import RunPoint, UserError

Axis = Literal["flops", "tokens", "device_seconds"]
AXES: tuple[Axis, ...] = ("flops", "tokens", "device_seconds")


@dataclass(frozen=True)
class Curve:
    """`reward` after `compute`, both float64 [N]; compute starts at 0 or above and strictly increases.

    A first point at zero compute is an estimate of R0. Raises UserError for anything else, naming the point.
    """

    compute: np.ndarray
    reward: np.ndarray

    def __post_init__(self) -> None:
        compute = np.asarray(self.compute, dtype=np.float64)
        reward = np.asarray(self.reward, dtype=np.float64)
        if compute.ndim != 1 or compute.shape != reward.shape:
            raise UserError(
                f"a curve needs two equally long columns, got compute {compute.shape} and reward {reward.shape}"
            )
        for name, values in (("compute", compute), ("reward", reward)):
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                raise UserError(f"{name} is {values[bad[0]]} at point {bad[0] + 1}; drop or repair that point")
        if compute.size and compute[0] < 0:
            raise UserError(f"compute is {compute[0]:g} at point 1; it cannot be negative")
        bad = np.flatnonzero(np.diff(compute) <= 0)
        if bad.size:
            before, after = compute[bad[0]], compute[bad[0] + 1]
            what = "repeats" if before == after else f"falls from {before:g} to"
            raise UserError(
                f"compute {what} {after:g} at point {bad[0] + 2}; a curve needs strictly increasing compute: "
                "sort the points, average repeated ones, and keep different runs in different files"
            )
        object.__setattr__(self, "compute", compute)
        object.__setattr__(self, "reward", reward)

    def __len__(self) -> int:
        return len(self.compute)

    @property
    def zero(self) -> float | None:
        """The reward at zero compute, if the curve starts there."""
        return float(self.reward[0]) if len(self) and self.compute[0] == 0 else None

    def where(self, keep: np.ndarray) -> "Curve":
        """The points marked by the bool mask `keep` [N]."""
        return Curve(self.compute[keep], self.reward[keep])


def curve_of_points(points: Sequence[RunPoint], axis: Axis = "flops") -> Curve:
    """The evaluation curve of a run on one compute axis: "flops", "tokens" or "device_seconds"."""
    if axis not in AXES:
        raise UserError(f"unknown compute axis {axis!r}; choose one of {', '.join(AXES)}")
    try:
        return Curve(
            np.array([getattr(point, axis) for point in points], dtype=np.float64),
            np.array([point.metric for point in points], dtype=np.float64),
        )
    except UserError as error:
        raise UserError(f"the run's curve over {axis} has no use: {error}") from error


def read_curve(path: str | Path, x: str = "compute", y: str = "reward") -> Curve:
    """Read a curve from a CSV file (with a header line) or a JSONL file (one object a line), columns `x` and `y`.

    Raises UserError naming file, line and column for a missing file or column, a value that is no finite number, and
    compute that does not strictly increase.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no curve file {path}; give a CSV or JSONL file with columns {x!r} and {y!r}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file ({error}); give a CSV or JSONL file") from error
    rows = _jsonl_rows(path, text) if path.suffix.lower() in {".jsonl", ".ndjson", ".json"} else _csv_rows(path, text)
    compute, reward = [], []
    for line, row in rows:
        compute.append(_number(path, line, row, x))
        reward.append(_number(path, line, row, y))
    if not compute:
        raise UserError(f"{path} holds no points; it needs columns {x!r} and {y!r} and at least 4 rows")
    try:
        return Curve(np.array(compute), np.array(reward))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _csv_rows(path: Path, text: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    for row in reader:
        if None in row:
            raise UserError(f"{path} line {reader.line_num} has more fields than the header names; repair that line")
        yield reader.line_num, row


def _jsonl_rows(path: Path, text: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON ({error}); JSONL has one object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is not an object; JSONL has one object a line")
        yield number, row


def _number(path: Path, line: int, row: Mapping[str, Any], column: str) -> float:
    if column not in row:
        names = [str(name) for name in row]
        close = difflib.get_close_matches(column, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "name the columns of the compute (x) and the reward (y)"
        raise UserError(f"{path} line {line} has no column {column!r}, only {', '.join(names)}; {hint}")
    value = row[column]
    try:
        if isinstance(value, bool):
            raise TypeError("a truth value")
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} line {line}: {column} is {value!r}, which is not a number") from error
    if not np.isfinite(number):
        raise UserError(f"{path} line {line}: {column} is {value!r}; drop or repair that line")
    return number
