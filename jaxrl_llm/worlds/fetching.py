"""How a sampler fetches what it was offered: from device to device if the trainer asks for it, else in chunks."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.wire_form import LeafShape
from jaxrl_llm.types import UserError
from jaxrl_llm.weights.snapshot import Snapshot
from jaxrl_llm.weights.transfer import Borrower
from jaxrl_llm.worlds.borrowing import borrow
from jaxrl_llm.worlds.dialling import Credentials
from jaxrl_llm.worlds.pulling import pull


@dataclass(frozen=True)
class Fetched:
    """A snapshot; `fallback` says why it did not come from device to device, if that was asked for."""

    snapshot: Snapshot
    fallback: str = ""


class Fetcher:
    """Fetches snapshots whose leaves are `shapes`. A place that failed to lend is not asked to again."""

    def __init__(self, credentials: Credentials, shapes: Mapping[str, LeafShape], borrower: Borrower | None = None):
        self._credentials, self._shapes, self._borrower = credentials, shapes, borrower
        self._no_lenders: dict[str, str] = {}

    async def __call__(self, offer: rl_pb2.OfferRequest) -> Fetched:
        """Raises UserError if it cannot be had."""
        what = offer.source, offer.version, offer.digest, self._shapes
        fallback = ""
        if offer.transfer:
            fallback = self._no_lenders.get(offer.source, "")
            if self._borrower is None:
                fallback = "this sampler's sampler.remote.transfer is off"
            elif not fallback:
                try:
                    return Fetched(await borrow(self._credentials, self._borrower, *what, patience_s=offer.patience_s))
                except UserError as error:
                    fallback = self._no_lenders[offer.source] = str(error)
        return Fetched(await pull(self._credentials, *what, patience_s=offer.patience_s), fallback)
