"""Our own gRPC service in front of a SamplerService: rl.proto."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

import grpc
import numpy as np

from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.reply import Delta
from jaxrl_llm.sampler.service import SamplerClosedError, SamplerService
from jaxrl_llm.sampler.serving.weights_stream import WeightsAssembly
from jaxrl_llm.types import QueueFullError, SampleRequest, Sampling, ThinkingBudget, UserError

_CALLERS = (UserError, QueueFullError, SamplerClosedError)

_FINISHES = {
    "stop": rl_pb2.FINISH_STOP,
    "stop_string": rl_pb2.FINISH_STOP_STRING,
    "length": rl_pb2.FINISH_LENGTH,
    "repetition": rl_pb2.FINISH_REPETITION,
    "aborted": rl_pb2.FINISH_ABORTED,
    None: rl_pb2.FINISH_RUNNING,
}


async def refuse(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """End a call with the status that says whose fault it was."""
    codes: dict[type[Exception], grpc.StatusCode] = {
        UserError: grpc.StatusCode.INVALID_ARGUMENT,
        QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    await context.abort(codes.get(type(error), grpc.StatusCode.UNAVAILABLE), str(error))
    raise AssertionError("abort raises")


class SamplerServicer:
    """Every method of rl.proto's Sampler; errors of one call end that call alone.

    `service` is asked for at every call, and may raise SamplerClosedError while there is none.
    """

    def __init__(self, service: Callable[[], SamplerService]):
        self._service = service
        self._updating = asyncio.Lock()

    async def _here(self, context: grpc.aio.ServicerContext) -> SamplerService:
        try:
            return self._service()
        except SamplerClosedError as error:
            await refuse(context, error)

    async def Sample(
        self, request: rl_pb2.SampleRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rl_pb2.Piece]:
        service = await self._here(context)
        reply = service.submit(_requests(request), stream=not request.whole)
        try:
            ids = await asyncio.wrap_future(reply.accepted)
            for index, (id, draw) in enumerate(zip(ids, request.draws, strict=True)):
                yield rl_pb2.Piece(draw=index, ledger_id=draw.ledger_id, request_id=id)
            async for index, delta in reply:
                yield _piece(index, request.draws[index].ledger_id, ids[index], delta)
        except _CALLERS as error:
            await refuse(context, error)
        finally:
            reply.close()

    async def Abort(self, request: rl_pb2.AbortRequest, context: grpc.aio.ServicerContext) -> rl_pb2.AbortResponse:
        service = await self._here(context)
        try:
            aborted, finished = await asyncio.wrap_future(service.abort(request.request_ids))
        except _CALLERS as error:
            await refuse(context, error)
        return rl_pb2.AbortResponse(aborted=aborted, finished=finished)

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[rl_pb2.WeightsChunk], context: grpc.aio.ServicerContext
    ) -> rl_pb2.UpdateWeightsResponse:
        service = await self._here(context)
        if self._updating.locked():
            # Each call holds a model's weights on the host.
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another call is updating the weights; try again")
        async with self._updating:
            assembly = WeightsAssembly(service.engine.model)
            try:
                async for chunk in request_iterator:
                    await asyncio.to_thread(assembly.add, chunk)
                params, version = assembly.finish()
                await asyncio.to_thread(service.update_weights, params, version)
            except _CALLERS as error:
                await refuse(context, error)
            return rl_pb2.UpdateWeightsResponse(version=version)

    async def Pause(self, request: rl_pb2.PauseRequest, context: grpc.aio.ServicerContext) -> rl_pb2.PauseResponse:
        await _done((await self._here(context)).pause(), context)
        return rl_pb2.PauseResponse()

    async def Resume(self, request: rl_pb2.ResumeRequest, context: grpc.aio.ServicerContext) -> rl_pb2.ResumeResponse:
        await _done((await self._here(context)).resume(), context)
        return rl_pb2.ResumeResponse()

    async def Drain(self, request: rl_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> rl_pb2.DrainResponse:
        await _done((await self._here(context)).drain(), context)
        return rl_pb2.DrainResponse()

    async def Health(self, request: rl_pb2.HealthRequest, context: grpc.aio.ServicerContext) -> rl_pb2.HealthResponse:
        service = await self._here(context)
        health, engine = service.health, service.engine
        return rl_pb2.HealthResponse(
            state=health.state,
            version=health.version,
            in_flight=health.in_flight,
            slots=engine.slots,
            max_prompt_tokens=engine.max_prompt_tokens,
            max_new_tokens=engine.max_new_tokens,
            vocab_size=engine.model.vocab_size,
            error=health.error or "",
        )

    async def Metrics(
        self, request: rl_pb2.MetricsRequest, context: grpc.aio.ServicerContext
    ) -> rl_pb2.MetricsResponse:
        return rl_pb2.MetricsResponse(values=(await self._here(context)).metrics)


async def _done(future, context: grpc.aio.ServicerContext) -> None:
    try:
        await asyncio.wrap_future(future)
    except _CALLERS as error:
        await refuse(context, error)


def _requests(request: rl_pb2.SampleRequest) -> list[SampleRequest]:
    sampling, prompt = _sampling(request.sampling), np.array(request.prompt, np.int32)
    return [
        SampleRequest(prompt, sampling, draw.seed, draw.stream, draw.sibling, first=draw.first)
        for draw in request.draws
    ]


def _sampling(asked: rl_pb2.Sampling) -> Sampling:
    thinking = None
    if asked.HasField("thinking"):
        budget = asked.thinking
        thinking = ThinkingBudget(budget.lowest, budget.highest, budget.answer_tokens)
    return Sampling(
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature if asked.HasField("temperature") else 1.0,
        top_k=asked.top_k,
        top_p=asked.top_p if asked.HasField("top_p") else 1.0,
        min_p=asked.min_p,
        min_new_tokens=asked.min_new_tokens,
        stop_ids=tuple(asked.stop_ids),
        stop_strings=tuple(asked.stop_strings),
        banned_ids=tuple(asked.banned_ids),
        logit_bias=tuple((one.id, one.bias) for one in asked.logit_bias),
        thinking=thinking,
        repetition_limit=asked.repetition_limit,
    )


def _piece(index: int, ledger_id: str, request_id: int, delta: Delta) -> rl_pb2.Piece:
    return rl_pb2.Piece(
        draw=index,
        ledger_id=ledger_id,
        request_id=request_id,
        tokens=delta.tokens_T.tolist(),
        logprobs=delta.logprobs_T.tolist(),
        versions=delta.versions_T.tolist(),
        forced=delta.forced_T.tolist(),
        finish=_FINISHES[delta.finish],
    )
