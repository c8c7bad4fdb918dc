"""Procedural tasks: right answers, sides that never meet, the same everywhere, nothing for a policy that guesses."""

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from functools import partial
from math import comb
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.data.arithmetic import TASKS, arithmetic
from jaxrl_llm.data.procedural import split_cells
from jaxrl_llm.data.programs import programs
from jaxrl_llm.data.sequences import copying, counting, sorting
from jaxrl_llm.rewards.code import CodeReward
from jaxrl_llm.rewards.exact import exact_match
from jaxrl_llm.types import PromptTask, UserError

LETTERS = {"alphabet": "abc", "shortest": 1, "longest": 4}
SMALL = {task: arithmetic(task, low=1, high=12) for task in TASKS} | {
    "sorting": sorting(low=0, high=3, shortest=2, longest=4),
    "copying": copying(**LETTERS),
    "counting": counting(**LETTERS),
    "programs": programs(low=1, high=2, shortest=1, longest=3),
}
LARGE = {task: arithmetic(task, low=1, high=999) for task in TASKS} | {
    "sorting": sorting(low=0, high=99, shortest=4, longest=9),
    "copying": copying(alphabet="abcdefghij", shortest=5, longest=20),
    "counting": counting(alphabet="abcdefghij", shortest=5, longest=20),
    "programs": programs(low=1, high=99, shortest=2, longest=3),
}


def everything(name):
    return [cell.make(number) for cell in SMALL[name] for number in range(cell.size)]


