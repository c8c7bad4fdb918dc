"""Both gRPC services over real sockets, on a scripted scheduler."""

import contextlib
import hashlib
import subprocess
import sys
from pathlib import Path

import grpc
import jax
import numpy as np
import pytest
from sampler_reference import CONFIG, make_params
from scripted_scheduler import ScriptedScheduler, no_test_waits_for_ever, scripted  # noqa: F401
from serving_reference import OPEN, TOKENIZER, up
from test_service import ask, wait_until

from jaxrl_llm.cli.serving import _lines
from jaxrl_llm.sampler.jetstream import orchestrator_protocol
from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.serving.client import SamplerClient, sampling_message
from jaxrl_llm.sampler.serving.rl_grpc import _sampling
from jaxrl_llm.sampler.serving.weights_stream import WeightsAssembly, weights_chunks
from jaxrl_llm.types import Sampling, ThinkingBudget, UserError

PROTO = Path(__file__).parents[2] / "jaxrl_llm/sampler/proto"


def draws(count, stream=0):
    return [rl_pb2.Draw(stream=stream + i, sibling=i, ledger_id=f"ledger-{stream + i}") for i in range(count)]


def refusal(code, pattern):
    """The RpcError of one call: its status, and words of its message."""
    return pytest.raises(grpc.RpcError, match=rf"(?s){code.name}.*{pattern}")


@contextlib.contextmanager
def client_of(scheduler, **options):
    with up(scheduler, **options) as server, SamplerClient(server.grpc) as client:
        yield server, client


def test_sample_streams_a_group_with_its_ledger_ids():
    with client_of(ScriptedScheduler()) as (_, client):
        pieces = list(client.pieces([3, 4], Sampling(5), draws(3)))
        whole = client.sample([3, 4], Sampling(5), draws(3))
    assert [(p.draw, p.ledger_id, p.request_id, len(p.tokens)) for p in pieces[:3]] == [
        (i, f"ledger-{i}", i, 0) for i in range(3)
    ]
    for i, completion in enumerate(whole):
        tokens, logprobs = scripted(ask(i, new=5))
        mine = [piece for piece in pieces if piece.draw == i]
        assert [t for piece in mine for t in piece.tokens] == tokens.tolist() == completion.tokens_T.tolist()
        streamed = np.array([x for piece in mine for x in piece.logprobs], np.float32)
        np.testing.assert_array_equal(streamed, logprobs)
        np.testing.assert_array_equal(completion.logprobs_T, logprobs)
        assert {(piece.ledger_id, piece.request_id) for piece in mine} == {(f"ledger-{i}", i)}
        assert [piece.finish for piece in mine[:-1]] == [rl_pb2.FINISH_RUNNING] * (len(mine) - 1)
        assert mine[-1].finish == rl_pb2.FINISH_LENGTH
        assert (completion.finish, completion.versions_T.tolist(), completion.forced_T.any()) == (
            "length",
            [0] * 5,
            False,
        )


def test_every_sampling_option_arrives():
    asked = Sampling(
        max_new_tokens=7,
        temperature=0.0,
        top_k=5,
        top_p=0.25,
        min_p=0.125,
        min_new_tokens=2,
        stop_ids=(4, 9),
        stop_strings=("ab", "\u4e2d"),
        banned_ids=(3,),
        logit_bias=((5, 1.5), (0, -100.0)),
        thinking=ThinkingBudget(1, 4, 2),
        repetition_limit=3000,
    )
    assert _sampling(sampling_message(asked)) == asked
    assert _sampling(rl_pb2.Sampling(max_new_tokens=3)) == Sampling(3)


def test_a_refused_call_fails_alone():
    scheduler = ScriptedScheduler(gated=True)
    with client_of(scheduler) as (_, client):
        good = client.pieces([3, 4], Sampling(3), draws(1))
        next(good)
        with refusal(grpc.StatusCode.INVALID_ARGUMENT, "7 tokens"):
            list(client.pieces([3] * 7, Sampling(3), draws(1)))
        with refusal(grpc.StatusCode.INVALID_ARGUMENT, "at least one"):
            list(client.pieces([3], Sampling(3), []))
        scheduler.let(3)
        assert list(good)[-1].finish == rl_pb2.FINISH_LENGTH


def test_a_full_queue_is_resource_exhausted():
    scheduler = ScriptedScheduler(slots=1, max_queue=1, gated=True)
    with client_of(scheduler) as (server, client):
        running = client.pieces([3], Sampling(1), draws(1))
        next(running)
        wait_until(lambda: scheduler._running)
        waiting = client.pieces([3], Sampling(1), draws(1))
        next(waiting)
        with refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "of 1"):
            list(client.pieces([3], Sampling(1), draws(1)))
        scheduler.let(9)
        assert list(running)[-1].finish == list(waiting)[-1].finish == rl_pb2.FINISH_LENGTH
        assert server.service.health.live


