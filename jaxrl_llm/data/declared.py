"""From rows with declared fields to problems: types checked, ids unique, held-out rows drawn."""

import hashlib
from collections.abc import Mapping
from typing import Any

import grain

from jaxrl_llm.data.problem import Problem, Split
from jaxrl_llm.data.prompts import plain_text
from jaxrl_llm.data.rows import Row, Rows
from jaxrl_llm.types import UserError


def read_problems(
    rows: Rows,
    *,
    prompt: str,
    answer: str,
    id: str | None = None,
    answer_after: str | None = None,
    solution: str | None = None,
) -> list[Problem]:
    """The problems of `rows`, with their fields `prompt`, `answer`, `id` and `solution`; without `id` rows are numbered
    from 1.

    Prompts are strings; an answer or an id may be a whole number too, and is written in digits. With `answer_after` the
    answer is what follows the last such mark. White space around an answer is cut off. Raises UserError naming the
    first row in which a field is missing, has another type, is empty or holds a null character, that lacks the mark,
    or whose id has been there before.
    """
    seen: dict[str, str] = {}

    def problem(index: int, row: Row) -> Problem:
        text = _text(row, answer, numbers=True)
        if answer_after is not None:
            if answer_after not in text:
                raise UserError(f"{row.where}: field {answer!r} does not hold the mark {answer_after!r}")
            text = text.rpartition(answer_after)[2]
        if not (text := text.strip()):
            raise UserError(f"{row.where}: field {answer!r} holds an empty answer")
        name = str(index + 1) if id is None else _text(row, id, numbers=True)
        if name in seen:
            raise UserError(f"{row.where}: id {name!r} stands at {seen[name]} already; ids must differ")
        seen[name] = row.where
        right = None if solution is None else _text(row, solution, numbers=False)
        return Problem(name, _text(row, prompt, numbers=False), text, right)

    dataset = grain.MapDataset.source(rows).map_with_index(problem)
    return [found for index in range(len(dataset)) if (found := dataset[index]) is not None]


def hold_out(problems: list[Problem], count: int, *, seed: int) -> Split:
    """`count` problems held out, drawn by a digest of (seed, prompt): rows of one prompt stay together, so a few more
    may be held out. The order of the rows does not matter.

    Raises UserError if that leaves nothing to train on.
    """
    keys = [hashlib.sha256(f"{seed} {plain_text(problem.prompt)}".encode()).digest() for problem in problems]
    border = sorted(keys)[min(count, len(keys)) - 1] if count else b""
    split = Split(
        train=[problem for problem, key in zip(problems, keys, strict=True) if key > border],
        heldout=[problem for problem, key in zip(problems, keys, strict=True) if key <= border],
    )
    if not split.train:
        raise UserError(f"heldout = {count} leaves nothing to train on of {len(problems)} rows; hold out fewer")
    return split


def _text(row: Row, field: str, *, numbers: bool) -> str:
    fields: Mapping[str, Any] = row.fields
    if field not in fields:
        raise UserError(f"{row.where} has no field {field!r}; it has {', '.join(map(str, fields)) or 'none'}")
    value = fields[field]
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        wanted = "a string or a whole number" if numbers else "a string"
        raise UserError(f"{row.where}: field {field!r} is a {type(value).__name__}, not {wanted}")
    if not value.strip():
        raise UserError(f"{row.where}: field {field!r} is empty")
    if "\0" in value:
        raise UserError(f"{row.where}: field {field!r} holds a null character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{row.where}: field {field!r} holds half a character (a lone surrogate)") from None
    return value
