"""Servers on loopback in front of a scripted or a real scheduler, and small clients for them."""

import contextlib
import http.client
import json
import ssl
from types import SimpleNamespace

from jaxrl_llm.sampler.service import SamplerService
from jaxrl_llm.sampler.serving.access import check_access
from jaxrl_llm.sampler.serving.http_app import Served
from jaxrl_llm.sampler.serving.server import serving
from jaxrl_llm.text.sentencepiece import build_sentencepiece

# 18 characters, an unknown and an end-of-sequence token: the 20 ids of sampler_reference.CONFIG.
TOKENIZER = build_sentencepiece(["abcdefghijklmnopq "], vocab_size=20)
OPEN = check_access("127.0.0.1", None, None, None)


@contextlib.contextmanager
def up(scheduler, access=OPEN, *, template="none", max_calls=32, tokenizer=TOKENIZER, warm_up=False):
    """(service, ports) with both servers on free ports."""
    served_by = SamplerService(scheduler, warm_up=warm_up)
    with served_by as service:
        served = Served(service, tokenizer, template, "tiny", max_choices=16)
        with serving(served, access, grpc_port=0, http_port=0, max_calls=max_calls, grace_s=1) as ports:
            yield SimpleNamespace(service=service, grpc=f"localhost:{ports.grpc}", http=ports.http, ports=ports)


def connect(port, *, certificate=None):
    if certificate is None:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    context = ssl.create_default_context(cafile=certificate)
    return http.client.HTTPSConnection("localhost", port, timeout=20, context=context)


def call(port, path, body=None, *, headers=None, certificate=None, raw=False):
    """(status, JSON or text) of one HTTP request."""
    connection = connect(port, certificate=certificate)
    with contextlib.closing(connection):
        sent = {"Content-Type": "application/json", **(headers or {})}
        payload = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, payload, sent)
        response = connection.getresponse()
        text = response.read().decode()
    return response.status, text if raw else json.loads(text)


def events(text):
    """The JSON bodies of server-sent events; the end mark must be the last one."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]
