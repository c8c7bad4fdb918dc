"""Texts that a template may put anywhere, but that never become a special token.

The template is rendered a second time with some of the texts' characters replaced, one for one, by characters that
occur nowhere else. Whatever special token is still found in that rendering was written by the template, wholly; and
with the characters put back, the rendering must be the first one.
"""

import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

# Replaced by nothing, because JSON (or a template's trimming) does not write them as they are.
_KEPT = re.compile(r"[\s\"\\\x00-\x1f\x7f]")
# Members (of a message, a part of one, a JSON schema) whose values a template compares with names.
_NAMING = ("role", "type", "required")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Disguise:
    """Replaces characters of texts, and puts them back.

    Of each text these are the first and the last character and all that begin or end a special token, so that no
    special token can lie in a text, reach into one or be made around one. Texts that the template itself holds
    ("</think>") are left whole, since it may look for them, unless they could be a part of a special token.
    """

    def __init__(self, special_tokens: Iterable[str], template_texts: Collection[str], taken: str):
        """`taken` holds every character that is in use."""
        used = set(taken)
        self._free = (chr(point) for point in range(0xE000, 0xF900) if chr(point) not in used)
        self._stand_ins: dict[str, str] = {}
        self.specials, self._edges, self._held = _plan(tuple(special_tokens), frozenset(template_texts))

    def text(self, text: str) -> str:
        """`text` in disguise; its length stays."""
        whole = {
            at
            for held in self._held
            if held in text
            for match in re.finditer(f"(?={re.escape(held)})", text)
            for at in range(match.start(), match.start() + len(held))
        }
        solid = [at for at, char in enumerate(text) if not _KEPT.match(char)]
        chosen = {at for at in solid if text[at] in self._edges} | {*solid[:1], *solid[-1:]}
        return "".join(
            self._stand_in(char) if at in chosen and at not in whole else char for at, char in enumerate(text)
        )

    def data(self, value: Any) -> Any:
        """Plain data with every text in it in disguise, but for the names that a template looks up."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self._member(key, one) for key, one in value.items()}
        if isinstance(value, Sequence):
            return [self.data(one) for one in value]
        return value

    def _key(self, key: str) -> str:
        return key if _IDENTIFIER.fullmatch(key) and not any(name in key for name in self.specials) else self.text(key)

    def _member(self, key: str, value: Any) -> Any:
        if key not in _NAMING:
            return self.data(value)
        if isinstance(value, str):
            return self._key(value)
        return [self._key(one) for one in value] if _is_texts(value) else self.data(value)

    def unused(self) -> str:
        """A character that neither the texts nor the disguise use."""
        return next(self._free)

    def put_back(self, rendered: str) -> str:
        """`rendered` without disguise."""
        for char, stand_in in self._stand_ins.items():
            rendered = rendered.replace(stand_in, char)
            escaped = json.dumps(stand_in)[1:-1]  # a template may ask for JSON in ASCII
            rendered = rendered.replace(escaped, json.dumps(char)[1:-1])
        return rendered

    def _stand_in(self, char: str) -> str:
        if char not in self._stand_ins:
            self._stand_ins[char] = next(self._free)
        return self._stand_ins[char]


@functools.lru_cache(maxsize=4)  # a pure function, and a vocabulary may have a thousand special tokens
def _plan(names: tuple[str, ...], texts: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str], tuple[str, ...]]:
    """The special tokens to look for, the characters that begin or end one, the texts to leave whole."""
    ends = {name: _ends(name) for name in names}
    specials = tuple(name for name in names if ends[name])
    held = tuple(text for text in texts if text and not any(_meets(text, name) for name in specials))
    return specials, frozenset("".join(ends.values())), held


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _ends(name: str) -> str:
    """The first and last character of a special token that can be replaced, if there are any."""
    solid = _KEPT.sub("", name)
    return solid[:1] + solid[-1:]


def _meets(text: str, name: str) -> bool:
    """True if `text` could be part of an occurrence of `name`, or hold one."""
    if text in name or name in text:
        return True
    shorter = min(len(text), len(name))
    return any(text.endswith(name[:n]) or text.startswith(name[-n:]) for n in range(1, shorter))
