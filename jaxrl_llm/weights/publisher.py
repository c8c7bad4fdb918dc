"""From a version on the trainer's devices to a snapshot on the host, beside the next training step."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from jaxrl_llm.types import Params, PolicyWeights
from jaxrl_llm.weights.snapshot import Snapshot, device_leaves, named, take_snapshot


class Publisher:
    """A thread that takes the newest weights it was given, never one in between, and hands on their snapshot.

    `to_host` yields a tree's leaves by name on the host. If it `lends`, snapshots keep the devices' arrays too. What it
    is given must be nobody else's to donate.
    """

    def __init__(
        self,
        hand_on: Callable[[Snapshot], None],
        fail: Callable[[BaseException], None],
        *,
        to_host: Callable[[Params], Iterable[tuple[str, np.ndarray]]] = named,
        lends: bool = False,
    ):
        self._hand_on, self._fail, self._to_host, self._lends = hand_on, fail, to_host, lends
        self._newest: PolicyWeights | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """After the snapshot at work."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def publish(self, weights: PolicyWeights) -> None:
        """Returns at once. A version that has not been begun yet is forgotten for this one."""
        with self._changed:
            self._newest = weights
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._newest is not None)
                    weights, self._newest = self._newest, None
                    if self._stopping:
                        return
                assert weights is not None
                snapshot = take_snapshot(weights.version, self._to_host(weights.params))
                self._hand_on(replace(snapshot, on_device=device_leaves(weights.params)) if self._lends else snapshot)
        except BaseException as error:
            self._fail(error)
