"""Fetching a version's weights from whoever has them."""

import asyncio
from collections.abc import Mapping

import grpc

from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.serving.weights_stream import WeightsAssembly
from jaxrl_llm.sampler.wire_form import LeafShape
from jaxrl_llm.types import UserError
from jaxrl_llm.weights.snapshot import Snapshot
from jaxrl_llm.worlds.dialling import Credentials, why


async def pull(
    credentials: Credentials,
    source: str,
    version: int,
    digest: str,
    shapes: Mapping[str, LeafShape],
    *,
    patience_s: float,
) -> Snapshot:
    """The snapshot of this version and digest from the Weights service at `source`, in chunks.

    Raises UserError if what comes is not that, if it ends early, or if nothing comes for `patience_s` seconds.
    """
    channel = credentials.channel(source)
    try:
        call = credentials.calls(channel, "Weights")
        stream = call("Pull", rl_pb2.PullRequest(version=version, digest=digest))
        assembly = WeightsAssembly(shapes)
        while True:
            chunk = await asyncio.wait_for(stream.read(), patience_s)
            if chunk is grpc.aio.EOF:
                break
            await asyncio.to_thread(assembly.add, chunk)
        snapshot = await asyncio.to_thread(assembly.snapshot)
    except TimeoutError:
        raise UserError(f"{source} sent nothing of version {version} for {patience_s:g} s") from None
    except grpc.RpcError as error:
        raise UserError(f"pulling version {version} from {source} failed: {why(error)}") from None
    finally:
        await channel.close()
    check(snapshot, version, digest, source)
    return snapshot


def check(snapshot: Snapshot, version: int, digest: str, source: str) -> None:
    """Raises UserError unless the snapshot is what was offered."""
    if (snapshot.version, snapshot.digest) != (version, digest):
        raise UserError(
            f"{source} sent version {snapshot.version} with digest {snapshot.digest[:12]}; version {version} with "
            f"{digest[:12]} was offered"
        )
