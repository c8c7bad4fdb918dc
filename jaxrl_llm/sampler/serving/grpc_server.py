"""The gRPC server: its limits, its address, its token, and the services on it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from jaxrl_llm.sampler.jetstream import orchestrator_protocol
from jaxrl_llm.sampler.proto import MESSAGE_BYTES
from jaxrl_llm.sampler.proto.methods import HANDLER_OF_KIND, add_servicer
from jaxrl_llm.sampler.service import SamplerService
from jaxrl_llm.sampler.serving.access import Access, Token
from jaxrl_llm.sampler.serving.jetstream_grpc import add_orchestrator
from jaxrl_llm.sampler.serving.rl_grpc import SamplerServicer
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import UserError


@dataclass(frozen=True)
class GrpcServer:
    """A started server. `jetstream` says whether JetStream's own service is on it."""

    server: grpc.aio.Server
    port: int
    jetstream: bool


async def start_grpc(
    service: SamplerService, tokenizer: Tokenizer, access: Access, *, port: int, max_calls: int
) -> GrpcServer:
    """Start serving in the running event loop; at most `max_calls` calls at a time, others get RESOURCE_EXHAUSTED.

    Port 0 takes a free one. Raises UserError if the port cannot be had.
    """
    protocol = orchestrator_protocol()

    def add(server: grpc.aio.Server) -> None:
        add_servicer(SamplerServicer(lambda: service), server)
        if protocol is not None:
            add_orchestrator(protocol, service, tokenizer, server)

    server, bound = await start_server(add, access, port=port, max_calls=max_calls)
    return GrpcServer(server, bound, protocol is not None)


async def start_server(
    add: Callable[[grpc.aio.Server], None],
    access: Access,
    *,
    port: int,
    max_calls: int,
    on_refused: Callable[[str], None] = lambda peer: None,
) -> tuple[grpc.aio.Server, int]:
    """A server with the services that `add` puts on it, started in the running event loop, and its port.

    `on_refused(peer)` hears of calls without the token. Port 0 takes a free one. Raises UserError if the port cannot
    be had.
    """
    server = grpc.aio.server(
        interceptors=[_Bearer(access.token, on_refused)] if access.token else [],
        maximum_concurrent_rpcs=max_calls,
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),  # a second server on one port would silently take half of the calls
        ],
    )
    add(server)
    host = f"[{access.host}]" if ":" in access.host else access.host
    address = f"{host}:{port}"
    try:
        if access.tls is None:
            bound = server.add_insecure_port(address)
        else:
            pair = (access.tls.key.read_bytes(), access.tls.certificate.read_bytes())
            bound = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except RuntimeError:
        raise UserError(f"cannot listen on {address} for gRPC; is the port taken? choose another --port") from None
    await server.start()
    return server, bound


class _Bearer(grpc.aio.ServerInterceptor):
    """Refuses a call without the token before any of its messages are read."""

    def __init__(self, token: Token, on_refused: Callable[[str], None]):
        self._token, self._on_refused = token, on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata)
        if handler is None or self._token.admits(_text(metadata.get("authorization"))):
            return handler
        return _refusal(handler, self._on_refused)


def _text(value: str | bytes | None) -> str | None:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _refusal(handler: grpc.RpcMethodHandler, on_refused: Callable[[str], None]) -> grpc.RpcMethodHandler:
    """A handler of the same kind that ends every call with UNAUTHENTICATED."""

    async def one(_, context: grpc.aio.ServicerContext):
        on_refused(context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token: send 'authorization: Bearer ...'")

    async def many(_, context: grpc.aio.ServicerContext):
        await one(_, context)
        yield

    make = HANDLER_OF_KIND[handler.request_streaming, handler.response_streaming]
    return make(
        many if handler.response_streaming else one,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
