"""From a user's text, or a conversation, to the prompt's token ids, with or without the model's chat template."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import UserError

ChatTemplate = Literal["none", "model", "chatml"]

# ChatML without a system message, for models that were trained on ChatML: the shortest prompt they understand.
_PLAIN_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render_prompt_ids(tokenizer: Tokenizer, user_text: str, template: ChatTemplate) -> list[int]:
    """Token ids of a prompt.

    "none": the text as it is, after the begin-of-sequence token if the tokenizer asks for one. "model": one user turn
    and the assistant's header, exactly as the model's own template writes them (a default system message and a
    begin-of-sequence token included, if it has them). "chatml": the same in plain ChatML, without a system message.

    Special tokens in the template become their ids; the user's text is never searched for them. Text is encoded
    across the border between template and user text, as in training. Raises UserError if the tokenizer has no
    template or lacks ChatML's special tokens, or for a character that it cannot encode.
    """
    if template == "none":
        bos = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
        return bos + tokenizer.encode(user_text)
    return render_messages_ids(tokenizer, [Message("user", user_text)], template)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    text: str


def render_messages_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], template: Literal["model", "chatml"]
) -> list[int]:
    """Token ids of a conversation and the assistant's header, as `render_prompt_ids` makes them of one user turn.

    No message's text is searched for special tokens, an assistant's earlier turns included.
    """
    ids: list[int] = []
    pending = ""  # ordinary text not yet encoded, so that a message's text joins the template's on both sides
    for part, trusted in _render_parts(tokenizer, messages, _source(tokenizer, template)):
        for piece, special_id in _split_specials(tokenizer, part) if trusted else [(part, None)]:
            if special_id is None:
                pending += piece
            else:
                ids += [*tokenizer.encode(pending), special_id]
                pending = ""
    return ids + tokenizer.encode(pending)


def encode_trusted(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of text that the system itself wrote: special tokens in it become their ids. Raises UserError for a
    character that the tokenizer cannot encode."""
    ids: list[int] = []
    for piece, special_id in _split_specials(tokenizer, text):
        ids += tokenizer.encode(piece) if special_id is None else [special_id]
    return ids


def _source(tokenizer: Tokenizer, template: ChatTemplate) -> str:
    """The Jinja text of a template."""
    if template == "chatml":
        for special in ("<|im_start|>", "<|im_end|>"):
            tokenizer.token_id(special)  # refuses a tokenizer that would spell it out
        return _PLAIN_CHATML
    if template != "model":
        raise UserError(f"tokenizer.chat_template {template!r} is not known; give one of: none, model, chatml")
    if tokenizer.chat_template is None:
        raise UserError(
            "tokenizer.chat_template is model, but the tokenizer brings no template; set it to none, or take the "
            "tokenizer from a model that has one"
        )
    return tokenizer.chat_template


def _render_parts(tokenizer: Tokenizer, messages: Sequence[Message], source: str) -> list[tuple[str, bool]]:
    """The rendered chat as (text, trusted): the template's own text, and the messages' as the template writes them."""
    names: dict[int | None, str] = {i: name for name, i in tokenizer.special_tokens.items()}
    variables = {
        "add_generation_prompt": True,
        "bos_token": names.get(tokenizer.bos_id, ""),
        "eos_token": names.get(tokenizer.eos_id, ""),
    }
    mark = "\ue000"  # rendered in place of each text, it shows where the template puts it
    try:
        template = _compile(source)
        rendered = template.render(messages=[{"role": m.role, "content": m.text} for m in messages], **variables)
        marked = template.render(messages=[{"role": m.role, "content": mark} for m in messages], **variables)
    except jinja2.TemplateError as error:
        raise UserError(f"the model's chat template cannot be rendered: {error}") from error
    first, *following = marked.split(mark)
    parts, at = [(first, True)], len(first)
    if len(following) == len(messages) and rendered.startswith(first):
        for message, after in zip(messages, following, strict=True):
            # Some templates trim messages.
            text = next((t for t in (message.text, message.text.strip()) if rendered.startswith(t + after, at)), None)
            if text is None:
                break
            parts += [(text, False), (after, True)]
            at += len(text + after)
        else:
            if at == len(rendered):
                return parts
    raise UserError("the model's chat template rewrites a message, which is not supported; set it to none")


def _split_specials(tokenizer: Tokenizer, text: str) -> list[tuple[str, int | None]]:
    """`text` cut at its special tokens, the longest name first where several begin at one place."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    pieces: list[tuple[str, int | None]] = []
    start = at = 0
    while at < len(text):
        name = next((name for name in names if text.startswith(name, at)), None)
        if name is None:
            at += 1
            continue
        pieces += [(text[start:at], None), (name, tokenizer.token_id(name))]
        start = at = at + len(name)
    return [*pieces, (text[start:], None)]


@functools.lru_cache(maxsize=4)  # a pure function, and compiling costs more than rendering
def _compile(source: str) -> jinja2.Template:
    """The template, in a sandbox (it comes out of a downloaded file) and with the settings model authors write for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    return environment.from_string(source, globals={"raise_exception": _raise_exception})


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))
