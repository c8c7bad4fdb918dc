"""A sampler's way to its trainer: it registers, and does so again whenever the trainer has fallen silent."""

import asyncio
import time
from collections.abc import Callable

import grpc

from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.types import RunFailedError, UserError
from jaxrl_llm.worlds.agreement import PROTOCOL, Facts
from jaxrl_llm.worlds.dialling import Credentials, why
from jaxrl_llm.worlds.discovery import addresses
from jaxrl_llm.worlds.sampler_world import SamplerWorld

_LOOK_S, _CALL_S = 0.5, 10.0


async def stay_registered(
    world: SamplerWorld,
    trainer: str,
    own_address: str,
    facts: Facts,
    credentials: Credentials,
    *,
    patience_s: float,
    say: Callable[[str], None],
) -> None:
    """Register with the trainer at `trainer` (see `discovery`) for as long as this sampler lives.

    Raises UserError if the trainer refuses it, and RunFailedError once there has been no trainer for `patience_s`
    seconds.
    """
    last_heard, told = time.monotonic(), ""
    while True:
        if world.silent_s == 0.0:
            last_heard, told = time.monotonic(), ""
        else:
            lacking = await _register(trainer, own_address, facts, credentials)
            alone_s = time.monotonic() - last_heard
            if lacking and alone_s > patience_s:
                raise RunFailedError(f"no trainer at {trainer} for {alone_s:.0f} s: {lacking}")
            if lacking and lacking != told:
                say(f"no trainer at {trainer} yet ({lacking}); trying again for {patience_s:g} s")
                told = lacking
        await asyncio.sleep(_LOOK_S)


async def _register(trainer: str, own_address: str, facts: Facts, credentials: Credentials) -> str:
    """Why it did not work; empty if the trainer will attach this sampler."""
    found = await addresses(trainer)
    if not found:
        return "there is no such file or name"
    lacking = ""
    for address in found:
        channel = credentials.channel(address)
        try:
            call = credentials.calls(channel, "Trainer")
            request = rl_pb2.RegisterRequest(protocol=PROTOCOL, address=own_address, facts=dict(facts))
            response = await call("Register", request, timeout=_CALL_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise UserError(f"the trainer at {address} refuses this sampler: {why(error)}") from None
            lacking = why(error)
            continue
        finally:
            await channel.close()
        if response.refusal:
            raise UserError(f"the trainer at {address} refuses this sampler: {response.refusal}")
        return ""
    return lacking
