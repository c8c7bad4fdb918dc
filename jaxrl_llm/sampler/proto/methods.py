"""The methods of rl.proto's services, read from its descriptor: handlers for a server, callables for a client."""

from collections.abc import Callable
from typing import Any, Literal

import grpc
from google.protobuf.message_factory import GetMessageClass

from jaxrl_llm.sampler.proto import rl_pb2

Service = Literal["Sampler", "World", "Weights", "Trainer"]

HANDLER_OF_KIND: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""(streams requests, streams responses) -> what makes a handler of that kind."""


def add_servicer(servicer: Any, server: grpc.aio.Server, service: Service = "Sampler") -> None:
    """Serve every method of `service` with the servicer's method of that name; AttributeError if one is missing."""
    described = rl_pb2.DESCRIPTOR.services_by_name[service]
    handlers = {
        method.name: HANDLER_OF_KIND[method.client_streaming, method.server_streaming](
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in described.methods
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(described.full_name, handlers)])


def calls(channel: grpc.Channel | grpc.aio.Channel, service: Service = "Sampler") -> dict[str, Callable[..., Any]]:
    """Every method of `service` as a callable on `channel`, by name."""
    described = rl_pb2.DESCRIPTOR.services_by_name[service]
    of_kind = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    return {
        method.name: of_kind[method.client_streaming, method.server_streaming](
            f"/{described.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        for method in described.methods
    }
