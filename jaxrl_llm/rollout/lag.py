"""The lag bound by counting (PipelineRL-k).

A prompt group holds a slot from admission until the sampler holds the weights trained on it, and there are
(max_lag + 1) * prompts_per_step slots. Groups are trained in issue order, P to a step, so group g is trained at
version floor(g / P); it was admitted when at least g + 1 - (k + 1) P groups had been released, that is under a version
of at least floor(g / P) - k. Its tokens are therefore at most k versions old. Dropping a group only releases earlier.
"""

import threading


class LagSlots:
    """Counts admitted groups; safe to use from the sampling and the training thread."""

    def __init__(self, *, max_lag: int, prompts_per_step: int):
        self._capacity = self._free = (max_lag + 1) * prompts_per_step
        self._trained: dict[int, int] = {}  # version -> groups that went into it and still hold their slots
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        with self._lock:
            return self._free

    def admit(self) -> None:
        with self._lock:
            if self._free == 0:
                raise RuntimeError("no free slot: wait for release() before admitting a prompt group")
            self._free -= 1

    def trained(self, version: int, groups: int) -> None:
        """`groups` admitted groups were used up by the step that makes `version`."""
        with self._lock:
            self._trained[version] = self._trained.get(version, 0) + groups

    def release(self, version: int) -> None:
        """The sampler now holds `version`: every group trained into it or into an older one frees its slot."""
        with self._lock:
            groups = sum(self._trained.pop(v) for v in sorted(self._trained) if v <= version)
            if self._free + groups > self._capacity:
                raise RuntimeError(f"released {groups} groups with only {self._capacity - self._free} admitted")
            self._free += groups
