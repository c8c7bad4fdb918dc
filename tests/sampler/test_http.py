"""The OpenAI-compatible endpoints over real sockets, on a scripted scheduler."""

import contextlib
import json
import re
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from scripted_scheduler import ScriptedScheduler, no_test_waits_for_ever, scripted  # noqa: F401
from serving_reference import TOKENIZER, call, connect, events, up
from test_service import ask, wait_until

from jaxrl_llm.sampler.serving import http_app
from jaxrl_llm.sampler.serving.openai_request import Limits, RefusedFieldError, read_chat
from jaxrl_llm.text.tokenizer import encode_each

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with up(ScriptedScheduler()) as server:
        yield server


def complete(server, **fields):
    return call(server.http, COMPLETIONS, {"model": "tiny", "prompt": "ab c", "max_tokens": 6, **fields})


def expected(stream, count=6):
    tokens, logprobs = scripted(ask(stream, new=count))
    return tokens.tolist(), logprobs.tolist()


def test_a_completion(server):
    status, body = complete(server)
    tokens, _ = expected(0)
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    choice = {"index": 0, "text": TOKENIZER.decode(tokens), "logprobs": None, "finish_reason": "length"}
    assert body["choices"] == [choice]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}


def test_prompts_in_all_four_forms_and_n(server):
    ids = TOKENIZER.encode("ab c")
    for prompt, prompts in (("ab c", 1), (ids, 1), (["ab c", "d"], 2), ([ids, TOKENIZER.encode("d")], 2)):
        status, body = complete(server, prompt=prompt, n=3, return_token_ids=True)
        assert status == 200
        assert [choice["index"] for choice in body["choices"]] == list(range(3 * prompts))
        for choice in body["choices"]:
            which = choice["index"] // 3  # the scripted tokens tell the prompts apart, real ones the siblings too
            assert choice["token_ids"] == expected(which)[0]
            assert choice["prompt_token_ids"] == (ids if which == 0 else TOKENIZER.encode("d"))
        assert body["usage"]["prompt_tokens"] == (4 if prompts == 1 else 5)


