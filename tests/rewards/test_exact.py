"""Texts that are compared."""

import numpy as np
import pytest

from jaxrl_llm.rewards.exact import exact_match, normalised_match
from jaxrl_llm.types import PromptTask


def values(match, texts, answer, finished=True):
    task = PromptTask("t", np.zeros(1, np.int32), "p", answer, "s", "exact")
    rewards = match(texts, task, finished=[finished] * len(texts), correct=1.0, wrong=-1.0)
    assert [r.value for r in rewards] == [1.0 if r.parts["correct"] else -1.0 for r in rewards]
    return [r.value for r in rewards]


def test_exact_match():
    assert values(exact_match, ["62", " 62\n", "62.", "062", "", "6 2"], "62") == [1, 1, -1, -1, -1, -1]
    assert values(exact_match, ["62"], "62", finished=False) == [
        -1
    ]  # truncated after the right digits: it never stopped


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("The Eiffel Tower", ["eiffel tower", "an  EIFFEL\ntower.", "'Eiffel' Tower!"], ["eiffel", "eiffeltower", ""]),
        ("-3.5", ["-3.5", " -3.5."], ["3.5", "-35", "- 3.5"]),
        ("a + b", ["A + B"], ["a - b", "ab"]),
        ("?", ["?"], ["", "!", "a"]),  # of which normalising leaves nothing
    ],
)
def test_normalised_match(answer, right, wrong):
    assert values(normalised_match, right, answer) == [1] * len(right)
    assert values(normalised_match, wrong, answer) == [-1] * len(wrong)
    assert values(normalised_match, right, answer, finished=False) == [-1] * len(right)
