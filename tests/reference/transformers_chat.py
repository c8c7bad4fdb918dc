"""A conversation rendered by transformers itself, at a fixed time."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from conversations import NOW
from transformers.utils import chat_template_utils


class _Stopped(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return NOW


def render_with_transformers(
    template: str,
    specials: Sequence[str],
    *,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    **options: Any,
) -> str | None:
    """The text, or None if the template refuses the conversation. `specials` begins with the begin and end tokens."""
    chat_template_utils.datetime = _Stopped
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            # What apply_chat_template does first.
            [chat_template_utils._normalize_chat_messages(messages)],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            bos_token=specials[0],
            eos_token=specials[1],
            **(variables or {}),
            **options,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return None
    return rendered[0]
