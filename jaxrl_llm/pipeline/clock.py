"""Virtual time."""

import heapq
from collections.abc import Callable


class Clock:
    """Runs what is due, in the order of its time and then of its asking. `now` is in seconds."""

    def __init__(self):
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + max(0.0, delay_s), self._asked, do))
        self._asked += 1

    def step(self) -> bool:
        """Do the next thing; False if there is none."""
        if not self._due:
            return False
        self.now, _, do = heapq.heappop(self._due)
        self.events += 1
        do()
        return True
