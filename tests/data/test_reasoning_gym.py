"""reasoning-gym: with the package (`make reasoning-gym`), and what is said without it."""

import os
import subprocess
import sys

import pytest

from jaxrl_llm.data.reasoning_gym import ALLOWED, reasoning_gym
from jaxrl_llm.types import UserError

# Reported of the package: scorers that execute the answer or pay for any text, items that depend on the hash seed.
UNSAFE = (
    "game_of_life_halting",
    "complex_arithmetic",
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
    "n_queens",
)
UNSAFE += ("countdown", "polynomial_multiplication", "simple_integration", "isomorphic_strings", "ransom_note")


def test_only_what_is_allowed_is_asked_for():
    for task in (*UNSAFE, "list_functions", "nonsense"):
        with pytest.raises(UserError, match=f"'{task}' is not on the allow-list"):
            reasoning_gym(task, {}, heldout=1, train=1, seed=0)
    with pytest.raises(UserError, match="options may not hold 'seed'"):
        reasoning_gym("gcd", {"seed": 3}, heldout=1, train=1, seed=0)


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[reasoning-gym\]'"):
        reasoning_gym("gcd", {}, heldout=1, train=1, seed=0)


@pytest.mark.reasoning_gym
@pytest.mark.slow
def test_allowed_tasks_are_apart_and_the_same_in_every_process():
    code = (
        "from jaxrl_llm.data.reasoning_gym import ALLOWED, reasoning_gym\n"
        "for task in ALLOWED:\n"
        "    for seed in (0, 1):\n"
        "        print(task, reasoning_gym(task, {}, heldout=20, train=60, seed=seed))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 2 * len(ALLOWED)


@pytest.mark.reasoning_gym
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the package's own dependencies
@pytest.mark.parametrize("task", ALLOWED)
def test_an_allowed_task_never_holds_out_what_it_trains_on(task):
    one, other = (reasoning_gym(task, {}, heldout=40, train=160, seed=seed) for seed in (0, 1))
    assert (len(one.train), len(one.heldout)) == (160, 40)
    assert not {p.prompt for p in one.train} & {p.prompt for p in one.heldout}
    # The package gives item i the seed `seed + i`: with its own seeds 0 and 1 all but one item would be shared.
    shared = {p.prompt for p in one.train + one.heldout} & {p.prompt for p in other.train + other.heldout}
    assert len(shared) < 100
    assert all(p.answer.strip() == p.answer != "" for p in one.train)
