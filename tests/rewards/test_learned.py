"""What a reward model's scores become, with a scripted model."""

import math
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.envs.single_turn import SingleTurn
from jaxrl_llm.rewards.combine import weighted
from jaxrl_llm.rewards.exact import exact_match
from jaxrl_llm.rewards.learned import learned_rewards
from jaxrl_llm.rewards.protocol import failed
from jaxrl_llm.types import Completion, PromptTask, Reward, UserError


def encode(prompt, completion):
    if "<bad>" in completion:
        raise UserError("the character 'X' is not in the tokenizer's vocabulary")
    return [ord(char) for char in prompt + completion]


def judge(completions, score=lambda sequences: np.array([sum(ids) / 100 for ids in sequences], np.float32)):
    task = PromptTask("t", np.zeros(1, np.int32), "p", "", "s", "exact")
    finished = [True] * len(completions)
    return learned_rewards(completions, task, finished=finished, encode=encode, score=score, max_tokens=4)


def test_what_cannot_be_judged_is_failed_and_never_zero():
    rewards = judge(["a", "<bad>", "", "long", "bcd"])
    assert [r.failed for r in rewards if r.failed] == [
        "the reward model cannot be given the text: the character 'X' is not in the tokenizer's vocabulary",
        "5 tokens are more than the 4 that the reward model may be given",
    ]
    assert [rewards[i].value for i in (0, 2, 4)] == pytest.approx([2.09, 1.12, 4.09])
    assert all(math.isnan(rewards[i].value) for i in (1, 3))
    assert rewards[0].parts == {"model": rewards[0].value}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_a_failed_reward(number):
    rewards = judge(["a", "b"], lambda sequences: np.array([0.5, number], np.float32))
    assert (rewards[0].value, rewards[0].failed) == (0.5, None)
    assert rewards[1].failed == f"the reward model's score is {number}"


def test_nothing_is_asked_of_the_model_where_nothing_can_be_judged():
    assert [r.failed is not None for r in judge(["<bad>", "long"], score=None)] == [True, True]


def test_the_model_trains_and_the_answer_says_what_is_correct():
    def judge(texts, task, *, finished):
        assert task.prompt == "question"
        return [Reward(len(text) / 2, {"model": len(text) / 2}) for text in texts[:-1]] + [failed("broke")]

    def completion(text, finish):
        ids = np.array([*map(ord, text), 0][: len(text) + (finish == "stop")], np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), ids * 0, np.zeros(len(ids), bool), finish)

    answers = partial(exact_match, correct=1.0, wrong=-1.0)
    plain = SingleTurn(
        decode=lambda ids: "".join(map(chr, ids)), score=answers, penalty=lambda tokens, correct: -10.0 * correct
    )
    judged = plain.scored_by(weighted(answers, 0.0, [(judge, 1.0)]))
    task = PromptTask("t", np.zeros(1, np.int32), "question", "yes", "s", "exact")
    made = [completion("yes", "stop"), completion("no", "stop"), completion("yes", "length"), completion("yes", "stop")]
    rewards = [episode.reward for episode in judged.episodes(task, made)]
    assert [r.value for r in rewards[:3]] == [1.5 - 10, 1.0, 1.5]
    assert [r.parts["correct"] for r in rewards] == [1.0, 0.0, 0.0, 1.0]
    assert rewards[0].parts == {"correct": 1.0, "model": 1.5, "length": -10.0}
    assert rewards[3].failed == "broke"
    assert [e.reward.value for e in plain.episodes(task, made)] == [1 - 10, -1, -1, 1 - 10]
