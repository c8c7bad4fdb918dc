"""Python programs, in the sandbox: what one prints, or how it failed."""

import textwrap

from jaxrl_llm.envs.tools.protocol import ToolBrokenError
from jaxrl_llm.sandbox.languages import LANGUAGES, job
from jaxrl_llm.sandbox.limits import Outcome
from jaxrl_llm.sandbox.run import JailError
from jaxrl_llm.sandbox.service import SandboxService


class PythonTool(SandboxService):
    """Runs programs between `start` and `close`, `workers` at once; each in a jail of its own, that keeps nothing."""

    def __call__(self, asked: str) -> str:
        """What the program `asked` prints, or "error: " and the last line of what it says about its failure."""
        try:
            outcome = self._pool.submit(job(LANGUAGES["python"], textwrap.dedent(asked).strip())).result()
        except JailError as error:
            raise ToolBrokenError(f"python: {error}") from None
        return outcome.stdout.decode("utf-8", "replace") if outcome.succeeded else f"error: {self._why(outcome)}"

    def _why(self, outcome: Outcome) -> str:
        limits = self._limits
        over = {
            "time": f"it took more than {limits.wall_s:g} s",
            "memory": f"it took more than {limits.memory_bytes // 2**20} MiB",
            "output": f"it printed more than {limits.output_bytes // 2**10} KiB",
            "signalled": f"it was ended by signal {outcome.code}",
        }
        if outcome.ending in over:
            return over[outcome.ending]
        said = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
        return said[-1] if said else f"exit code {outcome.code}"
