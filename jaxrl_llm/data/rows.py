"""Rows of files as Grain sources: JSON Lines, Parquet, ArrayRecord, and Hugging Face data sets.

A row is a mapping of fields together with where it stands, so that an error can name its place.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from grain.sources import ArrayRecordDataSource

from jaxrl_llm.types import UserError

_LONGEST_ROW = 16 * 2**20  # bytes; a longer line is a file without line ends, or no text at all


class Row(NamedTuple):
    """`where` names the file and the line, or the row from 1 on; `fields` is what stands there."""

    where: str
    fields: Mapping[str, Any]


class Rows(Protocol):
    """What Grain calls a random-access data source, of rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class JsonLines:
    """The objects of a .jsonl file; blank lines are skipped.

    Raises UserError naming file and line, for the file as a whole when it is opened and for a row when it is read.
    """

    def __init__(self, path: str):
        self._path = path
        content = _read(path)
        if content.startswith(b"\xef\xbb\xbf"):
            raise UserError(f"{path} line 1 begins with a byte order mark; save the file as UTF-8 without one")
        # Only \n ends a line: JSON may hold other line ends inside its strings.
        self._lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
        if not self._lines:
            raise UserError(f"{path} is empty: it has no line with an object")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        number, line = self._lines[index]
        where = f"{self._path} line {number}"
        return Row(where, _object(line, where))


class Listed:
    """Rows that a library has read already: anything with a length, and a mapping at each index."""

    def __init__(self, name: str, rows: Any):
        if not len(rows):
            raise UserError(f"{name} is empty: it has no rows")
        self._name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return Row(f"{self._name} row {index + 1}", self._rows[index])


class ArrayRecords:
    """The records of an ArrayRecord file, each the bytes of one JSON object."""

    def __init__(self, path: str):
        _check_file(path)
        self._path = path
        try:
            self._source = ArrayRecordDataSource([path])
            length = len(self._source)
        except Exception as error:  # the reader has no exception of its own
            raise UserError(f"{path} is not an ArrayRecord file, or damaged ({_first_line(error)})") from None
        if not length:
            raise UserError(f"{path} is empty: it has no records")

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Row:
        where = f"{self._path} record {index + 1}"
        try:
            record = self._source[index]
        except Exception as error:
            raise UserError(f"{where} cannot be read ({_first_line(error)}); the file is damaged") from None
        return Row(where, _object(record, where))


def parquet(path: str, columns: Sequence[str]) -> Rows:
    """The rows of a Parquet file, `columns` alone. Raises UserError if pyarrow or a column is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} needs pyarrow, which is not installed: pip install 'jaxrl_llm[parquet]'") from None
    _check_file(path)
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if missing := [name for name in columns if name not in names]:
            raise UserError(f"{path} has no column {missing[0]!r}; it has {', '.join(names)}")
        rows = file.read(columns=list(columns)).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a Parquet file, or damaged ({_first_line(error)})") from None
    return Listed(path, rows)


def hugging_face(path: str, *, split: str, revision: str | None) -> Rows:
    """One split of a data set: a folder that `save_to_disk` wrote, a folder of data files, or OWNER/NAME on the Hub.

    No code of the data set is run. Raises UserError if the library is missing or the split cannot be had.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(f"{path} needs datasets, which is not installed: pip install 'jaxrl_llm[datasets]'") from None
    try:
        if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "state.json").is_file():
            saved = datasets.load_from_disk(path)
            if isinstance(saved, datasets.Dataset):
                saved = {"train" if saved.split is None else str(saved.split): saved}
            if split not in saved:
                raise UserError(f"{path} has no split {split!r}; it has {', '.join(map(str, saved))}")
            rows = saved[split]
        else:
            rows = datasets.load_dataset(path, split=split, revision=revision)
    except UserError:
        raise
    except Exception as error:  # whatever the library, its builders and the network raise
        raise UserError(f"data set {path}, split {split!r}, cannot be read ({_first_line(error)})") from None
    return Listed(f"{path} ({split})", rows)


def _read(path: str) -> bytes:
    _check_file(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _check_file(path: str) -> None:
    if not Path(path).is_file():
        what = "is a folder, not a file" if Path(path).is_dir() else "does not exist"
        raise UserError(f"data file {path} {what}")


def _object(text: bytes, where: str) -> dict[str, Any]:
    if len(text) > _LONGEST_ROW:
        raise UserError(f"{where} has {len(text)} bytes, more than {_LONGEST_ROW}; is it one object a line?")
    if b"\0" in text:
        raise UserError(f"{where} holds a null byte; the file is damaged, or not UTF-8")
    try:
        value = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of a million digits, a million brackets
        raise UserError(f"{where} is not JSON that can be read ({_first_line(error)})") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a {type(value).__name__}, not an object with fields")
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
