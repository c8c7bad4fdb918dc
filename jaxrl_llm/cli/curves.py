"""What `jaxrl fit`, `compare` and `plan` share: reading their arguments, and writing JSON lines and plots."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from jaxrl_llm.report.fitting import write_atomically
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.sources import NamedCurve, read_curves
from jaxrl_llm.types import UserError


def pairs(given: Sequence[str], option: str) -> dict[str, float]:
    """NAME=NUMBER options as a dict."""
    found: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise UserError(f"{option} {text} is no NAME=NUMBER, for example {option} R0=0.35")
    return found


def number_or_percent(text: str | None, option: str) -> tuple[float | None, float | None]:
    """(number, share): one of the two, from "3e18" or "50%"; both None for None."""
    if text is None:
        return None, None
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 < share <= 1:
                return None, share
        else:
            return float(text), None
    except ValueError:
        pass
    raise UserError(f"{option} {text} is neither a compute (3e18) nor a share of the last one (50%)")


def read_all(paths: Iterable[Path], x: str | None, y: str | None, group: str | None) -> list[NamedCurve]:
    """The curves of all files, of a mixture's run those of its sources too, under names of their own: a name that
    stands twice gets its file's before it."""
    found = [curve for path in paths for curve in read_curves(path, x=x, y=y, group=group, by_source=True)]
    names = Counter(curve.name for curve in found)
    unique = [replace(c, name=f"{c.path}:{c.name}") if names[c.name] > 1 else c for c in found]
    twice = [name for name, count in Counter(c.name for c in unique).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice; name each curve once")
    return unique


def first_part(curve: Curve, upto: str | None) -> float | None:
    """The compute that `upto` ("3e18" or "50%") means for a curve."""
    compute, share = number_or_percent(upto, "--upto")
    return compute if share is None else share * float(curve.compute[-1])


def write_objects(objects: Sequence[Mapping[str, Any]], out: str) -> None:
    """One JSON object a line to a file, or to standard output for "-"."""
    lines = "".join(json.dumps(value, allow_nan=False) + "\n" for value in objects)
    if out == "-":
        typer.echo(lines, nl=False)
        return
    try:
        write_atomically(Path(out), lines)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror})") from error
