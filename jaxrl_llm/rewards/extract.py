"""Where a completion states its answer. Time is linear in the text, whatever it holds."""

import re

_TAIL = 20_000  # characters; an answer stands at the end
_PHRASES = 20  # the last "answer" is meant, or one not far before it
_BOX = re.compile(r"\\f?box(?:ed)?\s*")
_BARE = re.compile(r"-?\d+(?:\.\d+)?|\w")  # \boxed 7
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_CONNECTED = re.compile(r"[\s,;$&\\()\[\].]*(?:(?:and|or|\\text\s*\{\s*(?:and|or)\s*\})[\s,;$\\()\[\]]*)?")
_PHRASE = re.compile(r"answer\b[^\n.:=]{0,60}?(?:\b(?:is|are|be)\b|:|=)[\s:*]*(?P<rest>[^\n]+)", re.IGNORECASE)
_MATH = re.compile(
    r"\$\$([^$]{1,500})\$\$|\$((?:\\\$|[^$\n]){1,500})\$|\\\(((?:(?!\\\)).){1,500})\\\)|\\\[((?:(?!\\\]).){1,500})\\\]",
    re.DOTALL,
)
_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:\s*/\s*\d+)?(?:\s*(?:\\?%|percent\b))?"
_NUMBERS = re.compile(rf"(?<![\w.,])(?<!\d:)(?:{_NUMBER})(?:,?\s+(?:or|and)\s+\$?{_NUMBER})*(?![\d])", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|,?\s+(?:because|since|as|which|so)\b|\s+\(|\n")


def after_thinking(text: str) -> str:
    """What follows the thoughts (`</think>`); nothing where they were opened and not closed."""
    shown = text.rpartition("</think>")[2]
    return "" if "<think>" in shown else shown[-_TAIL:]


def final_answer(text: str) -> str | None:
    r"""The answer that a completion states after its thoughts, or None.

    The last \boxed{} (together with those it is connected to by "and", "or" or a comma); else what follows the last
    ####; else what follows the last "answer is" or "answer:"; else the last formula of the last line; else the last
    number, with those it is connected to; else the last line. A \boxed{} that is not closed is no answer.
    """
    text = after_thinking(text)
    if _BOX.search(text):
        return _boxed(text)
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip() or None
    if (stated := _stated(text)) is not None:
        return stated
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if formulas := list(_MATH.finditer(text)):
        last = next(group for group in formulas[-1].groups() if group is not None)
        if not _NUMBERS.search(text, formulas[-1].end()):
            return last
    if len(re.findall(r"[^\W\d_]{2,}", lines[-1])) > 1 and (numbers := [m.group() for m in _NUMBERS.finditer(text)]):
        return numbers[-1]
    return lines[-1]


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, content) of every closed \boxed{}, the outermost of nested ones."""
    closing = _closings(text)
    found: list[tuple[int, int, str]] = []
    for match in _BOX.finditer(text):
        start = match.end()
        if found and start < found[-1][1]:
            continue
        if text[start : start + 1] == "{":
            if start in closing:
                found.append((match.start(), closing[start] + 1, text[start + 1 : closing[start]]))
        elif token := _BARE.match(text, start):
            found.append((match.start(), token.end(), token.group()))
    return found


def _closings(text: str) -> dict[int, int]:
    """Where each brace that is closed is closed."""
    opened: list[int] = []
    closing = {}
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def _boxed(text: str) -> str | None:
    found = boxes(text)
    starts = [match.start() for match in _BOX.finditer(text)]
    if not found or starts[-1] > found[-1][1]:
        return None
    contents = [found[-1][2]]
    for (_, end, content), (start, _, _) in zip(found[-2::-1], found[:0:-1], strict=True):
        between = text[end:start]
        if not _CONNECTED.fullmatch(between) or between.count("\n") > 1:
            break
        contents.append(content)
    return ", ".join(reversed(contents))


def _stated(text: str) -> str | None:
    """What the last "answer" that is followed by something says."""
    for word in list(re.finditer(r"\banswer\b", text, re.IGNORECASE))[: -_PHRASES - 1 : -1]:
        phrase = _PHRASE.match(text, word.start())
        if phrase and phrase["rest"].strip(" *_`$"):
            return _statement(phrase["rest"])
    return None


def _statement(rest: str) -> str:
    """The part of a sentence after "the answer is" that is the answer."""
    rest = rest.strip()
    rest = rest if "{" in rest else rest.rstrip('"}')  # of JSON
    if formula := _MATH.match(rest.lstrip("* ")):
        following = rest.lstrip("* ")[formula.end() :]
        if not re.match(r"\s*(?:or|and|,)\s", following):
            return next(group for group in formula.groups() if group is not None) + _percent(following)
    return _SENTENCE_END.split(rest, maxsplit=1)[0].strip() or rest


def _percent(following: str) -> str:
    return "%" if re.match(r"\s*(?:\\?%|percent\b)", following) else ""
