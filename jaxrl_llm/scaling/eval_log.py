"""The evaluations of one of our run directories: the lines of a .jsonl file that a resumed run may have rewound."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

RUN_FILES = ("state.json", "metrics.jsonl", "eval.jsonl", "config.yaml")
VALUE = "value"
"""The key of an evaluation's metric; with "/NAME" that of the prompts of one of several sources."""


def is_run(path: Path) -> bool:
    """Whether a path is a run directory: it has one of the files that every run writes."""
    return any((path / name).is_file() for name in RUN_FILES)


def number(record: Record, key: str, default: float = math.nan) -> float:
    """The number under `key`; `default` where there is none (missing, null, not a number)."""
    value = record.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return default


def source_names(evaluations: Sequence[Record]) -> list[str]:
    """The sources that a run evaluated apart, in the order of their first appearance; none of a run with one source."""
    keys = dict.fromkeys(key for record in evaluations for key in record if key.startswith(f"{VALUE}/"))
    return [key.removeprefix(f"{VALUE}/") for key in keys]


def read_lines(path: Path, *, repeated: bool = False) -> tuple[list[Record], int]:
    """The records of a file that count, and how many lines (an unfinished last one apart) hold none.

    A record is an object with a step. From the step that a resumed run went back to, its later lines count;
    `repeated` says that one step may have several lines, and going back then shows as a falling step only.
    """
    if not path.is_file():
        return [], 0
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")
    unfinished = len(lines) - 1  # what follows the last newline: empty, unless the writer was stopped in mid-line
    records, bad = [], 0
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and math.isfinite(number(record, "step")):
            records.append(record)
        elif index != unfinished:
            bad += 1
    return _rewound(records, repeated=repeated), bad


def _rewound(records: list[Record], *, repeated: bool) -> list[Record]:
    kept: list[Record] = []
    for record in records:
        step = number(record, "step")
        if kept and (step < kept[-1]["step"] or (step == kept[-1]["step"] and not repeated)):
            while kept and kept[-1]["step"] >= step:
                kept.pop()
        kept.append(record)
    return kept
