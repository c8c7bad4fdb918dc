"""The procedural programs in the sandbox: every known solution passes its own tests, and no other function does."""

from itertools import pairwise

from jaxrl_llm.data.procedural import split_cells
from jaxrl_llm.data.programs import programs
from jaxrl_llm.sandbox.checks import Examination, ProgramTests


def test_solutions_pass_their_own_tests_and_fail_the_next_ones(pool):
    cells = programs(low=2, high=99, shortest=1, longest=3)
    problems = split_cells(cells, heldout=0, train=9, seed=4).train
    right = [(problem.answer, problem.solution) for problem in problems]
    wrong = [(one.answer, other.solution) for one, other in pairwise(problems)]
    exams = [Examination(ProgramTests.parse(tests), source) for tests, source in right + wrong]
    futures = [[pool.submit(job) for job in exam.jobs] for exam in exams]
    passed = [
        exam.verdict([f.result(timeout=60) for f in jobs]).all_passed for exam, jobs in zip(exams, futures, strict=True)
    ]
    assert passed == [True] * len(right) + [False] * len(wrong)
    assert {len(problem.id.split()) for problem in problems} == {1, 2, 3}
