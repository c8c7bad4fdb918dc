"""Cutting a growing text at a stop string without ever showing part of one."""

from collections.abc import Sequence


class StopStringFilter:
    """Cuts a growing text before the first stop string, and keeps back what may turn out to begin one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self._done = False

    def add(self, text: str, *, last: bool = False) -> str:
        """The part of the text that may be shown; nothing any more once a stop string came."""
        if self._done:
            return ""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._done, self._held = True, ""
            return text[: min(found)]
        kept = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        shown = text[: len(text) - kept]
        self._held = text[len(shown) :]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
