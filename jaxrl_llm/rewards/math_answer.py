r"""Whether a completion's final answer is the wanted one, for mathematics.

Numbers, choices and words are decided here, exactly. Everything else goes to math-verify, which may hang or eat memory
and so runs in the processes of `pool.WorkerPool` alone: its own time-outs (SIGALRM) are off, because it would call what
took too long wrong. Its leniencies are closed: decimals are taken at their word (0.333333 is not 1/3), several answers
("6 or 5") are no single one.
"""

import functools
import logging
import re
import unicodedata
from typing import Any

from jaxrl_llm.rewards.extract import boxes, final_answer
from jaxrl_llm.rewards.quantities import quantity, same

_CHOICE = re.compile(r"\(?([A-J])\)?[.:]?")
_GIVEN_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:\(([A-J])\)|([A-J])(?=[).:,/&]|\s*$|\s+(?:or|and)\b))(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_NAMED_CHOICE = re.compile(r"\(([A-J])\)|\b(?:[Oo]ption|[Cc]hoice) ([A-J])\b")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")
_ASSIGNED = re.compile(r"(?P<name>[^\W\d_](?:_\{?\w+\}?)?(?:\([^\W\d_]\))?)\s*(?:=|\\in\b|:)\s*(?P<value>[^=<>]+)")
_STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|operatorname|mbox)\s*\{([^{}]*)\}"
)
_POWER = re.compile(r"(\d+)\s*\)?\s*(?:\^|\*\*)\s*[{(]*\s*-?(\d+)")
_TOWER = re.compile(r"(?:\^|\*\*)[\s{(]*\d+\s*[)]?\s*(?:\^|\*\*)")
_LARGE_FACTORIAL = re.compile(r"\d{5,}\s*!|!\s*!|!\s*\)\s*!|\d{3,}\s*\)*!\s*\)*\s*\^")
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "exp",
    "sqrt", "frac", "max", "min", "gcd", "lcm", "mod", "matrix", "pmatrix", "bmatrix", "vmatrix", "cases", "array",
}  # fmt: skip
_LONGEST_NUMBER, _LARGEST_POWER = 1000, 20_000  # digits
_DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?![\w.])")
_REPEATING = re.compile(r"(?<!\d)(\d{0,50})\.(\d{0,50})\\overline\s*\{(\d{1,50})\}")
_REPLACED = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\ufe63": "-", "\uff0d": "-", "\u00d7": r"\times ",
    "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/", "\u2044": "/", "\u03c0": r"\pi ", "\u221a": r"\sqrt ",
    "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ", "\u2208": r"\in ", "\u00a0": " ",
    "\u00bd": r" \frac{1}{2}", "\u00bc": r" \frac{1}{4}", "\u00be": r" \frac{3}{4}", "\u2009": " ", "\u202f": " ",
}  # fmt: skip


def is_right(text: str, answer: str) -> bool:
    """Whether the final answer of `text` is `answer`, which may be bare, boxed, or a worked one that ends in ####."""
    stated = final_answer(text)
    if stated is None:
        return False
    if boxes(answer) or "####" in answer:
        answer = final_answer(answer) or answer
    return equal(cleaned(stated), cleaned(answer))


def warm_up() -> None:
    """Import what is slow to import and make it build its tables."""
    logging.disable(logging.CRITICAL)  # math-verify warns that its time-outs are off
    for stated, answer in ((r"\frac{\sqrt{2}+x}{2}", r"\frac{x+2}{2}"), (r"\log_2 8", "3"), ("(1, 2]", "x<3")):
        equal(stated, answer)


