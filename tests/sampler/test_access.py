"""Who may reach the servers: addresses, tokens, TLS."""

import logging

import grpc
import pytest
import trustme
from scripted_scheduler import ScriptedScheduler, no_test_waits_for_ever  # noqa: F401
from serving_reference import OPEN, TOKENIZER, call, up
from test_grpc import draws, refusal

from jaxrl_llm.sampler.jetstream import orchestrator_protocol
from jaxrl_llm.sampler.service import SamplerService
from jaxrl_llm.sampler.serving.access import TOKEN_VARIABLE, Token, check_access, is_loopback, read_token
from jaxrl_llm.sampler.serving.client import SamplerClient
from jaxrl_llm.sampler.serving.http_app import Served
from jaxrl_llm.sampler.serving.server import serving
from jaxrl_llm.types import Sampling, UserError

SECRET = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """(certificate, key, authority) files of a certificate made for this test."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(folder / "cert.pem", append=True)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return folder / "cert.pem", folder / "key.pem", folder / "ca.pem"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "::ffff:10.0.0.1", "127.0.0.1.nip.io"])
def test_other_addresses_need_a_token_and_tls(host, tls):
    certificate, key, _ = tls
    token = Token(SECRET)
    for given, missing in (
        ((None, None, None), "without a token .* and without TLS"),
        ((token, None, None), "without TLS"),
        ((None, certificate, key), "without a token"),
    ):
        with pytest.raises(UserError, match=f"refusing to listen on {host} {missing}"):
            check_access(host, *given)
    assert check_access(host, token, certificate, key).host == host


def test_loopback_is_open_without_either():
    for host, bound in (
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("127.1.2.3", "127.1.2.3"),
    ):
        assert is_loopback(host)
        assert check_access(host, None, None, None).host == bound


def test_tls_files_must_be_a_pair(tls, tmp_path):
    certificate, key, _ = tls
    with pytest.raises(UserError, match="go together"):
        check_access("127.0.0.1", None, certificate, None)
    for bad in (tmp_path / "none.pem", key):
        with pytest.raises(UserError, match="not a PEM certificate and its key"):
            check_access("127.0.0.1", None, bad, key)


def test_tokens_come_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    assert read_token(file, {TOKEN_VARIABLE: "another-token-of-some-length"}).admits(f"Bearer {SECRET}")
    assert read_token(None, {TOKEN_VARIABLE: SECRET}).admits(f"bearer {SECRET}")
    assert read_token(None, {}) is None
    for text in ("", "short", "two words of a token, really", "caf\u00e9caf\u00e9caf\u00e9caf\u00e9"):
        file.write_text(text)
        with pytest.raises(UserError, match="must hold one token of at least 16") as refused:
            read_token(file, {})
        assert not text or text not in str(refused.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_token(tmp_path / "none", {})


@pytest.mark.parametrize(
    "header",
    [None, "", SECRET, f"Basic {SECRET}", f"Bearer {SECRET}x", "Bearer ", f"Bearer {SECRET[:-1]}", "Bearer \u00e9"],
)
def test_only_the_token_is_admitted(header):
    assert not Token(SECRET).admits(header)
    assert SECRET not in repr(vars(Token(SECRET)))


def test_token_over_http(caplog):
    caplog.set_level(logging.DEBUG)
    access = check_access("127.0.0.1", Token(SECRET), None, None)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    with up(ScriptedScheduler(), access) as server:
        for headers in ({}, {"Authorization": "Bearer wrong-wrong-wrong-wrong"}):
            for path, sent in (("/v1/completions", body), ("/v1/models", None), ("/metrics", None)):
                status, answer = call(server.http, path, sent, headers=headers)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert call(server.http, "/health")[0] == 200
        right = {"Authorization": f"Bearer {SECRET}"}
        assert call(server.http, "/v1/completions", body, headers=right)[0] == 200
    assert SECRET not in caplog.text


def test_token_over_grpc(caplog):
    caplog.set_level(logging.DEBUG)
    access = check_access("127.0.0.1", Token(SECRET), None, None)
    messages, services = orchestrator_protocol()
    with up(ScriptedScheduler(), access) as server:
        for wrong in (None, "wrong-wrong-wrong-wrong"):
            with SamplerClient(server.grpc, token=wrong) as client:
                for method in (client.health, client.pause, lambda c=client: c.update_weights({}, 1)):
                    with refusal(grpc.StatusCode.UNAUTHENTICATED, "token"):
                        method()
                with refusal(grpc.StatusCode.UNAUTHENTICATED, "token"):
                    client.sample([3], Sampling(1), draws(1))
        with grpc.insecure_channel(server.grpc) as channel:
            stub = services.OrchestratorStub(channel)
            decode = messages.DecodeRequest(
                token_content=messages.DecodeRequest.TokenContent(token_ids=[3]), max_tokens=1
            )
            with refusal(grpc.StatusCode.UNAUTHENTICATED, "token"):
                list(stub.Decode(decode))
            assert len(list(stub.Decode(decode, metadata=[("authorization", f"Bearer {SECRET}")]))) == 1
        with SamplerClient(server.grpc, token=SECRET) as client:
            assert len(client.sample([3], Sampling(1), draws(1))) == 1
    assert SECRET not in caplog.text


def test_tls_with_a_token(tls):
    certificate, key, authority = tls
    access = check_access("127.0.0.1", Token(SECRET), certificate, key)
    right = {"Authorization": f"Bearer {SECRET}"}
    with up(ScriptedScheduler(), access) as server:
        assert call(server.http, "/v1/models", headers=right, certificate=authority)[0] == 200
        assert call(server.http, "/v1/models", certificate=authority)[0] == 401
        with SamplerClient(server.grpc, token=SECRET, certificate=authority) as client:
            assert client.sample([3], Sampling(2), draws(1))[0].tokens_T.tolist() == [0, 2]
        with (
            SamplerClient(server.grpc, certificate=authority) as client,
            refusal(grpc.StatusCode.UNAUTHENTICATED, "token"),
        ):
            client.health()
        with SamplerClient(server.grpc) as client, refusal(grpc.StatusCode.UNAVAILABLE, ""):
            client.health()  # plain text to a TLS port


def test_a_client_keeps_its_token_off_plain_connections():
    with pytest.raises(UserError, match="unencrypted"):
        SamplerClient("example.org:9000", token=SECRET)


@pytest.mark.parametrize("which", ["grpc", "http"])
def test_a_taken_port_is_one_clear_error(which):
    """Also where another server of ours has it, and the operating system would let both listen."""
    with up(ScriptedScheduler()) as first, SamplerService(ScriptedScheduler()) as service:
        ports = {"grpc_port": 0, "http_port": 0} | {f"{which}_port": getattr(first.ports, which)}
        served = Served(service, TOKENIZER, "none", "tiny", max_choices=4)
        with pytest.raises(UserError, match="cannot listen on 127"), serving(served, OPEN, max_calls=4, **ports):
            pass
