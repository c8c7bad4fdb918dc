"""What the processes' outcomes become: right, wrong, or failed and never 0."""

import math
from contextlib import closing

import numpy as np
import pytest

from jaxrl_llm.cli.answers import bind_answers, reward_processes
from jaxrl_llm.config import RolloutConfig, validate
from jaxrl_llm.rewards.pooled import user_part
from jaxrl_llm.types import PromptTask, UserError

BOUND = {"timeout_s": 0.5, "retries": 0, "count": 2}


def task(answer="5", reward="math"):
    return PromptTask("t", np.zeros(1, np.int32), "the prompt", answer, "s", reward)


def test_math_is_right_wrong_or_cut_off():
    rollout = RolloutConfig(reward_correct=1.0, reward_wrong=-1.0)
    with closing(reward_processes(rollout, {"math", "exact"})) as processes:
        score = bind_answers(rollout, {"math", "exact"}, processes)
        texts = ["\\boxed{5}", "\\boxed{6}", "it is 5", "\\boxed{5}"]
        rewards = score(texts, task(), finished=[True, True, True, False])
        assert [r.value for r in rewards] == [1, -1, 1, -1]
        assert [r.parts["correct"] for r in rewards] == [1, 0, 1, 0]
        assert score(["5"], task(reward="exact"), finished=[True])[0].value == 1.0


def test_answers_that_no_process_survives_are_contained():
    """A time-out that these answers reach is failed; they are cut off before, as answers that nobody means."""
    rollout = RolloutConfig()
    with closing(reward_processes(rollout, {"math"})) as processes:
        score = bind_answers(rollout, {"math"}, processes)
        answers = ["9**9**9**9", "9^{9^{9^{9}}}", "nan", "\x00\x1b", "\ud800", "1" * 5000, "x" * 1_000_000]
        texts = [f"\\boxed{{{answer}}}" for answer in answers] + ["\\boxed{5}"]
        rewards = score(texts, task(), finished=[True] * len(texts))
        assert [(r.failed, r.parts["correct"]) for r in rewards] == [(None, 0.0)] * len(answers) + [(None, 1.0)]


def test_a_users_verdict_is_true_or_false_and_what_hangs_or_breaks_has_failed(user_functions):
    rollout = RolloutConfig(rewards={"answer": 1.0}, reward_workers=BOUND)
    name = "verdicts:judge"
    with closing(reward_processes(rollout, {name})) as processes:
        score = bind_answers(rollout, {name}, processes)
        texts = ["True", "False", "1", "0.5", "nan", "'x'", "hang", "die", "boom", "seen"]
        rewards = score(texts, task("5", name), finished=[True] * len(texts))
    assert [r.value for r in rewards[:3]] == [1.0, -1.0, 1.0]
    assert rewards[-1].value == 1.0
    assert [r.failed for r in rewards[3:-1]] == [
        "verdicts:judge: it returned 0.5, and an answer is True or False",
        "verdicts:judge: it returned nan",
        "verdicts:judge: it raised ValueError: could not convert string to float: 'x'",
        "verdicts:judge: it took more than 0.5 s",
        "verdicts:judge: its process died",
        "verdicts:judge: it raised ZeroDivisionError: division by zero",
    ]
    assert all(math.isnan(r.value) and r.parts == {} for r in rewards[3:-1])


def test_a_users_number_is_a_part_of_its_own(user_functions):
    rollout = RolloutConfig(rewards={"answer": 1.0, "verdicts:length": 0.5}, reward_workers=BOUND)
    with closing(reward_processes(rollout, {"exact"})) as processes:
        rewards = user_part(processes.workers, "verdicts:length")(["abc", "\ud800"], task(), finished=[True, False])
    assert [(r.value, r.parts) for r in rewards] == [(3.0, {"length": 3.0}), (1.0, {"length": 1.0})]


def test_a_name_without_a_meaning_is_refused():
    with (
        closing(reward_processes(RolloutConfig(), ())) as processes,
        pytest.raises(UserError, match="no reward 'mth', only"),
    ):
        bind_answers(RolloutConfig(), {"mth"}, processes)


@pytest.fixture
def user_functions(tmp_path, monkeypatch):
    (tmp_path / "verdicts.py").write_text(
        "import os, time\n"
        "def judge(*, text, prompt, answer, finished):\n"
        "    if text == 'hang': time.sleep(99)\n"
        "    if text == 'die': os._exit(3)\n"
        "    if text == 'boom': 1 / 0\n"
        "    if text == 'seen': return (prompt, answer, finished) == ('the prompt', '5', True)\n"
        "    return float('nan') if text == 'nan' else eval(text)\n"
        "def length(*, text, **_):\n    return len(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"rewards": {"fromat": 1}}, "no part 'fromat'.*did you mean format"),
        ({"rewards": {"a-b:c": 1}}, "it is not module:function either"),
        ({"rewards": {}}, "gives no part a weight"),
        ({"rewards": {"answer": 0}}, "gives no part a weight"),
        ({"rewards": {"model": 1}}, "reward_model.path = None"),
        ({"rewards": {"answer": "much"}}, "rollout.rewards.answer"),
        ({"reward_language": "english"}, "rollout.reward_language"),
        ({"reward_workers": {"timeout_s": 0}}, "rollout.reward_workers.timeout_s"),
        ({"reward_workers": {"memory_mb": 10}}, "rollout.reward_workers.memory_mb"),
    ],
)
def test_parts_that_mean_nothing_are_refused(rollout, message):
    with pytest.raises(UserError, match=message):
        validate({"rollout": rollout}, "here")