def cleaned(text: str) -> str:
    """One answer without what only typesets it; control characters and halves of surrogate pairs become spaces."""
    text = "".join(_REPLACED.get(c, " " if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co") else c) for c in text)
    text = text.replace(r"\$", "$").replace(r"\%", "%").replace("{,}", ",").replace("~", " ").replace(r"\!", "")
    text = _REPEATING.sub(_fraction, text)
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(
        r"\\(?:left|right|displaystyle|bigl|bigr|Bigl|Bigr|big|Big)(?![a-zA-Z])\.?|(?<!\\)\\[,;: ]", " ", text
    )
    text = re.sub(r"\\quad|\\qquad", " ", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "\u00b0", text)
    text = re.sub(r"(?<=\d)\s*\\text\s*\{\s*%\s*\}", "%", text)
    for _ in range(3):  # nested at most so deep
        text = _STYLE.sub(r" \1 ", text) if "{" in text else text
        text = _unwrapped(text.strip(" \t\n*_`\"'"))
    if len(found := boxes(text)) == 1 and found[0][:2] == (0, len(text)):
        text = found[0][2]
    return " ".join(text.split()).rstrip(".,;:").strip()


def equal(stated: str, answer: str) -> bool:
    """Whether two cleaned answers say the same."""
    if not stated or not answer:
        return False
    if stated == answer:
        return True
    if len(stated) > 200 + 4 * len(answer):
        return False  # whatever it is, it is no final answer
    if choice := _CHOICE.fullmatch(answer):
        return _choice(stated) == choice[1]
    if _WORDS.fullmatch(answer) and len(answer) > 2:
        return _same_words(stated, answer)
    stated, answer = _without_name(stated, answer)
    wanted, given = quantity(answer), quantity(stated)
    if wanted and given:
        return same(wanted, given)
    if wanted and "=" in stated and (last := quantity(stated.rpartition("=")[2].strip())):
        return same(wanted, last)  # 3 + 4 = 7
    if _prose(stated) > max(1, _prose(answer)) or _unreasonable(stated):
        return False
    return _verified(stated, answer)


def _unwrapped(text: str) -> str:
    for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end):
            inside = text[len(start) : len(text) - len(end)]
            if start not in inside:
                return inside.strip()
    return text


def _choice(stated: str) -> str | None:
    if match := _GIVEN_CHOICE.match(stated):
        several = re.match(r"[\s,)]*(?:or|and|,|/|&)\W", match["rest"] + " ", re.IGNORECASE)
        return None if several else (match[1] or match[2]).upper()
    named = {group for pair in _NAMED_CHOICE.findall(stated) for group in pair if group}
    return named.pop() if len(named) == 1 else None


def _same_words(stated: str, answer: str) -> bool:
    def words(text: str) -> list[str]:
        return [w for w in re.findall(r"[^\W_]+", text.casefold()) if w not in ("a", "an", "the", "is", "it", "on")]

    return words(stated) == words(answer) and not re.search(r"\d", stated)


def _without_name(stated: str, answer: str) -> tuple[str, str]:
    """`x = 5` for `5`, and the reverse; where both name something, only if it is the same."""
    left, right = _ASSIGNED.fullmatch(stated), _ASSIGNED.fullmatch(answer)
    if left and right:
        return (left["value"].strip(), right["value"].strip()) if left["name"] == right["name"] else (stated, answer)
    return (left["value"].strip() if left else stated), (right["value"].strip() if right else answer)


def _fraction(repeating: re.Match[str]) -> str:
    before, again = repeating[1] + repeating[2], repeating[3]
    top = int(before + again) - int(before or "0")
    return rf"\frac{{{top}}}{{{10 ** len(repeating[2]) * (10 ** len(again) - 1)}}}"


def _prose(text: str) -> int:
    """How many words there are that no formula has."""
    return sum(word.lower() not in _FUNCTIONS for word in re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}", text))


def _unreasonable(stated: str) -> bool:
    """Powers and factorials that nobody means and no machine holds."""
    if any(len(digits) > _LONGEST_NUMBER for digits in re.findall(r"\d+", stated)):
        return True
    if _TOWER.search(stated) and any(int(digits) > 4 for digits in re.findall(r"\d+", stated)):
        return True
    return bool(_LARGE_FACTORIAL.search(stated)) or any(
        len(base) * int(exponent) > _LARGEST_POWER for base, exponent in _POWER.findall(stated)
    )


def _verified(stated: str, answer: str) -> bool:
    from math_verify import verify  # in the workers alone: it takes a second and needs the extra

    wanted = _parsed(answer)
    given = _parsed(stated) if wanted else []
    if not wanted or not given:
        return False
    return verify(wanted, given, timeout_seconds=0, allow_set_relation_comp=True)


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    exact = _DECIMAL.sub(lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    return parse(f"${exact}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=0)
