"""The whole way, sockets to engine: every door gives the scheduler's own tokens and log-probabilities, bit for bit."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from sampler_reference import EOS, make_requests, request, run
from serving_reference import TOKENIZER, call, connect, events, up

from jaxrl_llm.sampler.jetstream import orchestrator_protocol
from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.sampler.serving.client import SamplerClient
from jaxrl_llm.types import SampleRequest, Sampling

PROMPT = TOKENIZER.encode("ab c")


@pytest.fixture(scope="module")
def own(engine, params):
    """The scheduler without any server."""
    return Scheduler(engine, params, decode=TOKENIZER.decode)


@pytest.fixture(scope="module")
def server(engine, params):
    with up(Scheduler(engine, params, decode=TOKENIZER.decode, max_queue=64)) as server:
        yield server


def draws(count):
    return [rl_pb2.Draw(seed=5, stream=0, sibling=i, ledger_id=str(i)) for i in range(count)]


def group(sampling):
    return [SampleRequest(np.array(PROMPT, np.int32), sampling, 5, 0, sibling) for sibling in range(4)]


def same(one, two):
    for name in ("tokens_T", "logprobs_T", "versions_T", "forced_T"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert one.finish == two.finish


SAMPLINGS = [
    Sampling(8),
    Sampling(8, 0.0),
    Sampling(6, 1.5, top_k=5, top_p=0.9, min_p=0.02, banned_ids=(3, 7)),
    Sampling(8, 2.0, stop_strings=("a", "bc"), min_new_tokens=2),
    Sampling(8, 2.0, stop_ids=(4, 5, 6)),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_rl_service_is_the_scheduler(server, own, sampling):
    wanted = run(own, group(sampling))
    with SamplerClient(server.grpc) as client:
        for mine, theirs in zip(client.sample(PROMPT, sampling, draws(4)), wanted, strict=True):
            same(mine, theirs)


def http_fields(how):
    return {
        "model": "tiny", "prompt": PROMPT, "max_tokens": how.max_new_tokens, "temperature": how.temperature,
        "top_k": how.top_k, "top_p": how.top_p, "min_p": how.min_p, "min_tokens": how.min_new_tokens,
        "stop": list(how.stop_strings), "stop_token_ids": list(how.stop_ids), "seed": 5, "n": 4, "logprobs": 0,
        "logit_bias": {str(i): -100 for i in how.banned_ids}, "return_token_ids": True,
    }  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_http_is_the_scheduler_streamed_or_not(server, own, sampling):
    wanted = run(own, group(sampling))
    status, whole = call(server.http, "/v1/completions", http_fields(sampling))
    assert status == 200, whole
    _, text = call(server.http, "/v1/completions", {**http_fields(sampling), "stream": True}, raw=True)
    parts = [part["choices"][0] for part in events(text)]
    for choice, completion in zip(whole["choices"], wanted, strict=True):
        assert choice["token_ids"] == completion.tokens_T.tolist()
        logprobs = choice["logprobs"]["token_logprobs"]
        np.testing.assert_array_equal(np.array(logprobs, np.float32), completion.logprobs_T)
        ids = completion.tokens_T[:-1] if completion.finish == "stop" else completion.tokens_T
        spoken = TOKENIZER.decode(ids)
        places = [spoken.index(stop) for stop in sampling.stop_strings if stop in spoken]
        assert choice["text"] == spoken[: min(places, default=len(spoken))]
        assert choice["finish_reason"] == {"stop_string": "stop"}.get(completion.finish, completion.finish)
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [i for part in mine for i in part["token_ids"]] == choice["token_ids"]
        assert [p for part in mine for p in part["logprobs"]["token_logprobs"]] == logprobs
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    assert whole["usage"]["completion_tokens"] == sum(len(c.tokens_T) for c in wanted)


def test_jetstreams_stock_client_gets_the_greedy_completion(server, own):
    messages, services = orchestrator_protocol()
    prompts = [[first, second] for first in range(2, 20) for second in (2, 9)]
    completions = run(own, [request(prompt, temperature=0.0) for prompt in prompts])
    ends = [completion.finish for completion in completions]
    with grpc.insecure_channel(server.grpc) as channel:
        stub = services.OrchestratorStub(channel)
        for which in (ends.index("stop"), ends.index("length")):
            ids = [i for i in completions[which].tokens_T.tolist() if i != EOS]  # not sent, as JetStream does
            assert len(ids) == len(completions[which].tokens_T) - (ends[which] == "stop")
            text = messages.DecodeRequest.TextContent(text=TOKENIZER.decode(prompts[which]))
            tokens = messages.DecodeRequest.TokenContent(token_ids=prompts[which])
            for content, spoken in (
                ({"text_content": text}, TOKENIZER.decode(ids)),
                ({"token_content": tokens}, ""),
            ):
                answers = list(stub.Decode(messages.DecodeRequest(**content, max_tokens=8)))
                samples = [answer.stream_content.samples[0] for answer in answers]
                assert [i for sample in samples for i in sample.token_ids] == ids
                assert "".join(sample.text for sample in samples) == spoken


def test_weights_pushed_in_mid_stream_change_the_versions(engine, params, other_params):
    with up(Scheduler(engine, params)) as server, SamplerClient(server.grpc) as client:
        many = [rl_pb2.Draw(seed=1, sibling=i) for i in range(400)]  # they outlast the push on a busy machine too
        stream = client.pieces(PROMPT, Sampling(8, banned_ids=(1,)), many)
        for piece in stream:
            if piece.tokens:
                break
        client.update_weights(other_params, 9)
        versions = set(piece.versions) | {version for piece in stream for version in piece.versions}
        assert versions == {0, 9}
        (after,) = client.sample(PROMPT, Sampling(8), [rl_pb2.Draw(seed=5)])
    fresh = Scheduler(engine, other_params, version=9)
    same(after, run(fresh, [request(PROMPT, seed=5)])[0])


def test_one_bad_call_of_each_kind_among_many_good_ones(engine, params, own):
    """Every good call finishes with its own tokens while others are refused, leave, and break off."""
    asked = make_requests(24)
    wanted = run(own, asked)
    with up(Scheduler(engine, params, decode=TOKENIZER.decode), max_calls=100) as server:

        def good(i):
            with SamplerClient(server.grpc) as client:
                r = asked[i]
                draw = rl_pb2.Draw(seed=r.seed, stream=r.stream, sibling=r.sibling)
                same(client.sample(r.tokens_T.tolist(), r.sampling, [draw])[0], wanted[i])

        def refused(prompt, how):
            with SamplerClient(server.grpc) as client, pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                client.sample(prompt, how, draws(1))

        def leaves(_):
            with SamplerClient(server.grpc) as client:
                stream = client.pieces(PROMPT, Sampling(8), draws(2))
                next(stream)
                stream.cancel()

        def breaks_off(_):
            with contextlib.closing(connect(server.http)) as connection:
                body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 8, "n": 4, "stream": True})
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                assert connection.getresponse().readline().startswith(b"data: ")

        with ThreadPoolExecutor(16) as pool:
            jobs = [pool.submit(good, i) for i in range(len(asked))]
            jobs += [pool.submit(refused, [3] * 7, Sampling(4)), pool.submit(refused, [3, 20], Sampling(4))]
            jobs += [pool.submit(refused, PROMPT, Sampling(4, -1.0)), pool.submit(refused, PROMPT, Sampling(9))]
            jobs += [pool.submit(refused, PROMPT, Sampling(4, top_p=0.0)), pool.submit(refused, [], Sampling(4))]
            jobs += [pool.submit(leaves, i) for i in range(3)] + [pool.submit(breaks_off, i) for i in range(2)]
            for job in jobs:
                job.result(timeout=60)
            assert server.service.drain().result(timeout=20) is None
        assert server.service.health.in_flight == 0
        statistics = server.service._scheduler.statistics
        assert statistics.requests_submitted == statistics.requests_completed + statistics.requests_aborted