def test_answers_are_right():
    """Each operation worked out again from the prompt alone."""
    operations = {"addition": "+", "subtraction": "-", "multiplication": "*", "division": "//", "remainder": "%"}
    for name, operator in operations.items():
        for problem in everything(name):
            expression = problem.prompt.rstrip("=")
            a, b = map(int, expression.replace(operator[0], " ", 1).split())
            right = {"+": a + b, "-": a - b, "*": a * b, "//": a // b, "%": a % b}[operator]
            assert int(problem.answer) == right
            assert operator != "//" or a % b == 0
    echo = everything("echo_addition")[5]
    assert (echo.prompt, echo.answer) == ("1 + 6 =", "1 + 6 = 7")
    terms = arithmetic("three_terms", low=1, high=12)[0].make(12 * 12 * 3 + 12 * 4 + 11)
    assert (terms.prompt, terms.answer) == ("4+5-12=", "-3")
    for problem in everything("sorting"):
        assert Counter(problem.answer.split()) == Counter(problem.prompt[5:-1].split())
        assert problem.answer.split() == sorted(problem.answer.split(), key=int)
    assert all(problem.prompt == f"copy {problem.answer}:" for problem in everything("copying"))
    for problem in everything("counting"):
        _, letter, _, text = problem.prompt.rstrip(":").split()
        assert int(problem.answer) == sum(other == letter for other in text)


def test_programs_do_what_their_steps_say():
    """The solution run by itself, against the steps of the prompt followed one by one for numbers that no test uses."""
    for problem in everything("programs"):
        assert passes(problem.answer, problem.solution)
        space = {}
        exec(problem.solution, space)
        for x in (-50, 3, 8):
            value = x
            for step in problem.prompt.removeprefix("code ").rstrip(":").split():
                operand = int(step[1:])
                value = {"+": value + operand, "-": value - operand, "*": value * operand}[step[0]]
            assert space["f"](x) == value
    worked = programs(low=1, high=9, shortest=3, longest=3)[0].make(3 + 9 * 27 + 19 * 27 * 27)
    assert (worked.id, worked.prompt, worked.solution) == ("+4 -1 *2", "code +4 -1 *2:", "f=lambda x:(x+4-1)*2")
    # Right in one of the numbers that the tests ask for, and known by heart there: wrong.
    assert not passes(worked.answer, "f=lambda x:8 if x==1 else 0")
    assert passes(worked.answer, "def f(n): return 6 + 2 * n")


@pytest.mark.parametrize("name", SMALL)
def test_a_task_has_as_many_prompts_as_its_cells_say(name):
    problems = everything(name)
    prompts, ids = {p.prompt for p in problems}, {p.id for p in problems}
    assert len(prompts) == len(ids) == len(problems)


@pytest.mark.parametrize("name", LARGE)
def test_train_and_heldout_never_meet_in_100000_draws(name):
    split = split_cells(LARGE[name], heldout=2000, train=98_000, seed=3)
    train, heldout = {p.prompt for p in split.train}, {p.prompt for p in split.heldout}
    assert (len(train), len(heldout)) == (98_000, 2000)
    assert not train & heldout


def test_what_is_held_out_depends_on_the_seed_and_not_on_the_training_set():
    one, other = (split_cells(LARGE["copying"], heldout=50, train=train, seed=3) for train in (10, 1000))
    assert one.heldout == other.heldout
    assert split_cells(LARGE["copying"], heldout=50, train=10, seed=4).heldout != one.heldout


def test_a_whole_task_is_dealt_out():
    for name in SMALL:
        split = split_cells(SMALL[name], heldout=20, train=None, seed=0)
        assert {p.prompt for p in split.train + split.heldout} == {p.prompt for p in everything(name)}
        assert len(split.heldout) == 20


def test_lengths_are_mixed_evenly_from_the_first_prompt_on():
    split = split_cells(LARGE["copying"], heldout=32, train=1600, seed=0)
    lengths = Counter(len(p.answer) for p in split.train[:160])
    assert lengths == dict.fromkeys(range(5, 21), 10)
    # 3, 9, 27 and 81 texts: half of each at most is held out, and what short ones lack the long ones give.
    held = Counter(len(p.answer) for p in split_cells(SMALL["copying"], heldout=40, train=None, seed=0).heldout)
    assert held == {1: 1, 2: 4, 3: 13, 4: 22}


def test_splits_are_the_same_in_every_process_and_as_ever():
    code = (
        "from jaxrl_llm.data.procedural import split_cells as split\n"
        "from jaxrl_llm.data.sequences import copying, counting, sorting\n"
        "from jaxrl_llm.data.arithmetic import arithmetic\n"
        "from jaxrl_llm.data.programs import programs\n"
        "print([split(cells, heldout=9, train=50, seed=5) for cells in (\n"
        "    arithmetic('addition', low=10, high=99), sorting(low=0, high=99, shortest=4, longest=9),\n"
        "    copying(alphabet='abcdefghij', shortest=5, longest=20), counting(alphabet='abc', shortest=1, longest=8),\n"
        "    programs(low=1, high=9, shortest=1, longest=3))])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert hashlib.sha256(outputs[0].encode()).hexdigest()[:16] == "4c2f160a297c3758"


@pytest.mark.parametrize(
    ("cells", "how", "message"),
    [
        ("addition", {"heldout": 144}, "heldout = 144 of the 144 problems .*leaves nothing to train on"),
        ("copying", {"heldout": 61}, r"of the 120 problems .*\(at most half of each is held out\)"),
        ("addition", {"heldout": 4, "train": 141}, "train = 141 is more than the 140 problems that are not held out"),
    ],
)
def test_too_few_problems_is_an_error(cells, how, message):
    with pytest.raises(UserError, match=message):
        split_cells(SMALL[cells], **({"train": None, "seed": 0} | how))


def test_too_many_to_list_and_divisions_by_zero_are_errors():
    with pytest.raises(UserError, match="997002999 problems, too many to list; say with `train`"):
        split_cells(arithmetic("three_terms", low=1, high=999), heldout=1, train=None, seed=0)
    with pytest.raises(UserError, match="remainder divides by every operand, and low = 0"):
        arithmetic("remainder", low=0, high=3)
    with pytest.raises(UserError, match="longest = 2001 steps by numbers up to 10 make values too long"):
        programs(low=1, high=10, shortest=1, longest=2001)
    (enormous,) = programs(low=1, high=10**9, shortest=400, longest=400)
    assert passes(*(lambda problem: (problem.answer, problem.solution))(enormous.make(enormous.size - 1)))


def passes(tests, program):
    """What the sandbox would say; these programs are this file's own."""
    space = {}
    try:
        exec(program, space)
        exec(json.loads(tests)["check"], space)
    except Exception:
        return False
    return True


def run_here(tests, texts):
    passed = [passes(tests, text) for text in texts]
    return [SimpleNamespace(passed=int(right), total=1, all_passed=right) for right in passed]


def score(name, problems, replies):
    """Share of right replies, through the reward that training uses."""
    how = {"correct": 1.0, "wrong": 0.0}
    reward = CodeReward(run_here, **how) if name == "programs" else partial(exact_match, **how)
    rewards = [
        reward([reply], PromptTask(p.id, np.zeros(1, np.int32), p.prompt, p.answer, "s", ""), finished=[True])[0]
        for p, reply in zip(problems, replies, strict=True)
    ]
    assert all(r.failed is None for r in rewards)
    return float(np.mean([r.value for r in rewards]))


def chances(name):
    """right reply -> probability over all problems of a task, from the mathematics and not from the generator."""
    operands = range(1, 13)
    pairs = list(itertools.product(operands, operands))
    counts: Counter[str] = Counter()
    if name == "addition":
        counts = Counter({str(s): 12 - abs(s - 13) for s in range(2, 25)})
    elif name == "echo_addition":
        counts = Counter({f"{a} + {b} = {a + b}": 1 for a, b in pairs})
    elif name == "subtraction":
        counts = Counter({str(d): 12 - abs(d) for d in range(-11, 12)})
    elif name == "multiplication":
        counts = Counter(str(a * b) for a, b in pairs)
    elif name == "division":
        counts = Counter({str(q): 12 for q in operands})
    elif name == "remainder":
        counts = Counter(str(a - b * (a // b)) for a, b in pairs)
    elif name == "three_terms":
        counts = Counter(str(a + b - c) for a, b, c in itertools.product(operands, repeat=3))
    elif name == "sorting":
        for length in (2, 3, 4):
            counts.update(" ".join(map(str, sorted(v))) for v in itertools.product(range(4), repeat=length))
    elif name == "copying":
        counts = Counter("".join(t) for length in (1, 2, 3, 4) for t in itertools.product("abc", repeat=length))
    elif name == "counting":  # binomial with p = 1/3, each length in proportion to its 3^(length + 1) problems
        for length in (1, 2, 3, 4):
            for right in range(length + 1):
                counts[str(right)] += 3 * comb(length, right) * 2 ** (length - right)
    elif name == "programs":  # all are x -> a x + b: how many ways there are to each after 1, 2 and 3 steps
        reached = Counter({(1, 0): 1})
        for _ in range(3):
            further: Counter[tuple[int, int]] = Counter()
            for ((a, b), ways), n in itertools.product(reached.items(), (1, 2)):
                for function in ((a, b + n), (a, b - n), (a * n, b * n)):
                    further[function] += ways
            reached = further
            counts.update({f"def f(x): return {a} * x + {b}": ways for (a, b), ways in reached.items()})
    total = sum(counts.values())
    return {answer: count / total for answer, count in counts.items()}


@pytest.mark.parametrize("name", SMALL)
def test_a_null_policy_scores_what_chance_predicts(name):
    problems, predicted = everything(name), chances(name)
    assert score(name, problems, [""] * len(problems)) == 0.0
    assert score(name, problems, [p.prompt for p in problems]) == 0.0  # no credit for repeating the question
    for answer in ("0", "the answer", "1" * 5000, "\0", "nan", "f=lambda x:5", *list(predicted)[:3]):
        expected = predicted.get(answer, 0.0)
        assert score(name, problems, [answer] * len(problems)) == pytest.approx(expected, abs=1e-12)
    # Answers drawn at random from the right distribution: sum of squares, within five standard errors.
    chance = sum(p * p for p in predicted.values())
    draws = np.random.default_rng(0).choice(list(predicted), p=list(predicted.values()), size=(20, len(problems)))
    found = [score(name, problems, row.tolist()) for row in draws]
    assert abs(np.mean(found) - chance) < 5 * np.sqrt(chance / (20 * len(problems)))
