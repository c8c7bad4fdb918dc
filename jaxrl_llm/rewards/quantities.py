"""Numbers as people write them, exactly: thousands, fractions, scientific notation, percent, currency, units."""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_MOST_DIGITS = 400
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_FRAC = r"\\frac\s*(?:\{\s*(?P<%s>-?[\d.,]+)\s*\}\s*\{\s*(?P<%s>[\d.,]+)\s*\}|\s*(?P<%s>\d)\s*(?P<%s>\d))"
_VALUE = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<currency>[$\u20ac\u00a3\u00a5]?)\s*(?P<inner>[+-]?)(?:"
    rf"(?:(?P<whole>\d+)\s*)?{_FRAC % ('top', 'bottom', 'top1', 'bottom1')}"
    rf"|(?:(?P<mixed>\d+)\s+)?(?P<over>\d[\d,]*(?:\.\d+)?)\s*/\s*(?P<under>\d[\d,]*(?:\.\d+)?)"
    rf"|(?P<mantissa>{_DECIMAL})\s*(?:[eE]\s*(?P<e>[+-]?\d+)"
    r"|(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\(?(?P<power>[+-]?\d+)\)?\}?)"
    r"|10\s*(?:\^|\*\*)\s*\{?\(?(?P<ten>[+-]?\d+)\)?\}?"
    rf"|(?P<decimal>{_DECIMAL}))"
)
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
# Spelt-out and short forms of one unit; a plural s is taken off first.
_UNITS = {
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "kilometer": "km",
    "kilometre": "km", "meter": "m", "metre": "m", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft",
    "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "milligram": "mg", "pound": "lb", "ounce": "oz",
    "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml", "second": "s", "sec": "s", "minute": "min",
    "hour": "h", "hr": "h", "day": "d", "dollar": "$", "usd": "$", "buck": "$", "euro": "\u20ac", "cent": "cent",
    "degree": "\u00b0", "deg": "\u00b0", "mph": "mi/h", "kmh": "km/h", "kph": "km/h",
    "cm": "cm", "mm": "mm", "km": "km", "m": "m", "in": "in", "ft": "ft", "yd": "yd", "mi": "mi", "g": "g",
    "kg": "kg", "mg": "mg", "lb": "lb", "oz": "oz", "l": "l", "ml": "ml", "s": "s", "min": "min", "h": "h", "d": "d",
    "$": "$", "\u20ac": "\u20ac", "\u00a3": "\u00a3", "\u00a5": "\u00a5", "\u00b0": "\u00b0", "week": "week",
    "month": "month", "year": "year",
}  # fmt: skip
_NO_UNIT = {
    "or", "and", "to", "not", "plus", "minus", "times", "over", "through", "but", "if", "when", "is", "mod",
    "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "i", "e", "n", "k", "x", "y", "z", "a", "b", "c",
}  # fmt: skip
_WORD = re.compile(r"[^\W\d_]+|[\u00b0$\u20ac\u00a3\u00a5]")


@dataclass(frozen=True)
class Quantity:
    """`unit` is canonical where it is one we know, None where there is none, and "?" for other words."""

    value: Fraction
    percent: bool = False
    unit: str | None = None


def quantity(text: str) -> Quantity | None:
    """The number that a cleaned text (see math_answer.cleaned) states and nothing else, or None."""
    match = _VALUE.match(text)
    value = _value(match) if match else None
    if match is None or value is None:
        return None
    rest = text[match.end() :]
    scaled = re.match(rf"\s*({'|'.join(_SCALES)})\b", rest, re.IGNORECASE)
    if scaled:
        value *= _SCALES[scaled[1].lower()]
        rest = rest[scaled.end() :]
    if percent := re.match(r"\s*(?:%|percent\b|per cent\b|pct\b)", rest, re.IGNORECASE):
        rest = rest[percent.end() :]
    unit = _unit(rest, attached=not rest[:1].isspace())
    if unit is None and rest.strip():
        return None
    return Quantity(value, percent is not None, unit or (_UNITS.get(match["currency"]) if match["currency"] else None))


def same(wanted: Quantity, given: Quantity) -> bool:
    """Whether the quantities are equal, exactly.

    A unit may be left out; two known ones must agree. A percentage equals its number without the sign where the wanted
    one is a percentage, or exceeds 1: a question for percents has been answered in percents. Else it is a hundredth.
    """
    if wanted.unit and given.unit and "?" not in (wanted.unit, given.unit) and wanted.unit != given.unit:
        return False
    if wanted.percent == given.percent:
        return wanted.value == given.value
    if wanted.percent:
        return given.value in (wanted.value, wanted.value / 100)
    return given.value / 100 == wanted.value or (given.value == wanted.value and abs(wanted.value) > 1)


def _value(match: re.Match[str]) -> Fraction | None:
    if match["sign"] and match["inner"]:
        return None
    if sum(map(str.isdigit, match.group())) > _MOST_DIGITS:
        return None
    try:
        magnitude = _magnitude(match)
    except (ValueError, ZeroDivisionError):
        return None
    if magnitude is None:
        return None
    return -magnitude if "-" in (match["sign"], match["inner"]) else magnitude


def _magnitude(match: re.Match[str]) -> Fraction | None:
    number = {name: text for name, text in match.groupdict().items() if text is not None}
    if "top" in number or "top1" in number:
        top = _exact(number.get("top") or number["top1"])
        bottom = _exact(number.get("bottom") or number["bottom1"])
        if "whole" in number and not 0 <= top < bottom:
            return None
        return int(number.get("whole", 0)) + top / bottom
    if "over" in number:
        top, bottom = _exact(number["over"]), _exact(number["under"])
        if "mixed" in number and not 0 <= top < bottom:
            return None
        return int(number.get("mixed", 0)) + top / bottom
    power = int(number.get("e") or number.get("power") or number.get("ten") or 0)
    if abs(power) > _MOST_DIGITS:
        return None
    return _exact(number.get("mantissa") or number.get("decimal") or "1") * Fraction(10) ** power


def _exact(text: str) -> Fraction:
    """Raises ValueError for a comma that separates no thousands."""
    text = text.replace(" ", "")
    if "," in text and not re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d*)?", text):
        raise ValueError(text)
    return Fraction(text.replace(",", "").rstrip("."))


def _unit(rest: str, *, attached: bool) -> str | None:
    """None for no unit and for what is none."""
    text = rest.strip().strip(".!")
    text = re.sub(r"\bper\b", "/", text)
    exponent = re.compile(r"\s*\^\s*\{?(-?[1-4])\}?|\s*([\u00b2\u00b3])")
    if not text or len(text) > 60:
        return None
    names, at = [], 0
    while at < len(text):
        if space := re.compile(r"[\s/,().-]+").match(text, at):
            names += ["/"] if "/" in space.group() else []
            at = space.end()
            continue
        word = _WORD.match(text, at)
        if word is None:
            return None
        at = word.end()
        name = word.group()
        known = _UNITS.get(name) or _UNITS.get(name.lower()) or _UNITS.get(name.lower().removesuffix("s"))
        if known is None and (name.lower() in _NO_UNIT or len(name) == 1 or (attached and len(names) == 0)):
            return None
        power = exponent.match(text, at)
        if power:
            at = power.end()
            known = known and f"{known}^{power[1] or unicodedata.digit(power[2])}"
        names.append(known or "?")
    if len([name for name in names if name != "/"]) > 6:
        return None
    return "?" if "?" in names else "".join(names) or None
