"""The newest weights, and who fetches them from whom."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.weights.fan_out import FanOut
from jaxrl_llm.weights.snapshot import Snapshot
from jaxrl_llm.worlds.shelf import Shelf


@dataclass
class Pushes:
    """Totals since the last report, and the slowest; `detours` went to the trainer, since another sampler could not
    serve them."""

    count: int = 0
    bytes: int = 0
    pull_s: float = 0.0
    load_s: float = 0.0
    detours: int = 0


class Distribution:
    """`put` may be called from any thread; all else belongs to the event loop `loop`. `root` is where the trainer
    itself serves weights."""

    def __init__(self, shelf: Shelf, root: str, width: int, loop: asyncio.AbstractEventLoop):
        self.root = root
        self._shelf, self._fan_out, self._loop = shelf, FanOut(root, width), loop
        self._newest: Snapshot | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._lock = threading.Lock()
        self._pushes = Pushes()

    def put(self, snapshot: Snapshot) -> None:
        """There is a newer version; whoever asks from now on gets that one."""
        self._shelf.put(snapshot)
        self._loop.call_soon_threadsafe(self._set, snapshot)

    def _set(self, snapshot: Snapshot) -> None:
        self._newest = snapshot
        self._wake()

    async def newer_than(self, version: int) -> Snapshot:
        """The newest weights, once they are newer than `version`."""
        while self._newest is None or self._newest.version <= version:
            await self._change()
        return self._newest

    @contextlib.asynccontextmanager
    async def source(self, snapshot: Snapshot, receiver: str, avoid: Collection[str]) -> AsyncIterator[str]:
        """Where `receiver` is to fetch the version from, once there is a free place."""
        with self._shelf.keeping(snapshot):
            while (source := self._fan_out.begin(snapshot.version, receiver, avoid)) is None:
                await self._change()
            try:
                yield source
            finally:
                self._fan_out.end(source)
                self._wake()

    def ready(self, place: str, version: int) -> None:
        """See FanOut.ready."""
        self._fan_out.ready(place, version)
        self._wake()

    def gone(self, place: str) -> None:
        """See FanOut.gone."""
        self._fan_out.gone(place)

    def pushed(self, response: rl_pb2.OfferResponse) -> None:
        """A push has been acknowledged."""
        with self._lock:
            self._pushes.count += 1
            self._pushes.bytes += response.bytes
            self._pushes.pull_s = max(self._pushes.pull_s, response.pull_s)
            self._pushes.load_s = max(self._pushes.load_s, response.load_s)

    def detour(self) -> None:
        """A sampler could not serve another one."""
        with self._lock:
            self._pushes.detours += 1

    def take_pushes(self) -> Pushes:
        """Since the last call; from any thread."""
        with self._lock:
            pushes, self._pushes = self._pushes, Pushes()
            return pushes

    async def _change(self) -> None:
        changed = self._loop.create_future()
        self._waiting.append(changed)
        await changed

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)
