"""A chat template at work: the conversation's text, and which special tokens in it are the template's own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from jaxrl_llm.text.template_environment import compile_template, template_texts
from jaxrl_llm.text.untrusted import Disguise
from jaxrl_llm.types import UserError

# What a template's own expressions can raise: Jinja lets Python's errors through.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Rendering:
    """The rendered conversation, whole and as (text, special): its special tokens and the texts between them."""

    text: str
    pieces: list[tuple[str, bool]]


def render(
    source: str, special_tokens: Iterable[str], said: Mapping[str, Any], own: Mapping[str, Any], *, unfinished: bool
) -> Rendering:
    """Renders the template `source` with `said`, plain data that others wrote ("messages" among it), and `own`.

    `unfinished` ends the text where the last message's content ends. Raises UserError if the template fails, or if
    what it makes of a text depends on the characters of special tokens in it.
    """
    try:
        template, texts = compile_template(source), template_texts(source)
        disguise = Disguise(special_tokens, texts, taken=source + "".join(_texts(said)))
        end = disguise.unused() + " " if unfinished else ""  # the space shows whether the template trims
        text = _render_once(template, said, own, end)
    except UserError:
        raise
    except _TEMPLATE_ERRORS as error:
        raise UserError(f"the model's chat template cannot be rendered: {error}") from error
    try:
        hidden = _render_once(template, disguise.data(said), own, end)
    except _TEMPLATE_ERRORS:
        hidden = None
    if hidden is None or disguise.put_back(hidden) != text:
        raise UserError(
            "the model's chat template rewrites a message, or treats it by the special tokens that it looks for in it, "
            "which is not supported; take such tokens out of the message, or set the template to none"
        )
    pieces = split_at(hidden, disguise.specials)
    return Rendering(text, [(disguise.put_back(piece), special) for piece, special in pieces])


def split_at(text: str, names: Iterable[str]) -> list[tuple[str, bool]]:
    """`text` cut at each of `names` in it, as (piece, whether it is a name); where several begin at one place, the
    longest counts."""
    longest_first = sorted(names, key=len, reverse=True)
    starts = {name[0] for name in longest_first}
    pieces: list[tuple[str, bool]] = []
    start = at = 0
    while at < len(text):
        name = None
        if text[at] in starts:
            name = next((name for name in longest_first if text.startswith(name, at)), None)
        if name is None:
            at += 1
            continue
        pieces += [(text[start:at], False), (name, True)]
        start = at = at + len(name)
    return [*pieces, (text[start:], False)]


def _render_once(template: jinja2.Template, said: Mapping[str, Any], own: Mapping[str, Any], end: str) -> str:
    if not end:
        return template.render(**said, **own)
    *before, last = said["messages"]
    rendered = template.render(**{**said, "messages": [*before, _ended(last, end)]}, **own)
    at = rendered.rfind(end.strip())
    if at < 0:
        raise UserError("continue_final_message: the chat template leaves out the last message's end")
    return rendered[:at] if rendered.startswith(end, at) else rendered[:at].rstrip()


def _ended(message: Mapping[str, Any], end: str) -> dict[str, Any]:
    """The message with `end` after the text of its content, or of the content's last part that has one."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + end}
    parts: list[Any] = list(content) if isinstance(content, Sequence) else []
    for i in reversed(range(len(parts))):
        if isinstance(parts[i], Mapping) and isinstance(parts[i].get("text"), str):
            parts[i] = {**parts[i], "text": parts[i]["text"] + end}
            return {**message, "content": parts}
    raise UserError("continue_final_message: the last message has no text to continue")


def _texts(value: Any) -> Iterable[str]:
    """Every text in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts(one)
