"""What the sampler refuses, each with the value and the way out."""

import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.slots import BIASED_IDS, STOP_IDS
from jaxrl_llm.text.tokenizer import check_utf8
from jaxrl_llm.types import SampleRequest, Sampling, UserError

_UINT32 = 2**32
_FIRST = 2**30  # what an episode's token numbers start below; limits are added to it in int32
_GREATEST_BIAS = 100
# Every new token's text is searched for each of them, by the thread that decodes.
_STOP_STRINGS, _STOP_BYTES = 16, 256


def check_prompt(engine: PolicyEngine, prompt: np.ndarray) -> np.ndarray:
    """The prompt as int32 [T]. Raises UserError if the engine cannot take it."""
    tokens, vocab = np.asarray(prompt), engine.model.vocab_size
    if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or not tokens.size):
        raise UserError(f"a prompt must be a flat array of integer ids, not {tokens.dtype} {tokens.shape}")
    if not 1 <= len(tokens) <= engine.max_prompt_tokens:
        raise UserError(
            f"a prompt has {len(tokens)} tokens; the sampler takes 1 to {engine.max_prompt_tokens} "
            f"(rollout.max_prompt_tokens)"
        )
    if tokens.min() < 0 or tokens.max() >= vocab:
        bad = tokens[(tokens < 0) | (tokens >= vocab)][0]
        raise UserError(f"a prompt holds the id {bad}, outside the vocabulary of {vocab} tokens")
    return tokens.astype(np.int32)


def check_request(engine: PolicyEngine, request: SampleRequest) -> None:
    """Raises UserError on a number that is no part of a random key, and on questions the engine has no answer to."""
    for name in ("seed", "stream", "sibling"):
        if not 0 <= getattr(request, name) < _UINT32:
            raise UserError(f"{name} is {getattr(request, name)}; it must be in 0 ... 2**32 - 1")
    if not 0 <= request.first < _FIRST:
        raise UserError(f"first is {request.first}; a completion's tokens have the numbers 0 ... 2**30 - 1")
    needed = len(request.tokens_T) + request.sampling.max_new_tokens
    if needed > engine.context:
        raise UserError(
            f"a prompt of {len(request.tokens_T)} tokens and max_new_tokens = {request.sampling.max_new_tokens} need "
            f"{needed} places; the sampler's slots have {engine.context} (rollout.max_prompt_tokens + "
            "rollout.max_new_tokens)"
        )
    kept = engine.top_logprobs
    if not 0 <= request.alternatives <= kept:
        raise UserError(f"{request.alternatives} alternatives are asked for; this sampler keeps 0 to {kept}")
    if request.score_prompt and not kept:
        raise UserError("score_prompt is set, but this sampler keeps no alternatives, and then scores no prompts")


def check_sampling(engine: PolicyEngine, how: Sampling, *, has_text: bool) -> None:
    """Raises UserError on a value that means nothing, or that does not fit a slot. `has_text`: ids can be decoded."""
    vocab, room = engine.model.vocab_size, engine.max_new_tokens
    if not 1 <= how.max_new_tokens <= room:
        raise UserError(
            f"max_new_tokens is {how.max_new_tokens}; the sampler's slots hold 1 to {room} (rollout.max_new_tokens)"
        )
    # Below this, logits divided by the temperature may overflow float32.
    if how.temperature != 0 and not 1e-6 <= how.temperature < math.inf:
        raise UserError(f"temperature is {how.temperature}; use 0 (greedy) or a finite number from 1e-6 on")
    if not 0 <= how.top_k < 2**31:
        raise UserError(f"top_k is {how.top_k}; use a number of tokens, or 0 for all of them")
    if not 0 < how.top_p <= 1:
        raise UserError(f"top_p is {how.top_p}; use a share of the probability above 0 and up to 1 (off)")
    if not 0 <= how.min_p <= 1:
        raise UserError(f"min_p is {how.min_p}; use a share of the likeliest token's probability, 0 (off) to 1")
    if not 0 <= how.min_new_tokens <= how.max_new_tokens:
        raise UserError(f"min_new_tokens is {how.min_new_tokens}; use 0 to max_new_tokens = {how.max_new_tokens}")
    if not 0 <= how.repetition_limit < 2**31:
        raise UserError(f"repetition_limit is {how.repetition_limit}; use a number of tokens, or 0 for never")
    _check_ids("stop_ids", how.stop_ids, STOP_IDS - 1, vocab)
    biased_ids = tuple(token for token, _ in how.logit_bias)
    name = "banned_ids" if not biased_ids else "banned_ids with logit_bias"
    _check_ids(name, how.banned_ids + biased_ids, BIASED_IDS, vocab)
    for token, bias in how.logit_bias:
        if not -_GREATEST_BIAS <= bias <= _GREATEST_BIAS:
            raise UserError(f"logit_bias of id {token} is {bias}; use -{_GREATEST_BIAS} to {_GREATEST_BIAS}")
    if len({*how.banned_ids, *how.stop_ids, engine.eos_id}) >= vocab:
        raise UserError(f"banned_ids and stop_ids leave no token of the vocabulary of {vocab}; ban fewer")
    if how.stop_strings and not has_text:
        raise UserError("stop_strings are given, but this sampler has no tokenizer to find them with; use stop_ids")
    _check_stop_strings(how.stop_strings)
    _check_thinking(engine, how)


def _check_stop_strings(stops: Sequence[str]) -> None:
    if "" in stops:
        raise UserError("stop_strings holds the empty string, which every text contains; leave it out")
    if len(stops) > _STOP_STRINGS:
        raise UserError(f"stop_strings holds {len(stops)} strings; a request may have {_STOP_STRINGS}")
    for stop in stops:
        check_utf8(stop)
        if len(stop.encode()) > _STOP_BYTES:
            raise UserError(f"stop_strings holds one of {len(stop.encode())} bytes; {_STOP_BYTES} are the most")


def _check_ids(name: str, ids: Sequence[int], most: int, vocab: int) -> None:
    if len(ids) > most:
        raise UserError(f"{name} holds {len(ids)} ids; a slot has room for {most}")
    for token in ids:
        if not 0 <= token < vocab:
            raise UserError(f"{name} holds the id {token}, outside the vocabulary of {vocab} tokens")


def _check_thinking(engine: PolicyEngine, how: Sampling) -> None:
    budget = how.thinking
    if budget is None:
        return
    if engine.interruption is None:
        raise UserError("a thinking budget is given, but this sampler has no interruption phrase")
    if not 1 <= budget.lowest <= budget.highest:
        raise UserError(f"thinking budget {budget.lowest} ... {budget.highest} is no range; use 1 <= lowest <= highest")
    if budget.answer_tokens < 1:
        raise UserError(f"the answer budget is {budget.answer_tokens} tokens; use at least 1")
    phrase = len(engine.interruption.phrase)
    if (needed := budget.highest + phrase + budget.answer_tokens) > how.max_new_tokens:
        raise UserError(
            f"thinking up to {budget.highest} + phrase {phrase} + answer {budget.answer_tokens} = {needed} tokens "
            f"exceed max_new_tokens = {how.max_new_tokens}"
        )
