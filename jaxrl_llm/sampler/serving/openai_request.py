"""What an OpenAI-style request may ask, field by field, and the SampleRequests it becomes.

A field that the sampler cannot honour is refused by name unless it has its default: an evaluation must not silently
measure something else than it asked for.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxrl_llm.text.chat import ChatTemplate, render_chat, render_prompt_ids
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import SampleRequest, Sampling, UserError

# Defaults of fields that exist elsewhere and mean nothing here; any other value of theirs is refused.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "suffix": (None, ""),
    "ignore_eos": (None, False),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "prompt_logprobs": (None,),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "parallel_tool_calls": (None, True),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
}

_GREATEST_SEED = 2**32 - 1
_BAN = -100.0
_TOKEN_ID = re.compile(r"[0-9]{1,9}")

Choices = Annotated[int, Field(ge=1, le=128)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class _Common(BaseModel):
    """Fields that both endpoints have."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    n: Choices | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = None
    user: str | None = None


class _Completion(_Common):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: bool | int | None = None
    echo: bool | None = None


class _ContentPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class _ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "user", "assistant"]
    content: str | list[_ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Chat(_Common):
    messages: Annotated[list[_ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None


class RefusedFieldError(UserError):
    """A request's field that cannot be served; `field` is its name."""

    def __init__(self, field: str, why: str):
        super().__init__(f"{field}: {why}")
        self.field = field


@dataclass(frozen=True)
class Asked:
    """A checked request: `n` completions of each prompt, prompt by prompt, as `requests`.

    With `scores_only` the one token that each of them makes is not shown: the prompt's scores are all that was wanted.
    """

    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    requests: tuple[SampleRequest, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    echoes: tuple[str, ...]  # text to put before each prompt's completions
    token_ids: bool
    scores_only: bool

    @property
    def alternatives(self) -> int:
        return self.requests[0].alternatives

    @property
    def scores(self) -> bool:
        return self.requests[0].score_prompt

    @property
    def stops(self) -> tuple[str, ...]:
        return self.requests[0].sampling.stop_strings


@dataclass(frozen=True)
class Limits:
    """What a request may ask at most; `max_new_tokens` is also a chat's default."""

    max_new_tokens: int
    max_choices: int
    top_logprobs: int


def read_completion(body: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> Asked:
    """A body of /v1/completions. Raises RefusedFieldError or UserError."""
    asked = _validate(_Completion, body)
    logprobs = None if asked.logprobs is False else 0 if asked.logprobs is True else asked.logprobs
    _check_alternatives("logprobs", logprobs, limits)
    if asked.echo and logprobs is not None and not limits.top_logprobs:
        raise RefusedFieldError(
            "echo", "this server scores no prompts (--top-logprobs 0); ask for one of echo and logprobs"
        )
    longest = asked.max_tokens if asked.max_tokens is not None else min(16, limits.max_new_tokens)
    if longest == 0 and not asked.echo:
        raise RefusedFieldError("max_tokens", "is 0, which only makes sense with echo")
    texts, prompts = _prompts(asked.prompt, tokenizer, limits)
    return _asked(asked, prompts, longest, logprobs, texts if asked.echo else None, limits)


def read_chat(body: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate, limits: Limits) -> Asked:
    """A body of /v1/chat/completions. Raises RefusedFieldError or UserError."""
    asked = _validate(_Chat, body)
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise RefusedFieldError("max_completion_tokens", "differs from max_tokens; give one of them")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RefusedFieldError("top_logprobs", "means nothing without logprobs: true")
    _check_alternatives("top_logprobs", asked.top_logprobs, limits)
    if template == "none":
        if asked.tools:
            raise RefusedFieldError(
                "tools", "this policy has no chat template (tokenizer.chat_template is none) to show them in"
            )
        if [message.role for message in asked.messages] != ["user"]:
            raise RefusedFieldError(
                "messages", "this policy has no chat template (tokenizer.chat_template is none); send one user message"
            )
        prompt = render_prompt_ids(tokenizer, asked.messages[0].text, "none")
    else:
        messages = [{"role": message.role, "content": message.text} for message in asked.messages]
        prompt = render_chat(tokenizer, messages, template=template, tools=asked.tools or None)
        if asked.tools and prompt == render_chat(tokenizer, messages, template=template):
            raise RefusedFieldError("tools", "the chat template of this policy shows the policy no tools")
    if asked.tool_choice not in (("auto", None) if asked.tools else ("none", None)):
        raise RefusedFieldError("tool_choice", "what the policy writes is not constrained; leave it out")
    longest = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
    longest = limits.max_new_tokens if longest is None else longest
    return _asked(asked, [prompt], longest, (asked.top_logprobs or 0) if asked.logprobs else None, None, limits)


def _check_alternatives(field: str, wanted: int | None, limits: Limits) -> None:
    if wanted is not None and not 0 <= wanted <= limits.top_logprobs:
        raise RefusedFieldError(
            field, f"is {wanted}; this server keeps 0 to {limits.top_logprobs} alternatives (--top-logprobs)"
        )


def _validate(kind: type[Any], body: Mapping[str, Any]) -> Any:
    given = dict(body)
    for name in set(given) & _DEFAULTS.keys() - kind.model_fields.keys():
        if given[name] not in _DEFAULTS[name]:
            raise RefusedFieldError(name, f"{given[name]!r} is not supported by this server; leave it out")
        del given[name]
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else "body"
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            raise RefusedFieldError(field, "is not a field that this server knows; leave it out") from None
        where = ".".join(str(part) for part in first["loc"][1:] if not isinstance(part, str) or part.islower())
        raise RefusedFieldError(field, f"{first['msg']}{f' (at {where})' if where else ''}") from None


def _prompts(prompt: Any, tokenizer: Tokenizer, limits: Limits) -> tuple[list[str], list[list[int]]]:
    """(texts, ids) of a prompt in any of its four forms."""
    if isinstance(prompt, str):
        many: Sequence[Any] = [prompt]
    else:
        many = [prompt] if prompt and isinstance(prompt[0], int) else prompt
    if not many:
        raise RefusedFieldError("prompt", "holds no prompt")
    if len(many) > limits.max_choices:
        raise RefusedFieldError("prompt", f"holds {len(many)} prompts, more than the {limits.max_choices} of one call")
    texts, ids = [], []
    for one in many:
        if isinstance(one, str):
            texts.append(one)
            ids.append(render_prompt_ids(tokenizer, one, "none"))
        else:
            if bad := [i for i in one if not 0 <= i < tokenizer.vocab_size]:
                raise RefusedFieldError("prompt", f"holds the id {bad[0]}; ids are 0 to {tokenizer.vocab_size - 1}")
            texts.append(tokenizer.decode(one))
            ids.append(list(one))
    return texts, ids


def _asked(
    asked: _Common,
    prompts: list[list[int]],
    longest: int,
    logprobs: int | None,
    echoes: list[str] | None,
    limits: Limits,
) -> Asked:
    """`logprobs` is how many alternatives are wanted beside the tokens' own, `echoes` the prompts to show."""
    n = asked.n or 1
    if asked.best_of not in (None, n):
        raise RefusedFieldError("best_of", "choosing among completions is not supported; leave it out")
    if n * len(prompts) > limits.max_choices:
        raise RefusedFieldError(
            "n", f"{n} completions of {len(prompts)} prompts are more than the {limits.max_choices} of one call"
        )
    if asked.seed is not None and not 0 <= asked.seed <= _GREATEST_SEED:
        raise RefusedFieldError("seed", f"is {asked.seed}; it must be in 0 ... {_GREATEST_SEED}")
    if asked.stream_options is not None and not asked.stream:
        raise RefusedFieldError("stream_options", "means nothing without stream: true")
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    banned, biases = _biases(asked.logit_bias or {})
    sampling = Sampling(
        max_new_tokens=longest or 1,
        temperature=_default(asked.temperature, 1.0),
        top_k=max(_default(asked.top_k, 0), 0) if asked.top_k != -1 else 0,
        top_p=_default(asked.top_p, 1.0),
        min_p=_default(asked.min_p, 0.0),
        min_new_tokens=_default(asked.min_tokens, 0),
        stop_ids=tuple(asked.stop_token_ids or ()),
        stop_strings=tuple(stops),
        banned_ids=banned,
        logit_bias=biases,
    )
    seed = secrets.randbelow(_GREATEST_SEED + 1) if asked.seed is None else asked.seed
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    scored = echoes is not None and logprobs is not None
    return Asked(
        model=asked.model,
        prompts=tuple(map(tuple, prompts)),
        n=n,
        requests=tuple(
            SampleRequest(tokens, sampling, seed, stream, sibling, logprobs or 0, scored)
            for stream, tokens in enumerate(arrays)
            for sibling in range(n)
        ),
        stream=bool(asked.stream),
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
        logprobs=logprobs is not None,
        echoes=tuple(echoes or [""] * len(prompts)),
        token_ids=bool(asked.return_token_ids),
        scores_only=longest == 0,
    )


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, ...], tuple[tuple[int, float], ...]]:
    """(banned ids, (id, bias) of the others): a bias of -100 is a ban."""
    for token in given:
        if not _TOKEN_ID.fullmatch(token):
            raise RefusedFieldError("logit_bias", f"{token[:20]!r} is no token id")
    banned = tuple(int(token) for token, bias in given.items() if bias == _BAN)
    return banned, tuple((int(token), bias) for token, bias in given.items() if bias not in (_BAN, 0))
