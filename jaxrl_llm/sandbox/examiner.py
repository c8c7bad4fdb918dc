"""Programs in, verdicts out: the sandbox as rewards see it."""

from collections.abc import Sequence

from jaxrl_llm.sandbox.checks import Examination, ProgramTests, Verdict
from jaxrl_llm.sandbox.languages import LANGUAGES
from jaxrl_llm.sandbox.run import JailError
from jaxrl_llm.sandbox.service import SandboxService
from jaxrl_llm.types import UserError


class Examiner(SandboxService):
    """Runs programs against tests between `start` and `close`; `workers` programs at once, from any thread."""

    def __call__(self, tests: str, programs: Sequence[str]) -> list[Verdict | str]:
        """What became of each program before `tests` (see ProgramTests.parse), or why nobody knows. Equal programs run
        once, and each different one in a jail of its own.

        Raises ValueError for tests that make no sense.
        """
        parsed = ProgramTests.parse(tests)
        exams = {program: Examination(parsed, program) for program in programs}
        running = {program: [self._pool.submit(job) for job in exam.jobs] for program, exam in exams.items()}
        found: dict[str, Verdict | str] = {}
        for program, exam in exams.items():
            try:
                found[program] = exam.verdict([future.result() for future in running[program]])
            except JailError as error:
                found[program] = f"code: {error}"
        return [found[program] for program in programs]


def check_tests(text: str) -> None:
    """Raises UserError unless `text` are tests in a language that this machine can run."""
    try:
        parsed = ProgramTests.parse(text)
    except ValueError as error:
        raise UserError(str(error)) from None
    if missing := LANGUAGES[parsed.language].missing():
        raise UserError(f"programs in {parsed.language} need {' and '.join(missing)}, which this machine does not have")
