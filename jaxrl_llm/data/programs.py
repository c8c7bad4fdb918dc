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
from jaxrl_llm.types import UserError

_OPERATIONS = "+-*"
_INPUTS = (-7, 0, 1, 12, 100)
_MOST_DIGITS = 4000  # Python refuses to write more than 4,300


def programs(*, low: int, high: int, shortest: int, longest: int) -> list[Cell]:
    """Functions of `shortest` to `longest` steps, each adding, subtracting or multiplying by a number low..high; a cell
    for each length. Their answers are tests for the sandbox, their solutions one-line programs.

    Raises UserError where values would have more digits than Python writes.
    """
    if longest * len(str(high)) > _MOST_DIGITS:
        raise UserError(f"longest = {longest} steps by numbers up to {high} make values too long to write; lower one")
    base = high - low + 1
    return [
        Cell((len(_OPERATIONS) * base) ** length, partial(_program, low, base, length))
        for length in range(shortest, longest + 1)
    ]


def _program(low: int, base: int, length: int, number: int) -> Problem:
    steps = []
    for _ in range(length):
        number, step = divmod(number, len(_OPERATIONS) * base)
        steps.append((_OPERATIONS[step // base], low + step % base))
    told = " ".join(f"{operation}{operand}" for operation, operand in steps)
    returned = [_applied(steps, x) for x in _INPUTS]
    tests = {"entry_point": "f", "check": f"assert [f(x) for x in {_INPUTS}] == {returned}"}
    return Problem(told, f"code {told}:", json.dumps(tests), f"f=lambda x:{_expression(steps)}")


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
