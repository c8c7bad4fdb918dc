"""The run directory's records: sft.jsonl, metrics.jsonl, eval.jsonl, samples.jsonl, events.jsonl (of samplers),
TensorBoard events, state.json."""

import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from jaxrl_llm.types import UserError


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one atomic step: a reader, or a kill -9, sees the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def lock_run(run_dir: Path):
    """Keep a second process out of a run directory; hold on to the returned file for as long as the run lasts."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = (run_dir / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"run directory {run_dir} cannot be used ({error.strerror}); choose another with --run-dir"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise UserError(
            f"run directory {run_dir} is in use by another process; choose another with --run-dir"
        ) from None
    return handle


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: a float that is not finite becomes None, inside any nesting."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


class RunLog:
    """Appends records, one JSON object a line, each flushed at once.

    Opened on an existing directory it first drops every record later than `resume_step`: those steps are run again.
    """

    def __init__(self, run_dir: Path, *, resume_step: int):
        self._dir = run_dir
        self._files = {}
        for name in ("sft", "metrics", "eval", "samples"):
            path = run_dir / f"{name}.jsonl"
            # The warm-up has steps of its own; it is over once there is any checkpoint.
            until = (math.inf if resume_step >= 0 else -1) if name == "sft" else resume_step
            kept = [line for line, record in read_records(path) if record["step"] <= until]
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text("".join(kept))
            os.replace(temporary, path)
            self._files[name] = path.open("a")
        # What happened to samplers stays, whatever steps are run again.
        self._files["events"] = (run_dir / "events.jsonl").open("a")
        self._lock = threading.Lock()
        self._events = SummaryWriter(str(run_dir / "events"), purge_step=resume_step + 1)

    def step(self, record: Mapping[str, Any]) -> None:
        self._append("metrics", record)
        self._scalars("train", record)

    def supervised(self, record: Mapping[str, Any]) -> None:
        self._append("sft", record)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._append("eval", record)
        self._scalars("eval", record)
        self._events.flush()

    def samples(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            self._append("samples", record)

    def event(self, kind: str, message: str, facts: Mapping[str, Any]) -> None:
        """Something that happened to the run's samplers, in plain words; from any thread."""
        told = {name: value for name, value in facts.items() if value is not None}
        with self._lock:
            self._append("events", {"time": round(time.time(), 3), "event": kind, **told, "message": message})

    def state(self, state: str, *, step: int, steps: int, message: str = "") -> None:
        write_json(self._dir / "state.json", {"state": state, "step": step, "steps": steps, "message": message})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._events.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self._files[name].write(json.dumps(finite(record), allow_nan=False) + "\n")
        self._files[name].flush()

    def _scalars(self, prefix: str, record: Mapping[str, Any]) -> None:
        for key, value in record.items():
            if isinstance(value, int | float) and math.isfinite(value) and key != "step":
                self._events.add_scalar(f"{prefix}/{key}", value, record["step"])


class NoLog(RunLog):
    """Records that another process of the run writes."""

    def __init__(self) -> None:
        self._files = {}

    def step(self, record: Mapping[str, Any]) -> None:
        pass

    def supervised(self, record: Mapping[str, Any]) -> None:
        pass

    def evaluation(self, record: Mapping[str, Any]) -> None:
        pass

    def samples(self, records: Iterable[Mapping[str, Any]]) -> None:
        pass

    def event(self, kind: str, message: str, facts: Mapping[str, Any]) -> None:
        pass

    def state(self, state: str, *, step: int, steps: int, message: str = "") -> None:
        pass

    def close(self) -> None:
        pass


def read_records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(line, record) of every whole line of a .jsonl file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    records = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                break
            try:
                records.append((line, json.loads(line)))
            except json.JSONDecodeError:
                raise UserError(f"{path} line {number} is not JSON; the file was edited or damaged") from None
    return records
