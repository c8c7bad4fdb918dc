"""The snapshots that others may pull from this world."""

import contextlib
import threading
from collections.abc import Generator

from jaxrl_llm.weights.snapshot import Snapshot

_KEPT = 2  # the newest, and the one before it for those who are in the middle of it


class Shelf:
    """Holds the newest two snapshots, and those that somebody is about to be sent; any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._snapshots: list[Snapshot] = []
        self._wanted: list[Snapshot] = []

    def put(self, snapshot: Snapshot) -> None:
        with self._lock:
            others = [s for s in self._snapshots if s.version != snapshot.version]
            self._snapshots = [*others, snapshot][-_KEPT:]

    def get(self, version: int, digest: str) -> Snapshot | None:
        with self._lock:
            return next(
                (s for s in [*self._snapshots, *self._wanted] if (s.version, s.digest) == (version, digest)), None
            )

    @contextlib.contextmanager
    def keeping(self, snapshot: Snapshot) -> Generator[None]:
        """Whatever newer ones come, this one stays until the end of the block."""
        with self._lock:
            self._wanted.append(snapshot)
        try:
            yield
        finally:
            with self._lock:
                self._wanted.remove(snapshot)

    def clear(self) -> None:
        with self._lock:
            self._snapshots = []
