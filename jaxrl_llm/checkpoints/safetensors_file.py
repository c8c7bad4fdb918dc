"""The safetensors container: a JSON table in front of raw tensors, read by parts and written one tensor at a time.

Format: 8 bytes with the table's length, the table (name -> dtype, shape, offsets from the table's end), the data,
little-endian. Our own reader and writer of these few lines, because a damaged file must end in a message that names
the tensor, a part of a tensor must be read without the rest, and a whole model must never be in memory to be written.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxrl_llm.types import UserError

FLOATS = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""The dtypes that weights may have."""
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1} | {name: dtype.itemsize for name, dtype in FLOATS.items()}
_MAX_TABLE = 100_000_000  # bytes, as the format's own library has it
_BLOCK = 2**20  # bytes read at once: what a conversion holds beside its result


@dataclass(frozen=True)
class StoredTensor:
    """One row of a file's table; `start` counts from byte 0, `kind` is the file's name of the dtype."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read_into(self, out: np.ndarray, view: tuple[int, ...], part: tuple[slice, ...]) -> None:
        """Casts a part of the tensor, seen as an array of shape `view`, into `out` of that part's shape.

        Reads a few MB at a time, so that nothing but `out` has the tensor's size; `out` may be a transposed view.
        Raises UserError if the file ends early or a number is not finite.
        """
        with self.path.open("rb", buffering=0) as file:
            self._read_rows(file, self.start, out, view, part)

    def _read_rows(
        self, file: BinaryIO, start: int, out: np.ndarray, view: tuple[int, ...], part: tuple[slice, ...]
    ) -> None:
        """`read_into` for an array that begins at byte `start`; what is too long to read at once goes row by row."""
        dtype = FLOATS[self.kind]
        row = math.prod(view[1:])
        first, last, _ = part[0].indices(view[0])
        rows = _BLOCK // (row * dtype.itemsize)
        if rows == 0 and len(view) > 1:
            for at in range(first, last):
                self._read_rows(file, start + at * row * dtype.itemsize, out[at - first], view[1:], part[1:])
            return
        rows = max(1, rows)
        for at in range(first, last, rows):
            count = min(rows, last - at)
            file.seek(start + at * row * dtype.itemsize)
            block = np.fromfile(file, dtype, count * row)
            if len(block) != count * row:
                raise UserError(f"{self.path} ends inside tensor {self.name!r}; fetch it again")
            block = block.reshape(count, *view[1:])[(slice(None), *part[1:])]
            if not np.isfinite(block).all():
                raise UserError(f"{self.path}: tensor {self.name!r} holds values that are not finite")
            out[at - first : at - first + count] = block

    def read(self) -> np.ndarray:
        """The whole tensor as the file has it. Raises UserError as `read_into`."""
        out = np.empty(self.shape, FLOATS[self.kind])
        self.read_into(out.reshape(-1), (math.prod(self.shape),), (slice(None),))
        return out

    def sha256(self) -> str:
        """Of the tensor's bytes."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            file.seek(self.start)
            for at in range(0, self.size, _BLOCK):
                digest.update(file.read(min(_BLOCK, self.size - at)))
        return digest.hexdigest()


def read_table(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises UserError, naming the file and the tensor, if it is damaged or cut short."""
    try:
        length = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            table_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= table_bytes <= min(_MAX_TABLE, length - 8):
                raise UserError(f"{path} is not a safetensors file, or is cut off inside its table")
            table = json.loads(file.read(table_bytes))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is a damaged safetensors file: its table is not JSON") from error
    if not isinstance(table, dict):
        raise UserError(f"{path} is a damaged safetensors file: its table is no object")
    table.pop("__metadata__", None)
    return {name: _stored(path, name, row, 8 + table_bytes, length) for name, row in table.items()}


def _stored(path: Path, name: str, row: Any, data_start: int, length: int) -> StoredTensor:
    try:
        kind, shape = str(row["dtype"]), tuple(row["shape"])
        begin, end = row["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path}: the table's row of tensor {name!r} is damaged") from error
    numbers = (*shape, begin, end)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers) or begin > end:
        raise UserError(f"{path}: the table's row of tensor {name!r} is damaged")
    if kind not in _BYTES:
        raise UserError(f"{path}: tensor {name!r} has dtype {kind}, which is not known; known: {', '.join(_BYTES)}")
    if end - begin != math.prod(shape) * _BYTES[kind]:
        raise UserError(f"{path}: tensor {name!r} of {kind} {shape} has {end - begin} bytes")
    if data_start + end > length:
        raise UserError(
            f"{path} is cut off: tensor {name!r} ends at byte {data_start + end}, the file has {length}; fetch it again"
        )
    return StoredTensor(path, name, kind, shape, data_start + begin, end - begin)


def write_file(path: Path, rows: Sequence[tuple[str, np.dtype, tuple[int, ...]]], arrays: Iterable[np.ndarray]) -> None:
    """Writes tensors (name, dtype, shape) whose arrays come in the same order; one is in memory at a time."""
    kinds = {dtype: kind for kind, dtype in FLOATS.items()}
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in rows:
        size = math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": kinds[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (_, dtype, shape), array in zip(rows, arrays, strict=True):
            assert (array.dtype, array.shape) == (dtype, shape)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def shards(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Consecutive ranges of items of at most `limit` bytes each, or of one item that is larger."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            yield range(first, index)
            first, total = index, 0
        total += size
    yield range(first, len(sizes))
