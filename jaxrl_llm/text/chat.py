"""From a user's text, or a conversation, to the prompt's token ids, with or without the model's chat template."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.text.rendering import render, split_at
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

# The only text of a message that templates make tokens of, so it is not free.
_ROLES = ("system", "developer", "user", "assistant", "tool")
# One field, under the names that it has in different templates.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render_prompt_ids(
    tokenizer: Tokenizer, user_text: str, template: ChatTemplate, system: str | None = None
) -> list[int]:
    """Token ids of a prompt, with a system message before it if `system` is given (not with "none").

    "none": the text as it is, after the begin-of-sequence token if the tokenizer asks for one. "model": one user turn
    and the assistant's header, exactly as the model's own template writes them (a default system message and a
    begin-of-sequence token included, if it has them). "chatml": the same in plain ChatML, without a system message.

    Special tokens in the template become their ids; the user's text is never searched for them. Text is encoded
    across the border between template and user text, as in training. Raises UserError if the tokenizer has no
    template or lacks ChatML's special tokens, or for a character that it cannot encode.
    """
    if template == "none":
        if system is not None:
            raise UserError("a prompt without a chat template has no place for a system message; choose a template")
        bos = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
        return bos + tokenizer.encode(user_text)
    turns = [{"role": "user", "content": user_text}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return render_chat(tokenizer, turns, template=template)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: Literal["model", "chatml"] = "model",
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
) -> list[int]:
    """Token ids of a conversation, as `transformers` renders and encodes it.

    A message has a role (system, developer, user, assistant, tool), a content (a text or parts of one) and what else
    the template knows: tool_calls, reasoning_content, name, ... Tools are JSON schemas, documents have a title and a
    text. `add_generation_prompt` adds the assistant's header; `continue_final_message` (not both) leaves the last
    message's turn open. `variables` are the template's own switches ({"enable_thinking": False}), `now` is its clock,
    by default the machine's.

    Special tokens that the template writes become their ids. Nothing else does: neither in messages of any role, nor
    in tools, tool calls, documents or variables is a special token looked for. A begin-of-sequence token comes from
    the template alone, so it is never doubled.

    Raises UserError if the tokenizer has no template, if the template refuses the conversation, leaves out or rewrites
    a system's or user's message, treats a text by what special-token characters it holds, or for a character that the
    tokenizer cannot encode.
    """
    if add_generation_prompt and continue_final_message:
        raise UserError("add_generation_prompt and continue_final_message exclude each other; set one of them to false")
    source = _source(tokenizer, template)
    conversation = [_check_message(message) for message in messages]
    if not conversation:
        raise UserError("a conversation needs at least one message")
    names = {i: name for name, i in tokenizer.special_tokens.items()}
    own = {
        "bos_token": names.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else "",
        "eos_token": names.get(tokenizer.eos_id, ""),
        "add_generation_prompt": add_generation_prompt,
        "strftime_now": lambda form: (now or datetime.datetime.now()).strftime(form),
    }
    said = {"messages": conversation, "tools": tools, "documents": documents}
    given = _plain(dict(variables or {}))
    if taken := sorted(own.keys() & given.keys() | said.keys() & given.keys()):
        raise UserError(f"variables may not hold {taken[0]!r}, which render_chat gives to the template itself")

    rendering = render(source, tokenizer.special_tokens, _plain(said) | given, own, unfinished=continue_final_message)
    for message in conversation:
        text = message.get("content")
        if message["role"] in ("system", "user") and isinstance(text, str) and text.strip() not in rendering.text:
            raise UserError(
                f"the model's chat template leaves out or rewrites a message: {text[:80]!r}; set it to none"
            )
    return _encode_pieces(tokenizer, rendering.pieces)


def encode_trusted(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of text that the system itself wrote: special tokens in it become their ids. Raises UserError for a
    character that the tokenizer cannot encode."""
    return _encode_pieces(tokenizer, split_at(text, tokenizer.special_tokens))


def _encode_pieces(tokenizer: Tokenizer, pieces: Sequence[tuple[str, bool]]) -> list[int]:
    return tokenizer.encode_parts([tokenizer.token_id(text) if special else text for text, special in pieces])


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


def _check_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: nothing that is None, its reasoning under each of the usual names."""
    if message.get("role") not in _ROLES:
        raise UserError(f"a message has the role {message.get('role')!r}; known: {', '.join(_ROLES)}")
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy made of plain JSON types, so that a template can reach nothing else. Raises UserError for others."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    raise UserError(f"a conversation holds a {type(value).__name__}; only what JSON can write may stand in it")
