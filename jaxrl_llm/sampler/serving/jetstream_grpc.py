"""JetStream's own Orchestrator service in front of a SamplerService, for JetStream's stock clients.

As JetStream's server does: text answers come with their token ids, token requests are answered by token ids alone, and
the token that ends a completion is not sent. Other than it: a begin-of-sequence token is put before text only if the
tokenizer asks for it and never before tokens, decoding is greedy, and the session cache is refused.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from jaxrl_llm.sampler.service import SamplerClosedError, SamplerService
from jaxrl_llm.sampler.serving.rl_grpc import refuse
from jaxrl_llm.text.chat import render_prompt_ids
from jaxrl_llm.text.incremental import IncrementalDecoder
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import QueueFullError, SampleRequest, Sampling, UserError


def add_orchestrator(
    protocol: tuple[Any, Any], service: SamplerService, tokenizer: Tokenizer, server: grpc.aio.Server
) -> None:
    """Add the Orchestrator service to a server; `protocol` comes from `jetstream.orchestrator_protocol`."""
    messages, services = protocol

    class Orchestrator(services.OrchestratorServicer):
        async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            decoder = IncrementalDecoder(tokenizer.decode) if request.WhichOneof("content") == "text_content" else None
            reply = None
            try:
                reply = service.submit([_request(request, tokenizer)])
                async for _, delta in reply:
                    ids = delta.tokens_T.tolist()
                    if delta.finish == "stop":
                        ids = ids[:-1]
                    text = decoder.add(ids, last=delta.finish is not None) if decoder else ""
                    if ids or text:
                        sample = messages.DecodeResponse.StreamContent.Sample(text=text, token_ids=ids)
                        yield messages.DecodeResponse(
                            stream_content=messages.DecodeResponse.StreamContent(samples=[sample])
                        )
            except (UserError, QueueFullError, SamplerClosedError) as error:
                await refuse(context, error)
            finally:
                if reply is not None:
                    reply.close()

        async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
            return messages.HealthCheckResponse(is_live=service.health.ready)

    services.add_OrchestratorServicer_to_server(Orchestrator(), server)


def _request(request: Any, tokenizer: Tokenizer) -> SampleRequest:
    if request.session_cache:
        raise UserError("session_cache is set, but this server keeps no sessions; send the whole prompt")
    match request.WhichOneof("content"):
        case "text_content":
            prompt = render_prompt_ids(tokenizer, request.text_content.text, "none")
        case "token_content":
            prompt = list(request.token_content.token_ids)
        case _:
            raise UserError("the request has neither text_content nor token_content")
    return SampleRequest(np.array(prompt, np.int32), Sampling(max(request.max_tokens, 0), temperature=0.0))
