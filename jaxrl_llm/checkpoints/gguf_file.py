"""The GGUF container: metadata and the table of tensors, checked against the file's length before any data is read.

Format: the GGUF specification, versions 2 and 3, little-endian. Our own reader of the header, because a damaged file
must end in one clear message, never in a crash, a hang or a huge allocation; block sizes and dequantisation come from
the `gguf` library.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxrl_llm.types import UserError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table. `shape` is in numpy's order, the fastest axis last; `start` counts from byte 0."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, dequantised. Raises UserError if its values are not finite."""
        tensor = self.tensors[name]
        raw = np.fromfile(self.path, dtype=np.uint8, count=tensor.size, offset=tensor.start)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        values = _dequantize(rows, tensor.kind).reshape(tensor.shape)
        if not np.isfinite(values).all():
            raise UserError(f"{self.path}: tensor {name!r} holds values that are not finite; the file is damaged")
        return values


def open_gguf(path: str | Path) -> GgufFile:
    """Reads a GGUF file's metadata and tensor table.

    Raises UserError, naming the file and what is wrong, if it cannot be read, is not GGUF, is damaged or cut short,
    or holds a tensor of a type that cannot be dequantised.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; give the .gguf file inside it")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{path} is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read_header(path, data)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except _DamagedError as error:
        raise UserError(f"{path} is a damaged or cut-off GGUF file: {error}; fetch it again") from error


class _DamagedError(Exception):
    pass


class _Cursor:
    """Reads values one after another, never past the end of the file."""

    def __init__(self, data: mmap.mmap, at: int):
        self._data = data
        self.at = at

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise _DamagedError(f"{size} bytes are wanted at byte {self.at}, the file has {len(self._data)}")
        self.at += size
        return self._data[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode()
        except UnicodeDecodeError as error:
            raise _DamagedError(f"a string before byte {self.at} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            if kind == _STRING:
                # Each string needs the 8 bytes of its length, so a wild count ends at the end of the file.
                return [self.string() for _ in range(count)]
            if kind in _SCALARS:
                dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
                return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise _DamagedError(f"unknown value type {kind} before byte {self.at}")


def _read_header(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data, at=4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise UserError(f"{path}: GGUF version {version} is not supported (little-endian 2 and 3 are)")
    tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata:
            raise _DamagedError(f"the key {key!r} comes twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    rows = []
    for _ in range(tensor_count):
        name = cursor.string()
        dims = cursor.scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise _DamagedError(f"tensor {name!r} has {dims} axes")
        shape = tuple(cursor.scalar("Q") for _ in range(dims))[::-1]
        rows.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))

    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _DamagedError(f"general.alignment is {alignment!r}")
    data_start = math.ceil(cursor.at / alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind_id, offset in rows:
        if name in tensors:
            raise _DamagedError(f"the tensor {name!r} comes twice")
        kind = _supported_kind(path, name, kind_id)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise _DamagedError(f"tensor {name!r} of shape {shape} does not divide into {kind.name} blocks of {block}")
        start, size = data_start + offset, math.prod(shape) // block * block_bytes
        if start + size > len(data):
            raise _DamagedError(f"tensor {name!r} ends at byte {start + size}, the file has {len(data)}")
        tensors[name] = GgufTensor(name, shape, kind, start, size)
    return GgufFile(path, metadata, tensors)


def _supported_kind(path: Path, name: str, kind_id: int) -> gguf.GGMLQuantizationType:
    try:
        kind = gguf.GGMLQuantizationType(kind_id)
        _dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    # The library's ways to say that there is no such type, and that it has no decoder for it.
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{path}: tensor {name!r} has type {kind_id}, which cannot be dequantised") from error
    return kind


def _dequantize(rows: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return np.asarray(gguf.quants.dequantize(rows, kind), dtype=np.float32)
