"""A sandbox that is attacked before it opens, for whoever runs programs in it."""

from jaxrl_llm.sandbox.jail import find_jail
from jaxrl_llm.sandbox.limits import Limits
from jaxrl_llm.sandbox.pool import SandboxPool
from jaxrl_llm.sandbox.self_test import self_test


class SandboxService:
    """Open between `start` and `close`; `workers` programs at once, from any thread."""

    def __init__(self, limits: Limits, *, workers: int):
        self._limits, self._workers = limits, workers
        self._opened: SandboxPool | None = None

    def start(self) -> None:
        """Attack the jail, then open the pool. Raises UserError where the sandbox does not hold or cannot be had."""
        jail = find_jail()
        self_test(jail)
        self._opened = SandboxPool(jail, self._limits, workers=self._workers)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _pool(self) -> SandboxPool:
        if self._opened is None:
            raise RuntimeError("the sandbox is not open: call start() first")
        return self._opened
