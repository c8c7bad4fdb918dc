"""Who fetches a version from whom: whoever has it serves the next, so that the trainer sends it a few times only."""

from collections import Counter
from collections.abc import Collection


class FanOut:
    """A tree that grows as it is asked: `root` has every version, `width` fetch from one place at a time.

    With n samplers and equal speeds the last one has a version after about log(n) / log(1 + width) rounds.
    """

    def __init__(self, root: str, width: int):
        self._root, self._width = root, width
        self._has: dict[str, int] = {}
        self._serving: Counter[str] = Counter()

    def ready(self, place: str, version: int) -> None:
        """`place` can serve this version, and no older one, from now on."""
        self._has[place] = version

    def gone(self, place: str) -> None:
        """`place` serves nobody any more."""
        self._has.pop(place, None)

    def begin(self, version: int, receiver: str, avoid: Collection[str] = ()) -> str | None:
        """Where `receiver` fetches the version from: the place that serves fewest, others before the root; None while
        all are busy. `end` must follow."""
        able = [place for place, has in self._has.items() if has == version and place not in (receiver, *avoid)]
        free = [place for place in (*able, self._root) if self._serving[place] < self._width]
        if not free:
            return None
        source = min(free, key=lambda place: self._serving[place])
        self._serving[source] += 1
        return source

    def end(self, source: str) -> None:
        """What `begin` returned has been fetched, or never will be."""
        self._serving[source] -= 1
