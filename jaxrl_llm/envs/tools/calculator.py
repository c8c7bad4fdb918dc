"""Arithmetic, exactly: a text like `2*(3.5-1/3)` becomes its value, or says what is wrong with it."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

_LONGEST = 400  # characters of a question
_BITS = 4096  # of the numerator and of the denominator of every number on the way

# No other character can stand in arithmetic, so that the parser never sees a name, a call or a text.
_ALPHABET = re.compile(r"[0-9eE.+\-*/%()\s]*", re.ASCII)
_NUMBER = re.compile(r"(\d*)\.?(\d*)(?:[eE]([+-]?\d+))?", re.ASCII)

_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class _WrongError(Exception):
    """What is wrong with the question."""


def calculate(asked: str) -> str:
    """The value of `asked`: numbers with + - * / // % ** and parentheses, as Python reads them, but exact.

    A whole number, a decimal if it ends, else a fraction in lowest terms. "error: ..." for what is no arithmetic, has
    no value, or is too large; nothing large is ever worked out.
    """
    text = asked.strip()
    try:
        return _written(_value(_parsed(text), text))
    except _WrongError as wrong:
        return f"error: {wrong}"
    except ZeroDivisionError:
        return "error: division by zero"
    except (RecursionError, MemoryError):
        return "error: this is nested too deeply"


def _parsed(text: str) -> ast.expr:
    if not text:
        raise _WrongError("there is nothing to calculate")
    if len(text) > _LONGEST:
        raise _WrongError(f"more than {_LONGEST} characters")
    if not _ALPHABET.fullmatch(text):
        raise _WrongError("only numbers, + - * / // % ** and parentheses can be calculated")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise _WrongError("this is no arithmetic") from None


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant():
            value = _number(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp() if type(node.op) in _UNARY:
            value = _UNARY[type(node.op)](_value(node.operand, text))
        case ast.BinOp(op=ast.Pow()):
            value = _power(_value(node.left, text), _value(node.right, text))
        case ast.BinOp() if type(node.op) in _BINARY:
            value = Fraction(_BINARY[type(node.op)](_value(node.left, text), _value(node.right, text)))
        case _:
            raise _WrongError("this is no arithmetic")
    if max(abs(value.numerator), value.denominator).bit_length() > _BITS:
        raise _WrongError("a number is too large")
    return value


def _number(literal: str) -> Fraction:
    """The literal itself, not the binary number nearest to it."""
    found = _NUMBER.fullmatch(literal)
    if found is None or not (found[1] or found[2]):
        raise _WrongError("this is no arithmetic")
    whole, behind, exponent = found.groups()
    if abs(int(exponent or 0)) > _BITS:
        raise _WrongError("a number is too large")
    return Fraction(int(whole + behind)) * Fraction(10) ** (int(exponent or 0) - len(behind))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _WrongError("an exponent must be a whole number")
    # Of 0, 1 and -1 every power is small; of all others it has about this many bits.
    bits = (max(abs(base.numerator), base.denominator).bit_length() - 1) * abs(exponent)
    if bits > _BITS:
        raise _WrongError("a number is too large")
    if abs(exponent) > _BITS:  # of 0, 1 or -1
        exponent = exponent % 2 + (2 if exponent > 0 else -2)
    return Fraction(base) ** int(exponent)


def _written(value: Fraction) -> str:
    whole, twos, fives = value.denominator, 0, 0
    while whole % 2 == 0:
        whole, twos = whole // 2, twos + 1
    while whole % 5 == 0:
        whole, fives = whole // 5, fives + 1
    if value.denominator == 1 or whole != 1:
        return str(value)
    places = max(twos, fives)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