def test_calls_beyond_the_limit_are_refused_and_the_others_finish():
    scheduler = ScriptedScheduler(gated=True)
    with client_of(scheduler, max_calls=3) as (_, client):
        running = [client.pieces([3], Sampling(2), draws(1)) for _ in range(3)]
        for stream in running:
            next(stream)
        with refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, ""):
            client.health()
        scheduler.let(9)
        assert [list(stream)[-1].finish for stream in running] == [rl_pb2.FINISH_LENGTH] * 3
        assert client.health().state == "running"


def test_a_client_that_leaves_frees_its_slot():
    scheduler = ScriptedScheduler(slots=1, gated=True)
    with client_of(scheduler) as (_, client):
        left = client.pieces([3], Sampling(8), draws(1))
        next(left)
        left.cancel()
        wait_until(lambda: not scheduler._running)
        waiting = client.pieces([3], Sampling(1), draws(1, stream=5))
        scheduler.let(1)
        assert list(waiting)[-1].finish == rl_pb2.FINISH_LENGTH


def test_abort_and_unknown_ids():
    scheduler = ScriptedScheduler(gated=True)
    with client_of(scheduler) as (_, client):
        stream = client.pieces([3], Sampling(8), draws(1))
        request_id = next(stream).request_id
        scheduler.let(1)
        assert len(next(stream).tokens) == 1
        assert list(client.abort([request_id]).aborted) == [request_id]
        assert list(stream)[-1].finish == rl_pb2.FINISH_ABORTED
        assert list(client.abort([request_id]).finished) == [request_id]
        with refusal(grpc.StatusCode.INVALID_ARGUMENT, "no request has the id 77"):
            client.abort([77])


def test_pause_resume_drain_health_and_metrics():
    with client_of(ScriptedScheduler()) as (_, client):
        client.pause()
        health = client.health()
        assert (health.state, health.slots, health.vocab_size, health.max_new_tokens) == ("paused", 4, 20, 8)
        with refusal(grpc.StatusCode.INVALID_ARGUMENT, "paused"):
            client.drain()
        client.resume()
        client.drain()
        assert client.health().state == "drained"
        with refusal(grpc.StatusCode.UNAVAILABLE, "drains"):
            client.sample([3], Sampling(1), draws(1))
        client.resume()
        assert len(client.sample([3], Sampling(1), draws(1))) == 1
        assert client.metrics()["slots"] == 4


def test_a_failed_sampler_is_unavailable_with_its_reason(caplog):
    scheduler = ScriptedScheduler()
    scheduler.broken = FloatingPointError("not finite")
    with client_of(scheduler) as (_, client):
        for _ in range(2):
            with refusal(grpc.StatusCode.UNAVAILABLE, "not finite"):
                client.sample([3], Sampling(1), draws(1))
        assert (client.health().state, "not finite" in client.health().error) == ("failed", True)


# Weights.


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(np.asarray, make_params(CONFIG, 3))


def test_weights_arrive_bit_for_bit(params):
    loaded = []
    scheduler = ScriptedScheduler()
    scheduler.engine.load_params = lambda p: loaded.append(p) or {}
    with client_of(scheduler) as (_, client):
        client.update_weights(params, 7)
        assert client.health().version == 7
        with refusal(grpc.StatusCode.INVALID_ARGUMENT, "only go up"):
            client.update_weights(params, 7)
    jax.tree.map(np.testing.assert_array_equal, loaded[0], params)


def assemble(chunks):
    assembly = WeightsAssembly(CONFIG)
    for chunk in chunks:
        assembly.add(chunk)
    return assembly.finish()


def test_bfloat16_weights_survive(params):
    low = jax.tree.map(lambda x: np.asarray(jax.numpy.asarray(x, jax.numpy.bfloat16)), params)
    got, version = assemble(weights_chunks(low, 3))
    assert version == 3
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16)), got, low)
    assert jax.tree.leaves(got)[0].dtype == low["embed"].dtype


