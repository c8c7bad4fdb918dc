"""Scalars from TensorBoard event files: TFRecord framing with its checksums, and the Event messages inside."""

import importlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.types import UserError

MOST_BYTES = 2 * 2**30
_BATCH_BYTES = 8 * 2**20
_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed


@dataclass
class Scalars:
    """One tag of one run: `values` by step, in the order of the steps' last writing, and the wall time of each [s]."""

    values: dict[int, float] = field(default_factory=dict)
    wall_time: dict[int, float] = field(default_factory=dict)

    def rewind(self, step: int) -> None:
        """Forget what was written at `step` and later: a restarted run does it again."""
        for later in [known for known in self.values if known >= step]:
            del self.values[later], self.wall_time[later]


@dataclass(frozen=True)
class EventRun:
    """The scalars of one folder of event files by tag, and warnings about the files."""

    folder: Path
    tags: dict[str, Scalars]
    warnings: tuple[str, ...]


def is_event_file(path: Path) -> bool:
    """By its name, as TensorBoard itself tells."""
    return path.is_file() and "tfevents" in path.name


def has_events(folder: Path) -> bool:
    """Whether there are event files anywhere below a folder."""
    return any(is_event_file(file) for file in folder.rglob("*"))


def read_events(path: str | Path) -> list[EventRun]:
    """The runs of an event file, or of a log folder: one run for each folder below it that holds event files.

    A run's files are read in the order of their names (which begin with their time); a session that starts anew at a
    step replaces what earlier files say from there on. An unfinished last record (a run writes it now) is left out
    with a warning. Raises UserError naming file and byte for a checksum that does not hold.
    """
    path = Path(path)
    files = [path] if is_event_file(path) else sorted(file for file in path.rglob("*") if is_event_file(file))
    if not files:
        raise UserError(f"{path} is no run directory and holds no TensorBoard event files (names with tfevents)")
    runs = []
    for folder in dict.fromkeys(file.parent for file in files):
        tags: dict[str, Scalars] = {}
        warnings: list[str] = []
        for file in files:
            if file.parent == folder:
                warnings.extend(_read_file(file, tags))
        runs.append(EventRun(folder, tags, tuple(warnings)))
    return runs


def _read_file(path: Path, tags: dict[str, Scalars]) -> list[str]:
    # Only here: the rest of the room does without protobuf. Its generated modules make their names when they run.
    messages: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    damaged: Any = importlib.import_module("google.protobuf.message").DecodeError
    warnings: list[str] = []
    for place, record in _records(path, warnings):
        try:
            event = messages.Event.FromString(record)
        except damaged as error:
            raise UserError(f"{path} byte {place} holds no TensorBoard event; is it another kind of file?") from error
        if event.HasField("session_log") and event.session_log.status == messages.SessionLog.START:
            for scalars in tags.values():
                scalars.rewind(event.step)
        for value in event.summary.value:
            scalar = _scalar(value)
            if scalar is not None:
                found = tags.setdefault(value.tag, Scalars())
                found.values.pop(event.step, None)  # written again: it moves to the end
                found.values[event.step] = scalar
                found.wall_time[event.step] = event.wall_time
    return warnings


def _scalar(value: Any) -> float | None:
    """The number of a Summary.Value: TensorFlow 1's simple_value, or TensorFlow 2's tensor of one element."""
    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    if value.WhichOneof("value") != "tensor":
        return None
    tensor = value.tensor
    kinds = {1: ("float_val", "<f4"), 2: ("double_val", "<f8"), 3: ("int_val", "<i4"), 9: ("int64_val", "<i8")}
    if tensor.dtype not in kinds or any(dimension.size != 1 for dimension in tensor.tensor_shape.dim):
        return None
    name, dtype = kinds[tensor.dtype]
    if tensor.tensor_content:
        numbers = np.frombuffer(tensor.tensor_content, dtype) if len(tensor.tensor_content) == int(dtype[-1]) else []
    else:
        numbers = getattr(tensor, name)
    return float(numbers[0]) if len(numbers) == 1 else None


def _records(path: Path, warnings: list[str]) -> Iterator[tuple[int, bytes]]:
    """(byte offset, content) of every record, checksums verified batch by batch."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise UserError(
            f"{path} has {size / 2**30:.1f} GiB, more than {MOST_BYTES // 2**30}; read a smaller event file"
        )
    with path.open("rb") as file:
        offset, batch, weight = 0, [], 0
        while head := file.read(12):
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else 0
            if len(head) < 12 or offset + 16 + length > size:
                if len(head) == 12:
                    _check(path, [(offset, head[:8], struct.unpack("<I", head[8:])[0])], "a record's length")
                warnings.append(f"{path.name} ends within a record (byte {offset}), which is left out")
                break
            batch.append((offset, head, file.read(length + 4)))
            weight += length
            offset += 16 + length
            if weight > _BATCH_BYTES:
                yield from _verified(path, batch)
                batch, weight = [], 0
        yield from _verified(path, batch)


def _verified(path: Path, batch: Sequence[tuple[int, bytes, bytes]]) -> Iterator[tuple[int, bytes]]:
    # Lengths first: behind a wrong one nothing is where it should be.
    _check(
        path, [(offset, head[:8], struct.unpack("<I", head[8:])[0]) for offset, head, _ in batch], "a record's length"
    )
    _check(path, [(offset, body[:-4], struct.unpack("<I", body[-4:])[0]) for offset, _, body in batch], "a record")
    for offset, _, body in batch:
        yield offset, body[:-4]


def _check(path: Path, parts: Sequence[tuple[int, bytes, int]], what: str) -> None:
    for (offset, _, stored), crc in zip(parts, masked_crc([content for _, content, _ in parts]), strict=True):
        if crc != stored:
            raise UserError(f"{path} byte {offset}: the checksum of {what} does not hold; the file is damaged")


def masked_crc(records: Sequence[bytes]) -> list[int]:
    """TFRecord's checksum of each record: CRC-32C, rotated right by 15 bits, plus a constant.

    All records are worked on at once, a byte of each at a time: in pure Python a byte costs as much as a numpy call.
    """
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    order = sorted(range(len(records)), key=lambda k: -len(records[k]))
    lengths = np.array([len(records[k]) for k in order], np.int64)
    data = np.frombuffer(b"".join(records[k] for k in order), np.uint8)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    crc = np.full(len(records), 0xFFFFFFFF, np.uint32)
    active = len(records)
    for position in range(int(lengths[0]) if len(records) else 0):
        while lengths[active - 1] <= position:
            active -= 1
        part = crc[:active]
        crc[:active] = table[(part ^ data[starts[:active] + position]) & 0xFF] ^ (part >> 8)
    crc ^= np.uint32(0xFFFFFFFF)
    masked = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
    result = [0] * len(records)
    for place, value in zip(order, masked.tolist(), strict=True):
        result[place] = value
    return result
