import subprocess
import sys

from jaxrl_llm.data.arithmetic import split_problems

ARGS = {"low": 10, "high": 99, "heldout": 1000, "seed": 0}


def test_train_and_heldout_are_disjoint_and_complete():
    for task in ("addition", "echo_addition"):
        train, heldout = split_problems(task, **ARGS)
        assert len(heldout) == 1000
        ids = {p.task_id for p in train} | {p.task_id for p in heldout}
        assert len(ids) == len(train) + len(heldout) == 90 * 90
        assert not {p.prompt for p in train} & {p.prompt for p in heldout}


def test_answers_are_right():
    for problem in split_problems("addition", **ARGS)[0][:50]:
        a, b = problem.prompt.rstrip("=").split("+")
        assert int(problem.answer) == int(a) + int(b)
    problem = split_problems("echo_addition", **ARGS)[1][0]
    assert problem.answer.startswith(problem.prompt)
    left, right = problem.answer.split("=")
    assert sum(map(int, left.split("+"))) == int(right)


def test_the_split_is_the_same_in_every_process():
    # Reported of other stacks.
    code = "from jaxrl_llm.data.arithmetic import split_problems as split\n"
    code += "print(split('addition', low=10, high=99, heldout=9, seed=0)[1])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert split_problems("addition", **ARGS)[1] != split_problems("addition", **(ARGS | {"seed": 1}))[1]
