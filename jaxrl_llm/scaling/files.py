"""Tables from files: CSV, JSON lines, JSON, and what Weights & Biases exports, with the line of every row."""

import csv
import difflib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.types import UserError

MOST_BYTES = 256 * 2**20
_JSON_ENDINGS = {".jsonl", ".ndjson", ".json"}


@dataclass(frozen=True)
class Table:
    """Rows of raw values under named columns. `places` says where each row stands ("line 3"); a value that a row does
    not have is None."""

    path: Path
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    places: Sequence[str]

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, column: str) -> list[Any]:
        """The raw values of a column. Raises UserError naming the columns there are, or a column that stands twice."""
        return [row[self.index(column)] for row in self.rows]

    def index(self, column: str) -> int:
        """Where a column stands; errors as for `values`."""
        if column not in self.columns:
            close = difflib.get_close_matches(column, self.columns, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "name the columns that are meant"
            raise UserError(f"{self.path} has no column {column!r}, only {', '.join(self.columns)}; {hint}")
        if self.columns.count(column) > 1:
            raise UserError(f"{self.path} has {self.columns.count(column)} columns {column!r}; rename all but one")
        return self.columns.index(column)

    def numbers(self, column: str) -> np.ndarray:
        """A column as float64 [N]. Raises UserError naming file and line of what is not a finite number."""
        cells = zip(self.places, self.values(column), strict=True)
        return np.array([number(value, f"{self.path} {place}: {column}") for place, value in cells], np.float64)

    def keep(self, rows: Iterable[int]) -> "Table":
        """The table of some of its rows."""
        kept = list(rows)
        return Table(self.path, self.columns, [self.rows[i] for i in kept], [self.places[i] for i in kept])


def read_table(path: str | Path) -> Table:
    """Read a CSV file (header line; comma, semicolon or tab), JSON lines (an object a line), or JSON (a list of
    objects, or the columns that pandas writes).

    UTF-8 or UTF-16, with or without a byte order mark. Raises UserError naming file and line for a missing, empty,
    binary or damaged file, for a row of the wrong length, and for files above 256 MiB.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no file {path}; give a CSV, JSONL or JSON file")
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UserError(
                f"{path} has {size / 2**20:,.0f} MiB, more than {MOST_BYTES // 2**20}; write the columns that are "
                "meant into a file of their own"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    try:
        text = raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file ({error}); give a CSV, JSONL or JSON file") from error
    if not text.strip():
        raise UserError(f"{path} is empty: it holds no points")
    table = _json_table(path, text) if path.suffix.lower() in _JSON_ENDINGS else _csv_table(path, text)
    if not len(table):
        raise UserError(f"{path} holds no points, only column names ({', '.join(table.columns)})")
    return table


def number(value: Any, what: str) -> float:
    """A finite float from a cell. Raises UserError beginning with `what`."""
    try:
        # Python reads 1_000 as a thousand, which no table means.
        if isinstance(value, bool) or value is None or (isinstance(value, str) and "_" in value):
            raise ValueError
        found = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{what} is {_shown(value)}, which is not a number; drop or repair that row") from error
    if not math.isfinite(found):
        raise UserError(f"{what} is {_shown(value)}; drop or repair that row")
    return found


def missing(value: Any) -> bool:
    """Whether a cell holds nothing (an export's way to say that this row belongs to other columns)."""
    return value is None or (isinstance(value, str) and not value.strip())


def _shown(value: Any) -> str:
    text = repr(value)
    return "missing" if value is None else text if len(text) <= 40 else text[:37] + "..."


def _csv_table(path: Path, text: str) -> Table:
    first = text.lstrip("\r\n").split("\n", 1)[0]
    # A comma where there is one: headers of exports hold semicolons too.
    delimiter = next((mark for mark in (",", "\t", ";") if mark in first), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    header: tuple[str, ...] | None = None
    rows, places = [], []
    try:
        for row in reader:
            if not row or row == [""]:
                continue
            if header is None:
                header = tuple(name.strip() for name in row)
                continue
            if len(row) != len(header):
                more = "more" if len(row) > len(header) else "fewer"
                raise UserError(
                    f"{path} line {reader.line_num} has {more} fields than the header names ({len(row)} and "
                    f"{len(header)}); repair that line"
                )
            rows.append(row)
            places.append(f"line {reader.line_num}")
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num} is not CSV ({error}); repair that line") from error
    return Table(path, header or (), rows, places)


def _json_table(path: Path, text: str) -> Table:
    if path.suffix.lower() == ".json":
        try:
            whole = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            # A file of JSON lines is often called .json.
            if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
                return _records(path, _json_lines(path, text))
            raise UserError(f"{path} is not JSON ({error}); write it anew") from error
        return _records(path, _json_records(path, whole))
    return _records(path, _json_lines(path, text))


def _json_lines(path: Path, text: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for index, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{path} line {index} is not JSON ({error}); JSONL has one object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path} line {index} is not an object; JSONL has one object a line")
        yield f"line {index}", row


def _json_records(path: Path, whole: Any) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if isinstance(whole, list) and all(isinstance(row, dict) for row in whole):
        return [(f"record {index}", row) for index, row in enumerate(whole, start=1)]
    columns = whole if isinstance(whole, dict) else {}
    # What pandas writes: {column: {row: value}}, or with lists {column: [values]}.
    indexed = {name: dict(enumerate(cells)) if isinstance(cells, list) else cells for name, cells in columns.items()}
    if indexed and all(isinstance(cells, dict) for cells in indexed.values()):
        keys = dict.fromkeys(key for cells in indexed.values() for key in cells)
        return [(f"row {key}", {name: cells.get(key) for name, cells in indexed.items()}) for key in keys]
    if columns:  # a single object: one row
        return [("line 1", columns)]
    raise UserError(f"{path} is neither a list of objects nor columns; give one object for each point")


def _records(path: Path, records: Iterable[tuple[str, Mapping[str, Any]]]) -> Table:
    found = list(records)
    columns = tuple(dict.fromkeys(name for _, row in found for name in row))
    rows = [[row.get(name) for name in columns] for _, row in found]
    return Table(path, columns, rows, [place for place, _ in found])