def spoil(params, how):
    chunks = list(weights_chunks(params, 1))
    leaf = next(c for c in chunks if c.WhichOneof("part") == "leaf" and c.leaf.path == "head")
    data = chunks[chunks.index(leaf) + 1]
    match how:
        case "missing":
            chunks = [c for c in chunks if c is not leaf and c is not data]
        case "extra":
            leaf.leaf.path = "tail"
        case "mis-shaped":
            leaf.leaf.shape[0] += 1
        case "twice":
            chunks += [leaf, data]
        case "flipped bit":
            data.data = bytes([data.data[0] ^ 1]) + data.data[1:]
        case "short":
            data.data = data.data[:-4]
        case "long":
            data.data += b"0000"
        case "dtype":
            leaf.leaf.dtype = "float64"
        case "not finite":
            data.data = b"\xff" * len(data.data)
            leaf.leaf.sha256 = hashlib.sha256(data.data).digest()
        case "headless":
            chunks = chunks[1:]
    return chunks


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "weights lack the leaf head"),
        ("extra", "a leaf tail that this model has not"),
        ("mis-shaped", r"leaf head has shape \(21, 32\); this model needs \(20, 32\)"),
        ("twice", "leaf head twice"),
        ("flipped bit", "leaf head arrived with another sha256"),
        ("short", "leaf head has 2556 of its 2560 bytes"),
        ("long", "leaf head has more bytes"),
        ("dtype", "leaf head is float64"),
        ("not finite", "leaf head holds numbers that are not finite"),
        ("headless", "a leaf before the header"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(params, how, message):
    with pytest.raises(UserError, match=message):
        assemble(spoil(params, how))


def test_bad_weights_fail_their_call_alone(params):
    scheduler = ScriptedScheduler(gated=True)
    with client_of(scheduler) as (_, client):
        running = client.pieces([3], Sampling(2), draws(1))
        next(running)
        with refusal(grpc.StatusCode.INVALID_ARGUMENT, "weights lack the leaf head"):
            client._calls["UpdateWeights"](iter(spoil(params, "missing")))
        scheduler.let(2)
        assert list(running)[-1].finish == rl_pb2.FINISH_LENGTH
        assert client.health().version == 0


# JetStream's stock client.


def test_the_stock_client_is_served_text_and_tokens():
    messages, services = orchestrator_protocol()
    with up(ScriptedScheduler()) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = services.OrchestratorStub(channel)
        text = messages.DecodeRequest.TextContent(text="ab c")
        asked = messages.DecodeRequest(session_cache="", text_content=text, priority=0, max_tokens=6)
        samples = [response.stream_content.samples[0] for response in stub.Decode(asked)]
        tokens = scripted(ask(0, new=6))[0].tolist()
        assert [t for sample in samples for t in sample.token_ids] == tokens
        assert "".join(sample.text for sample in samples) == TOKENIZER.decode(tokens)

        token = messages.DecodeRequest.TokenContent(token_ids=TOKENIZER.encode("ab c"))
        samples = [
            response.stream_content.samples[0]
            for response in stub.Decode(messages.DecodeRequest(token_content=token, max_tokens=6))
        ]
        assert [t for sample in samples for t in sample.token_ids] == tokens
        assert not any(sample.text for sample in samples)
        assert stub.HealthCheck(messages.HealthCheckRequest()).is_live


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 4}, "neither text_content nor token_content"),
        ({"text": "ab", "session_cache": "s"}, "session_cache"),
        ({"text": "abcdefgh"}, "8 tokens"),
        ({"text": "Z"}, "not in the tokenizer's vocabulary"),
    ],
)
def test_the_stock_client_is_told_what_is_wrong(change, message):
    messages, services = orchestrator_protocol()
    if "text" in change:
        change["text_content"] = messages.DecodeRequest.TextContent(text=change.pop("text"))
    asked = messages.DecodeRequest(**{"max_tokens": 4} | change)
    with up(ScriptedScheduler()) as server, grpc.insecure_channel(server.grpc) as channel:
        stream = services.OrchestratorStub(channel).Decode(asked)
        with refusal(grpc.StatusCode.INVALID_ARGUMENT, message):
            list(stream)


def test_the_generated_code_is_that_of_the_proto(tmp_path):
    source = "jaxrl_llm/sampler/proto/rl.proto"
    folders = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parents[2]}", *folders, source]
    subprocess.run(command, check=True, capture_output=True)
    for name in ("rl_pb2.py", "rl_pb2.pyi"):
        assert (tmp_path / "jaxrl_llm/sampler/proto" / name).read_text() == (PROTO / name).read_text(), name


def test_without_jetstream_our_own_service_is_there_and_the_start_says_what_is_not(monkeypatch):
    messages, services = orchestrator_protocol()
    monkeypatch.setitem(sys.modules, "jetstream", None)
    with client_of(ScriptedScheduler()) as (server, client):
        assert len(client.sample([3], Sampling(2), draws(1))[0].tokens_T) == 2
        assert "JetStream's own service is absent: google-jetstream is not installed" in _lines(
            server.ports, OPEN, "tiny"
        )
        with grpc.insecure_channel(server.grpc) as channel, refusal(grpc.StatusCode.UNIMPLEMENTED, ""):
            services.OrchestratorStub(channel).HealthCheck(messages.HealthCheckRequest())
