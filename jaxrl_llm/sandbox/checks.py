"""Whether a program does what its tests ask: jobs for the sandbox, and what their outcomes mean."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_llm.sandbox.harness import HARNESS, order
from jaxrl_llm.sandbox.languages import COMPILE_FAILED, LANGUAGES, Language, job
from jaxrl_llm.sandbox.limits import Outcome


@dataclass(frozen=True)
class Case:
    """A program's standard input, and what it must print: equal but for white space at the ends of lines and of all."""

    input: str
    output: str


@dataclass(frozen=True)
class ProgramTests:
    """Either `cases` for whole programs, or, for Python, `check` of the function `entry_point`.

    `check` is code that fails by raising: it calls the function by its name, or defines `check(candidate)`, which is
    then called (human-eval, arXiv:2107.03374). `setup` runs before it, in its namespace: helpers that the task gives.
    """

    language: str
    cases: tuple[Case, ...] = ()
    entry_point: str = ""
    check: str = ""
    setup: str = ""

    @classmethod
    def parse(cls, text: str) -> "ProgramTests":
        """Tests from JSON: {"language", "cases": [{"input", "output"}]} or {"entry_point", "check", "setup"}.

        Raises ValueError saying what is wrong with it.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"tests are no JSON ({error})") from None
        if not isinstance(given, dict):
            raise ValueError("tests are no JSON object")
        if unknown := set(given) - {"language", "cases", "entry_point", "check", "setup"}:
            raise ValueError(f"tests have an unknown key {min(unknown)!r}")
        cases = given.pop("cases", [])
        if not isinstance(cases, list) or not all(
            isinstance(case, dict)
            and set(case) == {"input", "output"}
            and all(isinstance(t, str) for t in case.values())
            for case in cases
        ):
            raise ValueError('"cases" is no list of {"input": text, "output": text}')
        given.setdefault("language", "python")
        if not all(isinstance(value, str) for value in given.values()):
            raise ValueError("language, entry_point, check and setup must be text")
        tests = cls(cases=tuple(Case(**case) for case in cases), **given)
        if tests.language not in LANGUAGES:
            raise ValueError(f"language {tests.language!r} is none of {', '.join(LANGUAGES)}")
        if bool(tests.cases) == bool(tests.check):
            raise ValueError('tests need either "cases" or "check"')
        if tests.check and (tests.language != "python" or not tests.entry_point.isidentifier()):
            raise ValueError('"check" needs language python and the name of a function as "entry_point"')
        return tests


@dataclass(frozen=True)
class Verdict:
    """How many tests a program passed, and what happened at the first that it did not pass."""

    passed: int
    total: int
    why: str

    @property
    def all_passed(self) -> bool:
        return self.passed == self.total


class Examination:
    """One program before its tests: `jobs` for the sandbox, then `verdict` of their outcomes in order."""

    def __init__(self, tests: ProgramTests, source: str):
        self._tests = tests
        if tests.cases:
            language = LANGUAGES[tests.language]
            self.jobs = [job(language, source, case.input) for case in tests.cases]
            return
        # Unknown to the solution, and new every time.
        self._word = secrets.token_hex(16)
        asked = order(entry_point=tests.entry_point, setup=tests.setup, check=tests.check, passed=self._word)
        self.jobs = [job(Language("main.py"), HARNESS, asked, files={"solution.py": source})]

    def verdict(self, outcomes: Sequence[Outcome]) -> Verdict:
        if self._tests.cases:
            judged = [_case(case, outcome) for case, outcome in zip(self._tests.cases, outcomes, strict=True)]
        else:
            (outcome,) = outcomes
            judged = ["" if outcome.stdout.decode(errors="replace") == self._word else _said(outcome) or "ended early"]
        wrong = [why for why in judged if why]
        return Verdict(len(judged) - len(wrong), len(judged), wrong[0] if wrong else "")


def _case(case: Case, outcome: Outcome) -> str:
    if not outcome.succeeded:
        return _said(outcome)
    printed, wanted = _lines(outcome.stdout.decode("utf-8", "replace")), _lines(case.output)
    return "" if printed == wanted else "wrong output"


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip().splitlines()


def _said(outcome: Outcome) -> str:
    if outcome.ending == "exited" and outcome.code == 0:
        return ""
    if outcome.ending == "exited" and outcome.code == COMPILE_FAILED:
        return "did not compile"
    if outcome.ending == "exited":
        lines = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"exit code {outcome.code}" + (f": {lines[-1][:200]}" if lines else "")
    if outcome.ending == "signalled":
        return f"ended by signal {outcome.code}"
    return f"over its limit of {outcome.ending}"
