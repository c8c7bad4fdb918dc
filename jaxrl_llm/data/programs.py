"""Programs as procedural tasks: a function of one whole number, told as steps that follow one another.

code +3 *4:        -> f=lambda x:(x+3)*4

Right is whatever defines an f that returns the same for numbers that the prompt does not show, so that neither a
constant nor a value learnt by heart will do: two different functions of these tasks agree in one number at most.
"""

import json
from collections.abc import Sequence
from functools import partial

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.procedural import Cell

_OPERATIONS = "+-*"
_INPUTS = (-7, 0, 1, 12, 100)


def programs(*, low: int, high: int, shortest: int, longest: int) -> list[Cell]:
    """Functions of `shortest` to `longest` steps, each adding, subtracting or multiplying by a number low..high; a cell
    for each length. Their answers are tests for the sandbox, their solutions one-line programs."""
    steps = [(operation, number) for operation in _OPERATIONS for number in range(low, high + 1)]
    return [Cell(len(steps) ** length, partial(_program, steps, length)) for length in range(shortest, longest + 1)]


def _program(steps: Sequence[tuple[str, int]], length: int, number: int) -> Problem:
    chosen = []
    for _ in range(length):
        number, step = divmod(number, len(steps))
        chosen.append(steps[step])
    told = " ".join(f"{operation}{operand}" for operation, operand in chosen)
    returned = [_applied(chosen, x) for x in _INPUTS]
    tests = {"entry_point": "f", "check": f"assert [f(x) for x in {_INPUTS}] == {returned}"}
    return Problem(told, f"code {told}:", json.dumps(tests), f"f=lambda x:{_expression(chosen)}")


def _applied(steps: Sequence[tuple[str, int]], x: int) -> int:
    for operation, operand in steps:
        x = x * operand if operation == "*" else x + operand if operation == "+" else x - operand
    return x


def _expression(steps: Sequence[tuple[str, int]]) -> str:
    text, sum_ = "x", False
    for operation, operand in steps:
        if operation == "*" and sum_:
            text, sum_ = f"({text})", False
        text += f"{operation}{operand}"
        sum_ = sum_ or operation != "*"
    return text
