"""What a person sees while a run goes on, and when it has ended."""

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.scaling.eval_log import VALUE, source_names

_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward_mean", "{:+.3f}"),
    ("pass", "pass_rate", "{:.3f}"),
    ("eval", "eval", "{:.3f}"),
    ("tokens", "completion_tokens_mean", "{:.1f}"),
    ("trunc", "truncation_rate", "{:.3f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("grad", "grad_norm", "{:.3f}"),
    ("lag", "lag_max", "{:.0f}"),
    ("s/step", "step_s", "{:.2f}"),
    ("tok/s", "tokens_per_s", "{:.0f}"),
)


class Progress:
    """A live table of the latest steps on a terminal; elsewhere one line per evaluation and per ten seconds.

    A `quiet` one shows nothing.
    """

    def __init__(self, title: str, *, steps: int, rows: int = 12, quiet: bool = False):
        self._console = Console(stderr=False, highlight=False, quiet=quiet)
        self._title, self._steps = title, steps
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=rows)
        self._eval: float | None = None
        self._printed = 0.0
        self._live = (
            Live(console=self._console, refresh_per_second=4) if self._console.is_terminal and not quiet else None
        )

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live:
            self._live.__exit__(*exception)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def step(self, record: Mapping[str, Any]) -> None:
        self._rows.append({**record, "eval": self._eval})
        self._eval = None
        if self._live:
            self._live.update(self._table())
        elif time.monotonic() - self._printed > 10:
            self._print(self._rows[-1])

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._eval = record["value"]
        if self._rows and self._rows[-1]["step"] == record["step"]:
            self._rows[-1] = {**self._rows[-1], "eval": record["value"]}
        if self._live:
            self._live.update(self._table())
        else:
            apart = ", ".join(f"{name} {record[f'{VALUE}/{name}']:.4f}" for name in source_names([record]))
            text = f"step {record['step']}: held-out {record['metric']} {record[VALUE]:.4f}"
            self.say(f"{text} ({apart})" if apart else text)

    def _print(self, row: Mapping[str, Any]) -> None:
        self._printed = time.monotonic()
        self.say("  ".join(f"{head} {_cell(row, key, form)}" for head, key, form in _COLUMNS if head != "eval"))

    def _table(self) -> Table:
        table = Table(title=f"{self._title}: {self._rows[-1]['step'] if self._rows else 0} of {self._steps} steps")
        for head, *_ in _COLUMNS:
            table.add_column(head, justify="right")
        for row in self._rows:
            table.add_row(*(_cell(row, key, form) for _, key, form in _COLUMNS))
        return table


def _cell(row: Mapping[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return "" if value is None or not math.isfinite(value) else form.format(value)


def ablations(model: ModelConfig) -> list[str]:
    """What a run is told at its start that it does without, in capitals."""
    if model.head_dtype == "float32":
        return []
    return [f"ABLATION: model.head_dtype = {model.head_dtype}: logits in {model.head_dtype} in trainer and sampler"]


def print_summary(facts: Mapping[str, Any]) -> None:
    """A run's summary as one line per fact."""
    console = Console(highlight=False)
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {_short(v)}" for k, v in value.items()) or "none"
        console.print(f"{key:<{width}}  {_short(value)}", markup=False, soft_wrap=True)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} {_short(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(v) for v in value) + "]"
    return str(value)


def say(text: str) -> None:
    """One line, at once."""
    print(text, flush=True)


def write(text: str) -> None:
    """Text as it is, at once."""
    print(text, end="", flush=True)


def tell(text: str) -> None:
    """A line for the person, apart from what a command prints."""
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


def print_evaluation(result: Mapping[str, Any]) -> None:
    """A row for each metric, a column for each source and for all, with 95 % intervals."""
    columns = {**result["tasks"], "all": result["all"]} if len(result["tasks"]) > 1 else result["tasks"]
    table = Table()
    table.add_column("metric")
    for name, found in columns.items():
        table.add_column(f"{name} ({found['prompts']})", justify="right")
    metrics = dict.fromkeys(key for found in columns.values() for key in found if "@" in key)
    for metric in metrics:
        cells = [found.get(metric) for found in columns.values()]
        table.add_row(
            metric, *("-" if c is None else f"{c['value']:.4f} [{c['low']:.4f}, {c['high']:.4f}]" for c in cells)
        )
    table.add_row("truncated", *(f"{found['truncation_rate']:.4f}" for found in columns.values()))
    table.add_row("no reward", *(str(found["failed"]) for found in columns.values()))
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else 400  # a file has no width to fit into
    title = f"{result['weights']}, {result['samples']} samples at temperature {result['temperature']}"
    console.print(title, markup=False, soft_wrap=True)
    console.print(table)
