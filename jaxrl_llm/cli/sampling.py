"""`jaxrl sample`: completions of a prompt, of a file of prompts, or of what somebody types."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from jaxrl_llm.cli.assemble import SamplerSetup
from jaxrl_llm.cli.policy import Policy
from jaxrl_llm.sampler.reply import Delta, join
from jaxrl_llm.sampler.service import SamplerService
from jaxrl_llm.text.chat import render_prompt_ids
from jaxrl_llm.text.incremental import IncrementalDecoder
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import Completion, SampleRequest, Sampling, ThinkingBudget, UserError

Write = Callable[[str], Any]


@dataclass(frozen=True)
class SampleOptions:
    """How to sample (None: as the configuration does) and what to print of it."""

    max_new_tokens: int | None
    temperature: float | None
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    seed: int
    n: int
    logprobs: bool
    as_json: bool

    def sampling(self, setup: SamplerSetup) -> Sampling:
        rollout = setup.config.rollout
        how = rollout.interruption
        return Sampling(
            max_new_tokens=rollout.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens,
            temperature=rollout.temperature if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_strings=self.stop,
            thinking=ThinkingBudget(how.lowest, how.highest, how.answer_tokens) if how.enabled else None,
        )


@dataclass(frozen=True)
class Prompt:
    """A prompt's text (None if it was given as ids) and the ids the policy gets."""

    text: str | None
    ids: tuple[int, ...]


def read_prompts(path: Path, setup: SamplerSetup) -> list[Prompt]:
    """Prompts of a file: one a line, or in a .jsonl file an object a line with "prompt" (text) or "tokens" (ids).

    Raises UserError naming the first line that is no prompt.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt file {path} cannot be read ({error})") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(_json_prompt(line, setup) if path.suffix == ".jsonl" else text_prompt(line, setup))
        except UserError as error:
            raise UserError(f"{path} line {number}: {error}") from None
    if not prompts:
        raise UserError(f"prompt file {path} holds no prompt")
    return prompts


def text_prompt(text: str, setup: SamplerSetup) -> Prompt:
    """A text as the policy gets it in training: in its chat template, if it has one."""
    return Prompt(text, tuple(render_prompt_ids(setup.tokenizer, text, setup.config.tokenizer.chat_template)))


def _json_prompt(line: str, setup: SamplerSetup) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError:
        raise UserError("is not JSON") from None
    match record:
        case {"prompt": str(text)}:
            return text_prompt(text, setup)
        case {"tokens": list(ids)} if ids and all(type(i) is int for i in ids):
            return Prompt(None, tuple(ids))
    raise UserError('is neither {"prompt": "text"} nor {"tokens": [ids]}')


def sample_prompts(policy: Policy, prompts: Sequence[Prompt], options: SampleOptions, write: Write) -> None:
    """Print every completion, prompt by prompt. Raises UserError before the first if one cannot be served."""
    requests = [
        request for stream, prompt in enumerate(prompts) for request in _requests(policy, prompt, options, stream)
    ]
    printer = Printer(policy.setup.tokenizer, options, write, headers=len(requests) > 1)
    with SamplerService(policy.scheduler()) as service:
        if len(requests) == 1 and not options.as_json:
            _print_live(service, prompts[0], requests, printer)
            return
        for index, completion in enumerate(service.sample(requests)):
            printer.whole(prompts[index // options.n], index, completion)


def converse(policy: Policy, options: SampleOptions, lines: Iterator[str], write: Write) -> None:
    """Answer line after line; a prompt that cannot be served is said to be so, and the next one is read."""
    printer = Printer(policy.setup.tokenizer, options, write, headers=options.n > 1)
    with SamplerService(policy.scheduler()) as service:
        for stream, line in enumerate(lines):
            try:
                prompt = text_prompt(line, policy.setup)
                _print_live(service, prompt, _requests(policy, prompt, options, stream), printer)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)


def typed_lines(source: TextIO) -> Iterator[str]:
    """The lines of a stream that are not blank, each asked for by a mark if somebody types them."""
    while True:
        if source.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = source.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _requests(policy: Policy, prompt: Prompt, options: SampleOptions, stream: int) -> list[SampleRequest]:
    sampling, tokens = options.sampling(policy.setup), np.array(prompt.ids, np.int32)
    return [SampleRequest(tokens, sampling, options.seed, stream, sibling) for sibling in range(options.n)]


def _print_live(service: SamplerService, prompt: Prompt, requests: list[SampleRequest], printer: "Printer") -> None:
    """A single completion as its tokens come; several when they are whole."""
    parts: list[list[Delta]] = [[] for _ in requests]
    with service.submit(requests) as reply:
        for index, delta in reply:
            parts[index].append(delta)
            if len(requests) == 1:
                printer.piece(delta)
    for index, deltas in enumerate(parts):
        printer.whole(prompt, index, join(deltas), shown=len(requests) == 1)


class Printer:
    """Completions as text, or as one JSON object a line."""

    def __init__(self, tokenizer: Tokenizer, options: SampleOptions, write: Write, *, headers: bool):
        self._tokenizer, self._options, self._write, self._headers = tokenizer, options, write, headers
        self._decoder = IncrementalDecoder(tokenizer.decode)

    def piece(self, delta: Delta) -> None:
        """New text of the one completion under way."""
        if self._options.as_json:
            return
        ids, last = delta.tokens_T.tolist(), delta.finish is not None
        self._write(self._decoder.add(ids[:-1] if delta.finish == "stop" else ids, last=last))
        if last:
            self._decoder = IncrementalDecoder(self._tokenizer.decode)

    def whole(self, prompt: Prompt, index: int, completion: Completion, *, shown: bool = False) -> None:
        """A finished completion; with `shown` its text is out already."""
        ids = completion.tokens_T.tolist()
        text = self._tokenizer.decode(ids[:-1] if completion.finish == "stop" else ids)
        if self._options.as_json:
            self._write(json.dumps(_record(prompt, index % self._options.n, text, completion)) + "\n")
            return
        if self._headers:
            which = f"completion {index % self._options.n + 1} of {self._options.n}"
            total = f"{completion.finish}, {len(ids)} tokens, log-probability {completion.logprobs_T.sum():.4f}"
            self._write(f"--- {prompt.text if prompt.text is not None else list(prompt.ids)!r}: {which} ({total})\n")
        self._write("\n" if shown else text + "\n")
        if self._options.logprobs:
            for id, logprob, forced in zip(ids, completion.logprobs_T, completion.forced_T, strict=True):
                mark = "  forced" if forced else ""
                self._write(f"{logprob:10.4f}  {id:6d}  {self._tokenizer.decode([id])!r}{mark}\n")


def _record(prompt: Prompt, index: int, text: str, completion: Completion) -> dict[str, Any]:
    return {
        "prompt": prompt.text,
        "prompt_tokens": list(prompt.ids),
        "index": index,
        "text": text,
        "finish": completion.finish,
        "tokens": completion.tokens_T.tolist(),
        "logprobs": completion.logprobs_T.tolist(),
        "versions": completion.versions_T.tolist(),
        "forced": completion.forced_T.tolist(),
    }
