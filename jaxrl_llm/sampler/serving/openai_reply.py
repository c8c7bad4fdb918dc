"""What an OpenAI-style client is answered: the JSON of whole answers, of stream events and of errors."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.sampler.reply import Delta
from jaxrl_llm.sampler.serving.openai_request import Asked
from jaxrl_llm.text.incremental import IncrementalDecoder
from jaxrl_llm.text.stop_strings import StopStringFilter
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import Alternatives

_FINISHES = {"stop": "stop", "stop_string": "stop", "length": "length", "repetition": "repetition", "aborted": "abort"}


@dataclass
class Tokens:
    """Tokens to show log-probabilities of. `likeliest` are (id, log-probability) pairs; None stands for a prompt's
    first token, of which nothing is known."""

    ids: list[int]
    logprobs: list[float | None]
    likeliest: list[list[tuple[int, float]] | None]

    def __iadd__(self, other: "Tokens") -> "Tokens":
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.likeliest += other.likeliest
        return self


def _pairs(known: Alternatives | None, places: int) -> list[list[tuple[int, float]]]:
    if known is None:
        return [[] for _ in range(places)]
    rows = zip(known.ids_TN.tolist(), known.logprobs_TN.tolist(), strict=True)
    return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]


class Choice:
    """One completion on its way to a client: its text so far, its tokens, how it ended."""

    def __init__(self, asked: Asked, index: int, tokenizer: Tokenizer):
        self.index = index
        self.prompt = asked.prompts[index // asked.n]
        self.tokens: list[int] = []
        self.shown = Tokens([], [], [])
        self._scores_only = asked.scores_only
        self.finish: str | None = None
        self._decoder = IncrementalDecoder(tokenizer.decode)
        self._stops = StopStringFilter(asked.stops)
        self.text = ""
        self.spoken = 0  # characters of the tokens' own texts, where log-probabilities were sent

    def add(self, delta: Delta) -> tuple[str, Tokens]:
        """Take new tokens: the text to show for them, without the token or the stop string that ended it, and what to
        show log-probabilities of, a scored prompt included."""
        new = Tokens([], [], [])
        if delta.prompt is not None:
            scores, rest = delta.prompt, len(self.prompt) - 1
            new += Tokens(list(self.prompt), [None, *scores.logprobs_T.tolist()], [None])
            new.likeliest += _pairs(scores.alternatives, rest)
        if delta.finish is not None:
            self.finish = "length" if self._scores_only and delta.finish != "aborted" else _FINISHES[delta.finish]
        text = "" if self._scores_only else self._add_made(delta, new)
        self.shown += new
        return text, new

    def _add_made(self, delta: Delta, new: Tokens) -> str:
        ids, last = delta.tokens_T.tolist(), delta.finish is not None
        self.tokens += ids
        new += Tokens(ids, delta.logprobs_T.tolist(), [*_pairs(delta.alternatives, len(ids))])
        shown = ids[:-1] if delta.finish == "stop" else ids
        text = self._stops.add(self._decoder.add(shown, last=last), last=last)
        self.text += text
        return text


class Answer:
    """The JSON of one call, in the shape of its endpoint."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, *, chat: bool):
        self.asked, self._tokenizer, self._chat = asked, tokenizer, chat
        self._texts: dict[int, str] = {}  # of single tokens: alternatives name the same ones again and again
        self.choices = [Choice(asked, index, tokenizer) for index in range(len(asked.requests))]
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._head |= {"model": asked.model}
        self._kind, self._event_kind = kind, f"{kind}.chunk" if chat else kind

    def whole(self) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        choices = [self._whole_choice(choice) for choice in self.choices]
        return {**self._head, "object": self._kind, "choices": choices, "usage": self._usage()}

    def first_events(self) -> list[bytes]:
        """What a stream begins with: the assistant's role, or the echoed prompts."""
        if self._chat:
            body = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
            return [self._event(choice, body, finish=None) for choice in self.choices]
        if self.asked.scores:  # the prompts come with their scores
            return []
        echoes = [(choice, self._echo(choice)) for choice in self.choices]
        return [self._event(choice, {"text": echo, "logprobs": None}, finish=None) for choice, echo in echoes if echo]

    def event(self, index: int, delta: Delta) -> bytes | None:
        """The stream event of new tokens; None while there is nothing to show."""
        choice, before = self.choices[index], len(self.choices[index].tokens)
        text, new = choice.add(delta)
        if delta.prompt is not None:
            text = self._echo(choice) + text
        ids = choice.tokens[before:]
        if not (text or choice.finish or (self.asked.logprobs and new.ids) or (self.asked.token_ids and ids)):
            return None
        shown: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        shown["logprobs"] = self._logprobs(choice, new)
        return self._event(choice, shown | self._ids(ids), finish=choice.finish)

    def last_events(self) -> list[bytes]:
        """Usage, if asked for, and the end mark."""
        events = []
        if self.asked.include_usage:
            body = {**self._head, "object": self._event_kind, "choices": [], "usage": self._usage()}
            events.append(_line(body))
        return [*events, b"data: [DONE]\n\n"]

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        echo = self._echo(choice)
        if self._chat:
            body: dict[str, Any] = {"message": {"role": "assistant", "content": choice.text}}
        else:
            body = {"text": echo + choice.text}
        body["logprobs"] = self._logprobs(choice, choice.shown)
        prompt = {"prompt_token_ids": list(choice.prompt)} if self.asked.token_ids else {}
        return {"index": choice.index, **body, **self._ids(choice.tokens), **prompt, "finish_reason": choice.finish}

    def _event(self, choice: Choice, body: Mapping[str, Any], *, finish: str | None) -> bytes:
        shown = {"index": choice.index, **body, "finish_reason": finish}
        return _line({**self._head, "object": self._event_kind, "choices": [shown]})

    def _echo(self, choice: Choice) -> str:
        return self.asked.echoes[choice.index // self.asked.n]

    def _ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self.asked.token_ids else {}

    def _logprobs(self, choice: Choice, shown: Tokens) -> dict[str, Any] | None:
        """Of every token, the one that ended the completion included: their sum is the completion's."""
        if not self.asked.logprobs:
            return None
        texts = [self._text(id) for id in shown.ids]
        if self._chat:
            content = [
                self._entry(id, logprob) | {"top_logprobs": [self._entry(*pair) for pair in likeliest or ()]}
                for id, logprob, likeliest in zip(shown.ids, shown.logprobs, shown.likeliest, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append((0 if self.asked.scores else len(self._echo(choice))) + choice.spoken)
            choice.spoken += len(text)
        top = None
        if self.asked.alternatives:
            places = zip(texts, shown.logprobs, shown.likeliest, strict=True)
            top = [self._by_text(text, logprob, likeliest) for text, logprob, likeliest in places]
        return {"tokens": texts, "token_logprobs": shown.logprobs, "top_logprobs": top, "text_offset": offsets}

    def _text(self, id: int) -> str:
        if id not in self._texts:
            self._texts[id] = self._tokenizer.decode([id])
        return self._texts[id]

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._text(id), "logprob": logprob, "bytes": None}

    def _by_text(
        self, text: str, logprob: float | None, likeliest: list[tuple[int, float]] | None
    ) -> dict[str, float] | None:
        """Alternatives as completions show them, the token that stands there among them; the likeliest where several
        tokens have one text."""
        if likeliest is None or logprob is None:
            return None
        shown: dict[str, float] = {}
        for id, its_own in likeliest:
            shown.setdefault(self._text(id), its_own)
        shown.setdefault(text, logprob)
        return shown

    def _usage(self) -> dict[str, int]:
        prompt, made = sum(map(len, self.asked.prompts)), sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_event(message: str) -> bytes:
    """An error in the middle of a stream, whose status is out already."""
    return _line(error_body(message, "server_error"))


def _line(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, allow_nan=False).encode() + b"\n\n"
