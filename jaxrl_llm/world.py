"""The processes of one run: what they tell each other on the host, and errors of one that reach all."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.types import RunFailedError, UserError

# For as long as loading large weights may take; a process that has died is noticed by JAX's heartbeats long before.
_PATIENCE_S = 3600


class World:
    """Process `index` of the `count` that run one trainer; alone unless told otherwise.

    `store` is the key-value client of `jax.distributed`, which needs no device and no compilation. Every process must
    call `gather` and `together` in the same order.
    """

    def __init__(self, index: int = 0, count: int = 1, store: Any = None):
        self.index, self.count, self._store = index, count, store
        self._exchanges = itertools.count(1)

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
        return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))
