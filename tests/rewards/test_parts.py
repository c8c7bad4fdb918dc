"""Format, language, and what weighted parts add up to."""

import math
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.rewards.combine import by_task, weighted
from jaxrl_llm.rewards.exact import exact_match
from jaxrl_llm.rewards.format import follows, format_reward
from jaxrl_llm.rewards.language import keeps_to, language_reward, main_script
from jaxrl_llm.rewards.protocol import failed
from jaxrl_llm.types import PromptTask, Reward


def task(prompt="p", answer="yes", reward="exact"):
    return PromptTask("t", np.zeros(1, np.int32), prompt, answer, "s", reward)


@pytest.mark.parametrize(
    ("text", "whole", "inside"),
    [
        ("<think>a</think>b", True, False),
        ("\n <think>\na\n</think>\n\nb\n", True, False),
        ("a</think>b", False, True),
        ("before <think>a</think>b", False, False),
        ("<think>a</think>", False, False),
        ("<think>a</think> \n", False, False),
        ("<think></think>b", False, False),
        ("</think>b", False, False),
        ("<think>a b", False, False),
        ("a b", False, False),
        ("", False, False),
        ("<think>a</think>b</think>c", False, False),
        ("<think>a<think>a</think>b", False, False),
        ("<think>a</think>b<think>", False, False),
        ("<think>a</think>b<think>c</think>d", False, False),
        ("</think>a<think>b", False, False),
        ("<THINK>a</THINK>b", False, False),
    ],
)
def test_thoughts_between_tags_and_then_an_answer(text, whole, inside):
    assert follows(text, opened_in_prompt=False, boxed=False) == whole
    assert follows(text, opened_in_prompt=True, boxed=False) == inside
    assert not follows(text, opened_in_prompt=False, boxed=True)


def test_a_box_may_be_asked_for_and_counts_only_in_the_answer():
    assert follows("<think>a</think>\\boxed{b}", opened_in_prompt=False, boxed=True)
    assert not follows("<think>\\boxed{b}</think>b", opened_in_prompt=False, boxed=True)
    assert not follows("<think>a</think>\\boxed{b", opened_in_prompt=False, boxed=True)


def test_a_truncated_completion_has_no_form():
    texts = ["<think>a</think>b"] * 2
    rewards = format_reward(texts, task(), finished=[True, False], opened_in_prompt=False, boxed=False)
    assert rewards == [Reward(1.0, {"format": 1.0}), Reward(0.0, {"format": 0.0})]


RUSSIAN = "\u0421\u043a\u043e\u043b\u044c\u043a\u043e \u0431\u0443\u0434\u0435\u0442"
CHINESE = "\u6211\u4eec\u6765\u8ba1\u7b97"
JAPANESE = "\u7b54\u3048\u306f\u3067\u3059"


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("How many?", "latin"), ("\u00e9t\u00e9", "latin"), (RUSSIAN, "cyrillic"), (CHINESE, "han"), (JAPANESE, "kana"),
        ("\u03b1\u03b2\u03b3", "greek"), ("\ud55c\uad6d\uc5b4", "hangul"), ("12+34=", None), ("", None), ("$x$", None),
        ("\ud800", None), (RUSSIAN + " x", "cyrillic"),
    ],
)  # fmt: skip
def test_the_script_of_a_prompt(text, script):
    assert main_script(text) == script


@pytest.mark.parametrize(
    ("text", "script", "kept"),
    [
        ("So it is 5.", "latin", True),
        ("So it is " + CHINESE, "latin", False),
        ("So it is " * 50 + "\u6211", "latin", True),  # under 5 %
        ("So $\u03b1 = \\text{" + CHINESE + "}$ is it", "latin", True),  # formulas do not count
        ("As code: ```" + CHINESE + "```", "latin", True),
        (RUSSIAN + " x = 5", "cyrillic", True),
        ("How many x", "cyrillic", False),
        (RUSSIAN + CHINESE, "cyrillic", False),
        (JAPANESE + CHINESE, "kana", True),
        (CHINESE, "kana", True),
        (CHINESE, "han", True),
        (JAPANESE, "han", False),
        ("12", "latin", True),
        ("", "cyrillic", True),
    ],
)
def test_keeping_to_a_script(text, script, kept):
    assert keeps_to(text, script) == kept


def test_the_language_is_the_prompts_unless_it_has_none():
    def values(prompt, script, texts=("yes", RUSSIAN)):
        rewards = language_reward(texts, task(prompt), finished=[True, False], script=script)
        assert [r.parts for r in rewards] == [{"language": r.value} for r in rewards]
        return [r.value for r in rewards]

    assert values("How many?", "prompt") == [1, 0]
    assert values(RUSSIAN, "prompt") == [0, 1]
    assert values("1+1=", "prompt") == [1, 1]
    assert values("How many?", "cyrillic") == [0, 1]


def answers(texts, task, *, finished):
    return exact_match(texts, task, finished=finished, correct=1.0, wrong=0.0)


def constant(value, name):
    return lambda texts, task, *, finished: [Reward(value, {name: value}) for _ in texts]


def test_a_weighted_sum_shows_its_parts():
    """Magistral's .9 for the answer, .1 for the form, .1 for the language."""
    score = weighted(answers, 0.9, [(constant(1.0, "format"), 0.1), (constant(0.0, "language"), 0.1)])
    right, wrong = score(["yes", "no"], task(), finished=[True, True])
    assert (right.value, right.parts) == (pytest.approx(1.0), {"correct": 1.0, "format": 1.0, "language": 0.0})
    assert (wrong.value, wrong.parts) == (pytest.approx(0.1), {"correct": 0.0, "format": 1.0, "language": 0.0})


def test_a_part_that_failed_fails_the_sum_whatever_its_weight_and_the_siblings_keep_theirs():
    def breaks(texts, task, *, finished):
        return [failed("it broke") if text == "yes" else Reward(1.0, {"x": 1.0}) for text in texts]

    for weight in (0.0, 0.5):
        broken, fine = weighted(answers, 1.0, [(breaks, weight)])(["yes", "no"], task(), finished=[True, True])
        assert (broken.failed, math.isnan(broken.value)) == ("it broke", True)
        assert (fine.failed, fine.value) == (None, weight)


def test_each_task_is_scored_by_the_reward_it_names():
    score = by_task({"exact": answers, "other": constant(0.25, "other")})
    assert score(["yes"], task(), finished=[True])[0].value == 1.0
    assert score(["yes"], task(reward="other"), finished=[True])[0].value == 0.25


def test_rewards_may_be_plus_and_minus_one_or_zero_and_one():
    for correct, wrong in ((1.0, -1.0), (1.0, 0.0)):
        score = partial(exact_match, correct=correct, wrong=wrong)
        rewards = score(["yes", "no"], task(), finished=[True, True])
        assert [(r.value, r.parts["correct"]) for r in rewards] == [(correct, 1.0), (wrong, 0.0)]
