"""`jaxrl serve`: a policy's scheduler behind gRPC and HTTP until a signal comes."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass

from jaxrl_llm.cli.console import ablations
from jaxrl_llm.cli.policy import Policy
from jaxrl_llm.sampler.service import SamplerService
from jaxrl_llm.sampler.serving.access import Access
from jaxrl_llm.sampler.serving.http_app import Served
from jaxrl_llm.sampler.serving.server import Ports, serving
from jaxrl_llm.types import RunFailedError

_LOOK_S, _START_LOOK_S = 1.0, 0.1  # between two looks at the sampler's health


@dataclass(frozen=True)
class ServeOptions:
    """`max_queue` bounds waiting completions, `max_calls` open calls of each server; port 0 takes a free one."""

    name: str
    grpc_port: int
    http_port: int
    max_queue: int
    max_calls: int


def serve_policy(policy: Policy, access: Access, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; ready once every program is compiled.

    Raises RunFailedError if the sampler fails on the way.
    """
    setup = policy.setup
    service = SamplerService(policy.scheduler(max_queue=options.max_queue), warm_up=True)
    served = Served(
        service, setup.tokenizer, setup.config.tokenizer.chat_template, options.name, max_choices=options.max_queue
    )
    with stop_signals() as stop, service:
        say(f"sampling with {policy.origin} (version {policy.version})")
        for words in ablations(policy.setup.config.model):
            say(words)
        ports = {"grpc_port": options.grpc_port, "http_port": options.http_port}
        with serving(served, access, **ports, max_calls=options.max_calls) as listening:
            say("compiling: /health answers 503 until that is done")
            while not service.started.done():
                if stop.wait(_START_LOOK_S):
                    break
            if service.health.ready:
                for line in _lines(listening, access, options.name):
                    say(line)
            while service.health.live and not stop.wait(_LOOK_S):
                pass
            say("stopping: open calls have a few seconds to finish")
        if (error := service.health.error) is not None:
            raise RunFailedError(error)


def _lines(ports: Ports, access: Access, name: str) -> list[str]:
    scheme = "https" if access.tls else "http"
    guard = f"{'TLS' if access.tls else 'no TLS'}, {'a token is asked for' if access.token else 'no token'}"
    services = "jaxrl_llm.sampler.v1.Sampler" + (" and jetstream_proto.Orchestrator" if ports.jetstream else "")
    lines = [
        f"gRPC on {access.host}:{ports.grpc} ({services}; {guard})",
        f"OpenAI-compatible HTTP on {scheme}://{access.host}:{ports.http}/v1 (model {name!r}; {guard})",
    ]
    if not ports.jetstream:
        lines.append("JetStream's own service is absent: google-jetstream is not installed")
    return lines


@contextlib.contextmanager
def stop_signals() -> Generator[threading.Event]:
    """SIGINT and SIGTERM set the event; a second one stops at once."""
    asked = threading.Event()

    def handle(*_) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
