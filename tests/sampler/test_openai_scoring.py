"""Log-likelihoods over HTTP, in the shape that evaluation harnesses ask for them, against the scheduler's own."""

import dataclasses

import numpy as np
import pytest
from sampler_reference import CONFIG, request, run
from serving_reference import TOKENIZER, call, events, up

from jaxrl_llm.sampler.scheduler import Scheduler

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# What lm-evaluation-harness' local-completions model posts for a batch of log-likelihoods.
LIKELIHOOD = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


@pytest.fixture(scope="module")
def server(long_engine, params):
    scheduler = Scheduler(long_engine, params, decode=TOKENIZER.decode)
    scheduler.warm_up()  # no client waits for a compilation
    with up(scheduler) as server:
        yield server


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(6)
    return [rng.integers(2, CONFIG.vocab_size, length).tolist() for length in (2, 3, 4, 10, 11, 20, 22)]


@pytest.fixture(scope="module")
def own(long_engine, params):
    """The scheduler's own completions of prompts, with everything that can be asked for."""

    def of(prompts, **how):
        asked = [request(p, stream=i, seed=1234, **how) for i, p in enumerate(prompts)]
        return run(
            Scheduler(long_engine, params), [dataclasses.replace(r, alternatives=3, score_prompt=True) for r in asked]
        )

    return of


def complete(server, **fields):
    status, body = call(server.http, COMPLETIONS, LIKELIHOOD | fields)
    assert status == 200, body
    return body


def test_log_likelihoods_as_a_harness_reads_them(server, prompts, own):
    """The sum over the continuation without the one generated token, and whether each of it was the likeliest."""
    context, greedy_ones = 1, 0
    body = complete(server, prompt=prompts)
    for choice, prompt, completion in zip(body["choices"], prompts, own(prompts, new=1, temperature=0.0), strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + 1
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        mine = logprobs["token_logprobs"][context:-1]
        np.testing.assert_array_equal(np.array(mine, np.float32), completion.prompt.logprobs_T)
        greedy = [p == max(top.values()) for p, top in zip(mine, logprobs["top_logprobs"][context:-1], strict=True)]
        likeliest = completion.prompt.alternatives.ids_TN[:, 0].tolist()
        assert greedy == [a == b for a, b in zip(prompt[1:], likeliest, strict=True)]
        greedy_ones += sum(greedy)
        assert choice["text"] == TOKENIZER.decode(prompt) + TOKENIZER.decode(completion.tokens_T)
        for text, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert text in top
    assert greedy_ones
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_a_prompt_alone_can_be_scored(server, prompts):
    one, none = complete(server, prompt=prompts), complete(server, prompt=prompts, max_tokens=0)
    for a, b in zip(one["choices"], none["choices"], strict=True):
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert a["logprobs"][name][:-1] == b["logprobs"][name]
        assert a["text"].startswith(b["text"])
        assert b["finish_reason"] == "length"
    assert none["usage"]["completion_tokens"] == 0
    (alone,) = complete(server, prompt=[3], max_tokens=0)["choices"]
    assert (alone["logprobs"]["token_logprobs"], alone["logprobs"]["top_logprobs"]) == ([None], [None])
    _, body = call(server.http, COMPLETIONS, {"model": "tiny", "prompt": [3, 4], "max_tokens": 0, "echo": True})
    assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == (TOKENIZER.decode([3, 4]), None)


def test_text_offsets_find_every_token_in_the_text(server, prompts):
    for choice in complete(server, prompt=prompts, max_tokens=6)["choices"]:
        logprobs = choice["logprobs"]
        for text, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(text)] == text


def test_alternatives_of_what_is_generated(server, prompts, own):
    how = {"temperature": 0.7, "top_p": 0.9}
    body = complete(server, prompt=prompts, echo=False, max_tokens=6, logprobs=3, **how)
    wanted = own(prompts, new=6, **how)
    for choice, completion in zip(body["choices"], wanted, strict=True):
        logprobs, known = choice["logprobs"], completion.alternatives
        np.testing.assert_array_equal(np.array(logprobs["token_logprobs"], np.float32), completion.logprobs_T)
        for text, own_one, top, ids, theirs in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], known.ids_TN.tolist(),
            known.logprobs_TN.tolist(), strict=True,
        ):  # fmt: skip
            spoken = {TOKENIZER.decode([i]): p for i, p in reversed(list(zip(ids, theirs, strict=True)))}
            assert top == {text: own_one} | spoken
    asked = {"messages": [{"role": "user", "content": TOKENIZER.decode(prompts[0])}], "logprobs": True, "seed": 1234}
    status, chat = call(server.http, CHAT, {"model": "tiny", "max_tokens": 6, "top_logprobs": 2, **asked, **how})
    assert status == 200, chat
    for entry, ids, theirs in zip(
        chat["choices"][0]["logprobs"]["content"], wanted[0].alternatives.ids_TN, wanted[0].alternatives.logprobs_TN,
        strict=True,
    ):  # fmt: skip
        shown = [(one["token"], one["logprob"]) for one in entry["top_logprobs"]]
        assert shown == [(TOKENIZER.decode([i]), p) for i, p in zip(ids[:2].tolist(), theirs[:2].tolist(), strict=True)]


@pytest.mark.parametrize("length", [0, 1, 6])
def test_a_stream_of_scores_is_the_whole_answer(server, prompts, length):
    fields = {"prompt": prompts, "max_tokens": length, "logprobs": 2, "n": 2}
    whole = complete(server, **fields)
    status, text = call(server.http, COMPLETIONS, {**LIKELIHOOD, **fields, "stream": True}, raw=True)
    assert status == 200
    parts = [part["choices"][0] for part in events(text)]
    for choice in whole["choices"]:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for part in mine for x in part["logprobs"][name]] == choice["logprobs"][name]
        assert [part["finish_reason"] for part in mine][-1] == choice["finish_reason"]


def test_more_alternatives_than_are_kept_are_refused(server):
    for fields, path in (
        ({"prompt": "a", "logprobs": 4}, COMPLETIONS),
        ({"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 4}, CHAT),
    ):
        status, body = call(server.http, path, {"model": "tiny", **fields})
        assert (status, "keeps 0 to 3 alternatives" in body["error"]["message"]) == (400, True)
