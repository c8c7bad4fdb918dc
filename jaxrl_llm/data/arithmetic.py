"""Arithmetic as procedural tasks: every choice of operands between two bounds is one problem."""

from collections.abc import Callable, Mapping
from functools import partial

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.procedural import Cell
from jaxrl_llm.types import UserError


def _addition(a: int, b: int) -> Problem:
    return Problem(f"{a}+{b}", f"{a}+{b}=", f"{a + b}")


def _echo_addition(a: int, b: int) -> Problem:
    # Pretrained policies continue an equation far better than they answer with a bare number.
    return Problem(f"{a}+{b}", f"{a} + {b} =", f"{a} + {b} = {a + b}")


def _subtraction(a: int, b: int) -> Problem:
    return Problem(f"{a}-{b}", f"{a}-{b}=", f"{a - b}")


def _multiplication(a: int, b: int) -> Problem:
    return Problem(f"{a}*{b}", f"{a}*{b}=", f"{a * b}")


def _division(quotient: int, b: int) -> Problem:
    return Problem(f"{quotient * b}/{b}", f"{quotient * b}/{b}=", f"{quotient}")


def _remainder(a: int, b: int) -> Problem:
    return Problem(f"{a}%{b}", f"{a}%{b}=", f"{a % b}")


def _three_terms(a: int, b: int, c: int) -> Problem:
    return Problem(f"{a}+{b}-{c}", f"{a}+{b}-{c}=", f"{a + b - c}")


TASKS: Mapping[str, tuple[int, Callable[..., Problem]]] = {
    "addition": (2, _addition),
    "echo_addition": (2, _echo_addition),
    "subtraction": (2, _subtraction),
    "multiplication": (2, _multiplication),
    "division": (2, _division),
    "remainder": (2, _remainder),
    "three_terms": (3, _three_terms),
}
"""name -> how many operands, and the problem they make. Division's first operand is the quotient."""


def arithmetic(task: str, *, low: int, high: int) -> list[Cell]:
    """All problems of `task` over operands low..high, as one cell in the order of the operands.

    Raises UserError for an unknown task, and where a division by 0 would be among them.
    """
    if task not in TASKS:
        raise UserError(f"arithmetic task {task!r} is not known; give one of: {', '.join(TASKS)}")
    if task in ("division", "remainder") and low == 0:
        raise UserError(f"arithmetic task {task} divides by every operand, and low = 0; use at least 1")
    operands, make = TASKS[task]
    return [Cell((high - low + 1) ** operands, partial(_numbered, make, operands, low, high - low + 1))]


def _numbered(make: Callable[..., Problem], operands: int, low: int, base: int, number: int) -> Problem:
    digits = []
    for _ in range(operands):
        number, digit = divmod(number, base)
        digits.append(low + digit)
    return make(*reversed(digits))
