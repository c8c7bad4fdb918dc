"""Publish and subscribe of weight versions inside one process."""

import threading

from jaxrl_llm.types import PolicyWeights


class WeightBoard:
    """Holds the newest version only: a sampler that falls behind gets the newest, not a queue of old ones.

    Publisher and subscriber may live in different threads. Params must already be the subscriber's own copy (its
    dtype, its devices): the trainer donates its buffers to the next step.
    """

    def __init__(self):
        self._newest: PolicyWeights | None = None
        self._changed = threading.Condition()
        self._woken = False

    def publish(self, weights: PolicyWeights) -> None:
        """Raises ValueError unless versions strictly increase."""
        with self._changed:
            if self._newest is not None and weights.version <= self._newest.version:
                raise ValueError(f"version {weights.version} published after version {self._newest.version}")
            self._newest = weights
            self._changed.notify_all()

    def newer_than(self, version: int) -> PolicyWeights | None:
        """The newest weights if they are newer than `version`, at once."""
        with self._changed:
            return self._newest if self._newest is not None and self._newest.version > version else None

    def wait_newer_than(self, version: int) -> PolicyWeights | None:
        """Block until there are newer weights, or `wake` is called (then None)."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken or (self._newest and self._newest.version > version))
            return self._newest if self._newest is not None and self._newest.version > version else None

    def wake(self) -> None:
        """Release every waiter for good: the run is ending."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()
