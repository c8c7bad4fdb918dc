"""The processes of one run: what they tell each other on the host, and errors of one that reach all."""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.types import RunFailedError, UserError

# For as long as loading large weights may take; a process that has died is noticed by JAX's heartbeats long before.
_PATIENCE_S = 3600
# How often one that waits for the first process looks for a signal of its own.
_POLL_MS = 500


class World:
    """Process `index` of the `count` that run one trainer; alone unless told otherwise.

    `store` is the key-value client of `jax.distributed`, which needs no device and no compilation. Every process must
    call `gather` and `together` in the same order.
    """

    def __init__(self, index: int = 0, count: int = 1, store: Any = None):
        self.index, self.count, self._store = index, count, store
        self._exchanges, self._announced = itertools.count(1), 0

    @property
    def first(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.index == 0

    def gather(self, what: str, text: str) -> list[str]:
        """The texts that all processes gave, in their order; `what` is named in errors.

        Raises RunFailedError if some process does not come.
        """
        if self.count == 1:
            return [text]
        number = next(self._exchanges)
        try:
            self._store.key_value_set(f"jaxrl/{number}/{self.index}", text)
            self._store.wait_at_barrier(f"jaxrl/{number}", _PATIENCE_S * 1000)
            if self.first and number > 1:  # everybody is here, so everybody has read what was said before
                self._store.key_value_delete(f"jaxrl/{number - 1}/")
            told = {int(key.rpartition("/")[2]): t for key, t in self._store.key_value_dir_get(f"jaxrl/{number}/")}
        except jax.errors.JaxRuntimeError as error:
            raise RunFailedError(f"{what}: the other processes did not answer ({str(error).splitlines()[0]})") from None
        return [told[index] for index in range(self.count)]

    @contextmanager
    def together(self, what: str, *kinds: type[Exception]) -> Iterator[None]:
        """A part that all processes do or none: an error in one of them is raised in all of them.

        What is neither UserError nor one of `kinds` reaches the others as RunFailedError.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if self.count > 1:
            classes = (UserError, *kinds, Exception)
            mine = ""
            if failure is not None:
                kind = next(i for i, each in enumerate(classes) if isinstance(failure, each))
                mine = json.dumps([kind, f"{failure}" if kind < len(classes) - 1 else f"{failure!r}"])
            for index, text in enumerate(self.gather(what, mine)):
                if text and failure is None:
                    kind, message = json.loads(text)
                    raise (*classes[:-1], RunFailedError)[kind](f"process {index}: {message}")
        if failure is not None:
            raise failure

    def any_process(self, flag: bool) -> bool:
        """Whether `flag` is true in any process: the same answer in all of them, through their devices."""
        if self.count == 1:
            return flag
        found = bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))
        if self.first and self._announced:  # everybody has answered, so everybody has heard what was said before
            self._store.key_value_delete("jaxrl/said/")
        return found

    def announce(self, text: str) -> None:
        """The first process says something to all others, which take it from `hear`; it does not wait for them."""
        if self.count > 1:
            self._announced += 1
            self._store.key_value_set(f"jaxrl/said/{self._announced}", text)

    def hear(self) -> str:
        """What the first process says next, for as long as that may take.

        Raises RunFailedError if it cannot be asked any more.
        """
        self._announced += 1
        while True:
            try:
                return self._store.blocking_key_value_get(f"jaxrl/said/{self._announced}", _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise RunFailedError(f"process 0 does not answer ({str(error).splitlines()[0]})") from None

    def from_first(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The first process's arrays, bit for bit, in all processes, through their devices.

        The others give arrays of the same shapes and types (int32 or float32), whatever they hold.
        """
        if self.count == 1:
            return list(arrays)
        # One program and one exchange for all of them, whatever the numbers mean.
        flat = np.concatenate([np.ascontiguousarray(array).view(np.uint32).ravel() for array in arrays])
        told = np.asarray(multihost_utils.broadcast_one_to_all(flat, is_source=self.first))
        parts = np.split(told, np.cumsum([array.size for array in arrays])[:-1])
        return [part.view(array.dtype).reshape(np.shape(array)) for part, array in zip(parts, arrays, strict=True)]