def test_a_stream_is_the_whole_answer(server):
    asked = {"n": 2, "prompt": ["ab c", "d"], "logprobs": 0, "return_token_ids": True}
    _, whole = complete(server, **asked)
    body = {"model": "tiny", "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}, **asked}
    status, text = call(server.http, COMPLETIONS, body, raw=True)
    assert status == 200
    *parts, last = events(text)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [i for part in mine for i in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [x for part in mine for x in part["logprobs"][name]] == choice["logprobs"][name]
        np.testing.assert_array_equal(
            np.array(choice["logprobs"]["token_logprobs"], np.float32), scripted(ask(new=6))[1]
        )


def test_echo(server):
    _, body = complete(server, echo=True)
    assert body["choices"][0]["text"] == "ab c" + TOKENIZER.decode(expected(0)[0])
    _, text = call(
        server.http,
        COMPLETIONS,
        {"model": "tiny", "prompt": "ab c", "max_tokens": 6, "echo": True, "stream": True},
        raw=True,
    )
    assert "".join(part["choices"][0]["text"] for part in events(text)) == body["choices"][0]["text"]


def test_chat(server):
    """A policy without a chat template takes what it was trained on: one user message, as it is."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "ab c"}], "logprobs": True}
    status, body = call(server.http, CHAT, {**asked, "max_completion_tokens": 6})
    tokens, logprobs = expected(0)
    choice = body["choices"][0]
    assert (status, body["object"], choice["finish_reason"]) == (200, "chat.completion", "length")
    assert choice["message"] == {"role": "assistant", "content": TOKENIZER.decode(tokens)}
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [TOKENIZER.decode([i]) for i in tokens]
    np.testing.assert_allclose([entry["logprob"] for entry in choice["logprobs"]["content"]], logprobs)
    status, text = call(server.http, CHAT, {**asked, "max_tokens": 6, "stream": True}, raw=True)
    first, *parts = events(text)
    assert (first["object"], first["choices"][0]["delta"]["role"]) == ("chat.completion.chunk", "assistant")
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == TOKENIZER.decode(tokens)
    assert call(server.http, CHAT, asked)[1]["usage"]["completion_tokens"] == 8  # the default is all there is room for


def test_chat_with_a_template():
    characters = "usertmainx\n"
    tokenizer = SimpleNamespace(
        **{"special_tokens": {"<|im_start|>": 0, "<|im_end|>": 1}, "chat_template": None, "bos_id": None, "eos_id": 1},
        token_id={"<|im_start|>": 0, "<|im_end|>": 1}.get,
        encode=lambda text: [2 + characters.index(char) for char in text],
        decode=lambda ids: "".join(characters[i % 10] for i in ids),
    )
    tokenizer.encode_parts = partial(encode_each, tokenizer.encode)
    scheduler = ScriptedScheduler()
    scheduler.submitted = []
    take = scheduler.submit
    scheduler.submit = lambda requests: (
        scheduler.submitted.extend(requests)
        or take([ask(request.stream, new=request.sampling.max_new_tokens) for request in requests])
    )
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    messages.append({"role": "user", "content": "i"})
    with up(scheduler, template="chatml", tokenizer=tokenizer) as server:
        status, body = call(server.http, CHAT, {"model": "tiny", "messages": messages, "max_tokens": 2})
    assert status == 200, body
    text = tokenizer.encode
    turn = lambda role, said: [0, *text(f"{role}\n{said}"), 1, *text("\n")]  # noqa: E731
    wanted = [*turn("user", "x"), *turn("assistant", "a"), *turn("user", "i"), 0, *text("assistant\n")]
    assert scheduler.submitted[0].tokens_T.tolist() == wanted
    assert body["usage"]["prompt_tokens"] == len(wanted)


def test_tools_stand_in_the_prompt_where_the_template_shows_them():
    characters = "usertmainx\n"
    tokenizer = SimpleNamespace(
        **{"special_tokens": {"<s>": 0}, "bos_id": None, "eos_id": 1},
        chat_template="{{ messages[0].content }}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}",
        encode=lambda text: [2 + characters.index(char) for char in text],
        decode=lambda ids: "".join(characters[i % 10] for i in ids),
    )
    tokenizer.encode_parts = partial(encode_each, tokenizer.encode)
    limits = Limits(4, 4, 0)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [{"name": "matrix"}]}
    for choice in ({}, {"tool_choice": "auto"}):
        (prompt,) = read_chat(body | choice, tokenizer, "model", limits).prompts
        assert list(prompt) == tokenizer.encode("xmatrix")
    with pytest.raises(RefusedFieldError, match="tool_choice"):
        read_chat(body | {"tool_choice": "required"}, tokenizer, "model", limits)
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(RefusedFieldError, match="shows the policy no tools"):
        read_chat(body, tokenizer, "model", limits)


def test_sampling_fields_reach_the_scheduler(server):
    seen = []
    take = server.service._scheduler.submit
    server.service._scheduler.submit = lambda requests: seen.extend(requests) or take(requests)
    try:
        status, _ = complete(
            server, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, min_tokens=2, seed=11, n=2, stop=["ab", "c"],
            stop_token_ids=[4], logit_bias={"5": -100, "6": 1.5, "7": 0}, presence_penalty=0.0, user="me",
        )  # fmt: skip
        assert status == 200
        complete(server)
        complete(server)
    finally:
        server.service._scheduler.submit = take
    how = seen[0].sampling
    assert (how.max_new_tokens, how.temperature, how.top_p, how.top_k, how.min_p) == (6, 0.5, 0.9, 7, 0.1)
    assert (how.min_new_tokens, how.stop_strings, how.stop_ids, how.banned_ids) == (2, ("ab", "c"), (4,), (5,))
    assert how.logit_bias == ((6, 1.5),)
    assert [(request.seed, request.stream, request.sibling) for request in seen[:2]] == [(11, 0, 0), (11, 0, 1)]
    assert (seen[2].sampling.temperature, seen[2].sampling.top_p) == (1.0, 1.0)
    assert seen[2].seed != seen[3].seed  # nobody asked for the same sample twice


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty", "0.5 is not supported"),
        ({"best_of": 4}, "best_of", "not supported"),
        ({"logprobs": 3}, "logprobs", "keeps 0 to 0 alternatives"),
        ({"logit_bias": {"x": 2.0}}, "logit_bias", "'x' is no token id"),
        ({"logit_bias": {"9" * 5000: 2.0}}, "logit_bias", "is no token id"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"max_tokens": 0}, "max_tokens", "only makes sense with echo"),
        ({"guided_json": {}}, "guided_json", "not a field"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"max_tokens": 2.5}, "max_tokens", "integer"),
        ({"seed": -1}, "seed", "2\\*\\*32|4294967295"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 17}, "n", "17 completions of 1 prompts are more than the 16"),
        ({"prompt": []}, "prompt", "holds no prompt"),
        ({"prompt": [1, 99]}, "prompt", "holds the id 99"),
        ({"prompt": "Z"}, None, "not in the tokenizer's vocabulary"),
        ({"prompt": "abcdefgh"}, None, "8 tokens"),
        ({"echo": True, "logprobs": 0}, "echo", "scores no prompts"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
        ({"stop": [["a"]]}, "stop", "valid string"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(server, fields, param, message):
    status, body = complete(server, **fields)
    assert (status, body["error"]["type"], body["error"]["param"]) == (400, "invalid_request_error", param)
    assert re.search(message, body["error"]["message"])


def test_chat_refusals(server):
    hello = [{"role": "user", "content": "a"}]
    for fields, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}, *hello]}, "messages"),  # there is no template
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ({"messages": hello, "top_logprobs": 2}, "top_logprobs"),  # without logprobs
        ({"messages": hello, "logprobs": True, "top_logprobs": 2}, "top_logprobs"),  # none are kept
        ({"messages": hello, "tools": [{"type": "function"}]}, "tools"),  # there is no template
        ({"messages": hello, "tool_choice": "required"}, "tool_choice"),
        ({"messages": hello, "max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": hello, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": hello, "prompt": "a"}, "prompt"),
    ):
        status, body = call(server.http, CHAT, {"model": "tiny", **fields})
        assert (status, body["error"]["param"]) == (400, param), body


def test_other_errors_have_the_same_shape(server):
    cases = [
        (call(server.http, COMPLETIONS, {"model": "gpt", "prompt": "a"}), 404, "model_not_found"),
        (call(server.http, COMPLETIONS, b"{"), 400, None),
        (call(server.http, COMPLETIONS, b"[]"), 400, None),
        (call(server.http, COMPLETIONS, b'{"a":' * 100000), 400, None),
        (call(server.http, COMPLETIONS, b'{"model": "tiny", "prompt": "a", "stop": "\\ud800"}'), 400, None),
        (call(server.http, COMPLETIONS, b'{"model": "\xed\xa0\x80", "prompt": "a"}'), 400, None),
        (call(server.http, COMPLETIONS, {"prompt": "a"}), 400, None),
        (call(server.http, COMPLETIONS, b"x" * (5 << 20)), 413, None),
        (call(server.http, COMPLETIONS, {}, headers={"Content-Type": "text/plain"}), 415, None),
        (call(server.http, "/v1/nothing"), 404, None),
        (call(server.http, COMPLETIONS), 405, None),
    ]
    for (status, body), wanted, code in cases:
        assert (status, body["error"]["code"]) == (wanted, code), body
        assert body["error"]["message"]


def test_models_health_and_metrics(server):
    assert [model["id"] for model in call(server.http, "/v1/models")[1]["data"]] == ["tiny"]
    assert call(server.http, "/health") == (200, {"status": "running"})
    status, text = call(server.http, "/metrics", raw=True)
    assert status == 200
    assert "# TYPE jaxrl_sampler_slots gauge\njaxrl_sampler_slots 4.0" in text


def test_health_is_503_until_everything_is_compiled():
    scheduler, compiled = ScriptedScheduler(), threading.Event()
    scheduler.warm_up = lambda: compiled.wait(20)
    with up(scheduler, warm_up=True) as server:
        assert call(server.http, "/health") == (503, {"status": "starting"})
        compiled.set()
        assert complete(server)[0] == 200  # what came before waited
        assert call(server.http, "/health")[0] == 200


def test_a_page_of_another_site_is_kept_out(server):
    """DNS rebinding: the browser sends this machine's address a request that names the attacker's site."""
    status, body = call(server.http, "/v1/models", headers={"Host": "evil.example:80"})
    assert (status, "evil.example" in body["error"]["message"]) == (403, True)
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "[::1]"):
        assert call(server.http, "/v1/models", headers={"Host": host})[0] == 200


def test_flood_is_429_and_the_others_finish():
    scheduler = ScriptedScheduler(slots=1, max_queue=2, gated=True)
    with up(scheduler) as server, contextlib.ExitStack() as stack:
        started = []
        for _ in range(3):
            connection = stack.enter_context(contextlib.closing(connect(server.http)))
            body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2})
            connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
            started.append(connection)
            wait_until(lambda: scheduler._next == len(started) and len(scheduler._waiting) == len(started) - 1)
        status, body = complete(server)
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        scheduler.let(99)
        assert [connection.getresponse().status for connection in started] == [200] * 3


def test_more_calls_than_allowed_are_429():
    scheduler = ScriptedScheduler(gated=True)
    with up(scheduler, max_calls=1) as server, contextlib.closing(connect(server.http)) as connection:
        body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2})
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        wait_until(lambda: scheduler._running)
        assert complete(server)[0] == 429
        assert call(server.http, "/health")[0] == 200  # a probe is always answered
        scheduler.let(9)
        assert connection.getresponse().status == 200
        wait_until(lambda: complete(server)[0] == 200)


def test_a_body_that_never_comes_gives_its_place_back(monkeypatch):
    monkeypatch.setattr(http_app, "BODY_S", 0.05)
    with up(ScriptedScheduler(), max_calls=1) as server, contextlib.closing(connect(server.http)) as connection:
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
        assert complete(server)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(stream):
    scheduler = ScriptedScheduler(slots=1, gated=True)
    with up(scheduler) as server:
        with contextlib.closing(connect(server.http)) as connection:
            body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 8, "stream": stream})
            connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
            wait_until(lambda: scheduler._running)
            scheduler.let(1)
            if stream:
                assert connection.getresponse().readline().startswith(b"data: ")
        wait_until(lambda: scheduler.idle)
        scheduler.let(1)
        assert complete(server, max_tokens=1)[0] == 200
        assert scheduler.dispatched == 2


def test_a_sampler_that_fails_in_mid_stream_says_so(caplog):
    scheduler = ScriptedScheduler(gated=True)
    with up(scheduler) as server, contextlib.closing(connect(server.http)) as connection:
        body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 8, "stream": True})
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        wait_until(lambda: scheduler._running)
        scheduler.let(1)
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        scheduler.broken = FloatingPointError("not finite")
        scheduler.let(1)
        last = response.read().decode().strip().split("\n\n")[-1]
        assert "not finite" in json.loads(last.removeprefix("data: "))["error"]["message"]
        status, body = complete(server)
        assert (status, body["error"]["type"]) == (503, "server_error")
        assert call(server.http, "/health") == (503, {"status": "failed"})


def test_the_servers_stop_in_the_middle_of_streams():
    scheduler = ScriptedScheduler(gated=True)
    began = time.monotonic()
    with contextlib.closing(connect(0)) as connection:
        with up(scheduler) as server:
            connection.port = server.http
            body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 8, "stream": True})
            connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
            wait_until(lambda: scheduler._running)
        assert time.monotonic() - began < 10
