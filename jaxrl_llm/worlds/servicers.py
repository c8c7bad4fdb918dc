"""The gRPC services of the worlds: World and Sampler of a sampler, Weights of whoever has some."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, NoReturn

import grpc

from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.service import SamplerClosedError
from jaxrl_llm.sampler.serving.rl_grpc import SamplerServicer
from jaxrl_llm.sampler.serving.weights_stream import snapshot_chunks
from jaxrl_llm.types import UserError
from jaxrl_llm.weights.snapshot import Snapshot
from jaxrl_llm.weights.transfer import Lender
from jaxrl_llm.worlds.borrowing import lend_response
from jaxrl_llm.worlds.sampler_world import NoSessionError, SamplerWorld
from jaxrl_llm.worlds.shelf import Shelf


class WorldServicer:
    """What a trainer asks of a SamplerWorld."""

    def __init__(self, world: SamplerWorld):
        self._world = world

    async def Attach(self, request: rl_pb2.AttachRequest, context: grpc.aio.ServicerContext) -> rl_pb2.AttachResponse:
        return await self._world.attach(request)

    async def Offer(self, request: rl_pb2.OfferRequest, context: grpc.aio.ServicerContext) -> rl_pb2.OfferResponse:
        return await _answered(self._world.offer(request), context)

    async def Commit(self, request: rl_pb2.CommitRequest, context: grpc.aio.ServicerContext) -> rl_pb2.CommitResponse:
        return await _answered(self._world.commit(request), context)

    async def Heartbeat(
        self, request: rl_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> rl_pb2.HeartbeatResponse:
        async def beat() -> rl_pb2.HeartbeatResponse:
            return self._world.heartbeat(request)

        return await _answered(beat(), context)

    async def Detach(self, request: rl_pb2.DetachRequest, context: grpc.aio.ServicerContext) -> rl_pb2.DetachResponse:
        return await _answered(self._world.detach(request), context)


class WorldSamplerServicer(SamplerServicer):
    """Sampling alone: weights and pauses are the trainer's affair."""

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[rl_pb2.WeightsChunk], context: grpc.aio.ServicerContext
    ) -> NoReturn:
        await self._not_here(context)

    async def Pause(self, request: rl_pb2.PauseRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._not_here(context)

    async def Resume(self, request: rl_pb2.ResumeRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._not_here(context)

    async def Drain(self, request: rl_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._not_here(context)

    async def _not_here(self, context: grpc.aio.ServicerContext) -> NoReturn:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION, "this sampler is part of a training run, which alone steers it"
        )
        raise AssertionError("abort raises")


class WeightsServicer:
    """Snapshots to those who pull them; with a `lender` also from device to device."""

    def __init__(self, shelf: Shelf, lender: Lender | None = None):
        self._shelf, self._lender = shelf, lender

    async def Pull(
        self, request: rl_pb2.PullRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rl_pb2.WeightsChunk]:
        chunks = snapshot_chunks(await self._find(request, context))
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk

    async def Lend(self, request: rl_pb2.PullRequest, context: grpc.aio.ServicerContext) -> rl_pb2.LendResponse:
        snapshot = await self._find(request, context)
        if self._lender is None or snapshot.on_device is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this world lends nothing")
            raise AssertionError("abort raises")
        try:
            loan = self._lender.lend(snapshot.on_device)
        except UserError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise AssertionError("abort raises") from None
        return lend_response(self._lender.address, loan)

    async def Return(self, request: rl_pb2.ReturnRequest, context: grpc.aio.ServicerContext) -> rl_pb2.ReturnResponse:
        if request.failed and self._lender is not None:
            self._lender.failed()
        return rl_pb2.ReturnResponse()

    async def _find(self, request: rl_pb2.PullRequest, context: grpc.aio.ServicerContext) -> Snapshot:
        snapshot = self._shelf.get(request.version, request.digest)
        if snapshot is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"version {request.version} is not here (any more)")
            raise AssertionError("abort raises")
        return snapshot


async def _answered(answer: Awaitable[Any], context: grpc.aio.ServicerContext) -> Any:
    codes: dict[type[Exception], grpc.StatusCode] = {
        NoSessionError: grpc.StatusCode.FAILED_PRECONDITION,
        SamplerClosedError: grpc.StatusCode.UNAVAILABLE,
    }
    try:
        return await answer
    except tuple(codes) as error:
        await context.abort(codes[type(error)], str(error))
