"""Fetching a version's weights from device to device, where both ends can."""

import asyncio
from collections.abc import Mapping

import grpc

from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.wire_form import LeafShape
from jaxrl_llm.types import UserError
from jaxrl_llm.weights.snapshot import Snapshot, take_snapshot
from jaxrl_llm.weights.transfer import Borrower, Loan, Part, assembled
from jaxrl_llm.worlds.dialling import Credentials, why
from jaxrl_llm.worlds.pulling import check

_CALL_S = 10.0


def lend_response(address: str, loan: Loan) -> rl_pb2.LendResponse:
    """The message of a loan."""
    parts = [rl_pb2.Part(path=part.path, shape=part.shape, start=part.start) for part in loan.parts]
    return rl_pb2.LendResponse(address=address, id=loan.id, parts=parts)


async def borrow(
    credentials: Credentials,
    borrower: Borrower,
    source: str,
    version: int,
    digest: str,
    shapes: Mapping[str, LeafShape],
    *,
    patience_s: float,
) -> Snapshot:
    """The snapshot of this version and digest, pulled from the devices of the world at `source`.

    Its leaves are `on_device` too where each came as one array. Raises UserError if it cannot be had this way.
    """
    channel = credentials.channel(source)
    call = credentials.calls(channel, "Weights")
    try:
        lent = await call("Lend", rl_pb2.PullRequest(version=version, digest=digest), timeout=_CALL_S)
        loan = Loan(lent.id, _parts(lent, shapes))
        failed = True
        try:
            pulled = await asyncio.to_thread(borrower.pull, lent.address, loan, timeout_s=patience_s)
            failed = False
        finally:
            await call("Return", rl_pb2.ReturnRequest(id=lent.id, failed=failed), timeout=_CALL_S)
    except grpc.RpcError as error:
        raise UserError(f"{source} lends nothing of version {version}: {why(error)}") from None
    finally:
        await channel.close()

    def read() -> Snapshot:
        return take_snapshot(version, ((path, assembled(shapes[path][0], parts)) for path, parts in pulled.items()))

    snapshot = await asyncio.to_thread(read)
    check(snapshot, version, digest, source)
    whole = {path: parts[0][1] for path, parts in pulled.items() if len(parts) == 1}
    return Snapshot(version, snapshot.leaves, digest, whole if len(whole) == len(pulled) else None)


def _parts(lent: rl_pb2.LendResponse, shapes: Mapping[str, LeafShape]) -> tuple[Part, ...]:
    """What will come, checked against what this model has: nothing larger is ever made room for."""
    parts = []
    for part in lent.parts:
        if part.path not in shapes:
            raise UserError(f"weights have a leaf {part.path} that this model has not")
        shape, dtype = shapes[part.path]
        ends = [start + size for start, size in zip(part.start, part.shape, strict=False)]
        if (
            len(part.shape) != len(shape)
            or len(part.start) != len(shape)
            or any(e > n for e, n in zip(ends, shape, strict=False))
        ):
            raise UserError(f"weights leaf {part.path} has a part {list(part.shape)} at {list(part.start)} of {shape}")
        parts.append(Part(part.path, tuple(part.shape), dtype, tuple(part.start)))
    if lacking := sorted(shapes.keys() - {part.path for part in parts}):
        raise UserError(f"weights lack the leaf {lacking[0]} (and {len(lacking) - 1} more) of this model")
    return tuple(parts)
