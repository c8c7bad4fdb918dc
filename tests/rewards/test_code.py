from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.rewards.code import CodeReward, program_of
from jaxrl_llm.types import PromptTask


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("", ""),
        ("Think.\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\nbetter:\n```py\nb\n```", "b\n"),
        ("```python\nnever closed\n", "never closed\n"),
        ("````md\n```\ninner\n```\n````", "```\ninner\n```\n"),
        ("~~~\ntilde\n~~~", "tilde\n"),
        ("inline ```x``` is none", "inline ```x``` is none"),
        ("```python\n```", ""),
        ("```python\ns = '''\n```\n", "s = '''\n"),
    ],
)
def test_the_last_fenced_block_is_the_program(text, program):
    assert program_of(text) == program


def found(passed, total):
    return SimpleNamespace(passed=passed, total=total, all_passed=passed == total)


def test_worked_rewards_of_one_group():
    asked = []

    def examine(tests, programs):
        asked.append((tests, programs))
        return [found(2, 2), found(1, 2), "no jail could be opened"]

    task = PromptTask("t", "prompt", np.array([1], np.int32), answer='{"cases": []}', source="programs", reward="code")
    reward = CodeReward(examine, correct=1.0, wrong=-1.0)
    a, b, c, d = reward(["right", "half", "lost", "cut"], task, finished=[True, True, True, False])
    assert asked == [('{"cases": []}', ["right", "half", "lost"])]  # one that never ended is not run
    assert (a.value, dict(a.parts)) == (1.0, {"correct": 1.0, "tests_passed": 1.0})
    assert (b.value, dict(b.parts)) == (-1.0, {"correct": 0.0, "tests_passed": 0.5})
    assert c.failed == "no jail could be opened"
    assert (d.value, d.failed) == (-1.0, None)
    assert reward(["cut"], task, finished=[False])[0].value == -1.0
    assert len(asked) == 1
