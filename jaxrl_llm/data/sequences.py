"""Sorting, copying and counting as procedural tasks: every sequence between two lengths is one problem.

sort 3 1 2:        -> 1 2 3
copy abca:         -> abca
count a in abca:   -> 2
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.procedural import Cell


def sorting(*, low: int, high: int, shortest: int, longest: int) -> list[Cell]:
    """Lists of numbers low..high, put into rising order; a cell for each length."""
    numbers = range(low, high + 1)
    return [Cell(len(numbers) ** length, partial(_sorting, numbers, length)) for length in range(shortest, longest + 1)]


def copying(*, alphabet: str, shortest: int, longest: int) -> list[Cell]:
    """Texts over `alphabet`, repeated; a cell for each length."""
    return [
        Cell(len(alphabet) ** length, partial(_copying, alphabet, length)) for length in range(shortest, longest + 1)
    ]


def counting(*, alphabet: str, shortest: int, longest: int) -> list[Cell]:
    """How often one letter stands in a text over `alphabet`; a cell for each length."""
    return [
        Cell(len(alphabet) ** (length + 1), partial(_counting, alphabet, length))
        for length in range(shortest, longest + 1)
    ]


def _sorting(numbers: range, length: int, number: int) -> Problem:
    values = _digits(numbers, length, number)
    text = " ".join(map(str, values))
    return Problem(text, f"sort {text}:", " ".join(map(str, sorted(values))))


def _copying(alphabet: str, length: int, number: int) -> Problem:
    text = "".join(_digits(alphabet, length, number))
    return Problem(text, f"copy {text}:", text)


def _counting(alphabet: str, length: int, number: int) -> Problem:
    letter, *letters = _digits(alphabet, length + 1, number)
    text = "".join(letters)
    return Problem(f"{letter} in {text}", f"count {letter} in {text}:", f"{text.count(letter)}")


def _digits(symbols: Sequence[Any], length: int, number: int) -> list[Any]:
    """`number` written with `length` of the `symbols`: different numbers, different sequences."""
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(symbols))
        digits.append(symbols[digit])
    return digits
