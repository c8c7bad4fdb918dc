"""Length penalties; reported of other stacks: an overlong penalty below -1, or silently skipped."""

import numpy as np
import pytest

from jaxrl_llm.envs.single_turn import SingleTurn
from jaxrl_llm.rewards.exact import exact_match
from jaxrl_llm.rewards.length import soft_overlong
from jaxrl_llm.types import Completion, PromptTask, Reward


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0), (16384, 0), (16385, -1 / 4096), (17408, -0.25), (18432, -0.5), (20480, -1), (20481, -1), (10**6, -1)],
)
def test_soft_overlong_worked_numbers(length, penalty):
    assert soft_overlong(length, limit=20480, cache=4096) == pytest.approx(penalty, abs=1e-12)


def score(texts, task, *, finished):
    if texts == ["broken"]:
        return [Reward(0.0, {}, failed="judge broke")]
    return exact_match(texts, task, finished=finished, correct=1.0, wrong=-1.0)


def reward_of(text, *, only_correct=False, finish="stop"):
    def penalty(tokens, correct):
        return soft_overlong(tokens, limit=10, cache=4) if correct or not only_correct else 0.0

    environment = SingleTurn(decode=lambda ids: "".join(map(chr, ids)), score=score, penalty=penalty)
    ids = np.array([*map(ord, text), *([0] if finish == "stop" else [])], np.int32)
    completion = Completion(ids, np.zeros(len(ids)), np.zeros(len(ids), np.int32), np.zeros(len(ids), bool), finish)
    return environment.episodes(PromptTask("t", ids[:1], "", text.strip("x"), "s", "exact"), [completion])[0].reward


def test_an_environment_adds_the_penalty_and_shows_it():
    right = reward_of("1" * 7)  # 8 tokens with the end: 2 of 4 into the cache
    assert (right.value, right.parts) == (0.5, {"correct": 1.0, "length": -0.5})
    assert reward_of("1" * 5).value == 1.0
    wrong = reward_of("1" * 40 + "x", finish="length")
    assert (wrong.value, wrong.parts["length"]) == (-2.0, -1.0)
    assert reward_of("1" * 40 + "x", finish="length", only_correct=True).value == -1.0
    assert reward_of("1" * 7, only_correct=True).value == 0.5


def test_a_broken_judge_is_not_penalised():
    failed = reward_of("broken")
    assert (failed.failed, failed.parts) == ("judge broke", {})
