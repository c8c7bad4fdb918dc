"""Reading a run directory. Nothing here writes, and a run that was killed in mid-line still reads.

A run directory holds config.yaml, environment.json, state.json, and three files of one JSON object a line:
metrics.jsonl (every optimizer step), eval.jsonl (every evaluation) and samples.jsonl (some completions).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.scaling.curves import Axis, Curve
from jaxrl_llm.scaling.eval_log import RUN_FILES, VALUE, Record, is_run, number, read_lines, source_names
from jaxrl_llm.types import UserError


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run directory, after a resumed run's overtaken steps have been left out.

    Any of them may be empty: a run that has only started has no metrics. `unreadable` counts the lines, file by
    file, that hold no JSON object; an unfinished last line (the run may be writing it now) is not counted.
    """

    path: Path
    config_text: str
    environment: Record
    state: Record
    metrics: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    samples: tuple[Record, ...]
    unreadable: Mapping[str, int]

    @property
    def metric(self) -> str | None:
        """Name of the evaluation metric, such as "mean@4"."""
        return str(self.evaluations[-1].get("metric", "reward")) if self.evaluations else None

    @property
    def sources(self) -> list[str]:
        """The sources of a mixture, which were evaluated apart; none of a run with one."""
        return source_names(self.evaluations)

    def curve(self, axis: Axis, source: str | None = None) -> Curve:
        """The evaluation curve over one compute axis, of all prompts or of one source's.

        UserError where a line does not say one of the two numbers.
        """
        value = VALUE if source is None else f"{VALUE}/{source}"
        for line in self.evaluations:
            for key in (axis, value):
                if not math.isfinite(number(line, key)):
                    raise UserError(
                        f"eval.jsonl records no {key} at step {line['step']} ({line.get(key)!r}); "
                        "without it there is no curve over this axis"
                    )
        return Curve(
            np.array([number(line, axis) for line in self.evaluations]),
            np.array([number(line, value) for line in self.evaluations]),
        )


def read_run(run_dir: str | Path) -> RunFiles:
    """Read a run directory. Raises UserError if it is none (no directory, or none of a run's files in it)."""
    path = Path(run_dir)
    if not path.is_dir():
        raise UserError(f"no run directory {path}; give the directory that `jaxrl train` wrote")
    if not is_run(path):
        raise UserError(f"{path} is no run directory: it has none of {', '.join(RUN_FILES)}")
    unreadable: dict[str, int] = {}

    def lines(name: str, *, repeated: bool = False) -> tuple[Record, ...]:
        records, bad = read_lines(path / name, repeated=repeated)
        if bad:
            unreadable[name] = bad
        return tuple(records)

    config = path / "config.yaml"
    return RunFiles(
        path=path,
        config_text=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        environment=_read_object(path / "environment.json"),
        state=_read_object(path / "state.json"),
        metrics=lines("metrics.jsonl"),
        evaluations=lines("eval.jsonl"),
        samples=lines("samples.jsonl", repeated=True),
        unreadable=unreadable,
    )


def series(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, both float64 [N], of the records that hold a finite number under `key`."""
    pairs = [(number(record, "step"), number(record, key)) for record in records]
    kept = np.array([pair for pair in pairs if np.isfinite(pair).all()], np.float64).reshape(-1, 2)
    return kept[:, 0], kept[:, 1]


def last(records: Sequence[Record], key: str) -> Any:
    """The newest value under `key` that is not null; None if there is none."""
    return next((record[key] for record in reversed(records) if record.get(key) is not None), None)


def _read_object(path: Path) -> Record:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); restore it or delete it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object; restore it or delete it")
    return value
