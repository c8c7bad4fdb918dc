"""A reward for keeping to one language, as far as its script tells.

Magistral (arXiv:2506.10910) rewards a completion in the language of its prompt. What is told apart here is the script
that prose is written in, not English from French.
"""

import bisect
import re
from collections import Counter
from collections.abc import Sequence

from jaxrl_llm.types import PromptTask, Reward

_SHARE = 0.95  # of a completion's letters
# (first code point, last, script) of the letters of the scripts told apart; sorted.
_RANGES = (
    (0x0041, 0x005A, "latin"), (0x0061, 0x007A, "latin"), (0x00C0, 0x024F, "latin"), (0x0370, 0x03FF, "greek"),
    (0x0400, 0x052F, "cyrillic"), (0x0590, 0x05FF, "hebrew"), (0x0600, 0x06FF, "arabic"), (0x0750, 0x077F, "arabic"),
    (0x0900, 0x097F, "devanagari"), (0x0E00, 0x0E7F, "thai"), (0x1100, 0x11FF, "hangul"), (0x1E00, 0x1EFF, "latin"),
    (0x1F00, 0x1FFF, "greek"), (0x3040, 0x30FF, "kana"), (0x3400, 0x4DBF, "han"), (0x4E00, 0x9FFF, "han"),
    (0xAC00, 0xD7AF, "hangul"), (0xF900, 0xFAFF, "han"), (0x20000, 0x2FA1F, "han"),
)  # fmt: skip
_FIRSTS = [first for first, _, _ in _RANGES]
_NO_PROSE = re.compile(r"```[^`]*```|`[^`\n]*`|\$\$[^$]*\$\$|\$[^$\n]*\$|\\[a-zA-Z]+|</?think>|https?://\S+")
# Which scripts are at home in a text of each; prose in any of them may hold names and symbols in latin.
_TOGETHER = {"kana": {"kana", "han"}, "han": {"han"}, "hangul": {"hangul", "han"}}


def language_reward(texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool], script: str) -> list[Reward]:
    """1 for a completion of whose letters `keeps_to` the script, that of its prompt for "prompt", else 0; also as the
    part "language". Where the prompt has no letters any script will do."""
    wanted = main_script(task.prompt) if script == "prompt" else script
    values = [float(wanted is None or keeps_to(text, wanted)) for text in texts]
    return [Reward(value, {"language": value}) for value in values]


def main_script(text: str) -> str | None:
    """The script of most letters of the prose, None without letters of a script that is told apart."""
    counts = _scripts(text)
    return (
        "kana" if counts["kana"] and counts["kana"] * 5 > counts["han"] else (counts.most_common(1) or [(None,)])[0][0]
    )


def keeps_to(text: str, script: str) -> bool:
    """Whether at least 95 % of the letters of the prose are of `script`; formulas, code and links do not count.

    Outside latin texts, latin letters do not count either: names of variables are written in them. A text without
    letters keeps to any script.
    """
    counts = _scripts(text)
    if script != "latin":
        if counts["latin"] and not sum(counts[s] for s in _TOGETHER.get(script, {script})):
            return False
        del counts["latin"]
    return sum(counts[s] for s in _TOGETHER.get(script, {script})) >= _SHARE * counts.total()


def _scripts(text: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for char, number in Counter(_NO_PROSE.sub(" ", text)).items():
        at = bisect.bisect_right(_FIRSTS, ord(char)) - 1
        if at >= 0 and ord(char) <= _RANGES[at][1] and char.isalpha():
            counts[_RANGES[at][2]] += number
    return counts
