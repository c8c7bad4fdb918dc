"""`jaxrl train` with rewards in parts, one of them a function of the user's."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.cli.join import Joined, Outlets, new_issuer
from jaxrl_llm.config import load
from jaxrl_llm.data.curriculum import Pool
from jaxrl_llm.rewards.math_answer import is_right
from jaxrl_llm.types import PromptTask

FUNCTIONS = """
import time

def brevity(*, text, prompt, answer, finished):
    if "7" in text:
        time.sleep(99)
    return -len(text) / 8
"""
CONFIG = """
config = {
    "extends": "tiny.yaml",
    "rollout": {
        "rewards": {"answer": 1.0, "language": 0.5, "habits:brevity": 2.0},
        "reward_workers": {"count": 8, "timeout_s": 1.0, "retries": 0},
    },
    "sft": {"steps": 5},
    "train": {"steps": 2},
}
"""


@pytest.fixture
def config(tiny, monkeypatch):
    (tiny.parent / "habits.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tiny.parent)
    path = tiny.with_name("mine.py")
    path.write_text(CONFIG)
    return path


def test_a_python_config_may_name_functions_and_their_hangs_drop_samples(config, jaxrl, records):
    run = config.parent / "run"
    status, _, err = jaxrl("train", config, "--run-dir", run)
    assert status == 0, err
    steps, samples = records(run, "metrics"), records(run, "samples")
    for sample in samples:
        if "7" in sample["completion"]:
            assert sample["reward_failed"] == "habits:brevity: it took more than 1 s"
            assert sample["reward"] is None
        else:
            right = sample["completion"] == sample["answer"] and sample["finish"] == "stop"
            assert sample["reward_failed"] is None
            assert sample["reward"] == pytest.approx((1 if right else -1) + 0.5 - len(sample["completion"]) / 4)
    for step in steps:
        parts = {name: value for name, value in step.items() if name.startswith("reward_part_")}
        assert set(parts) == {"reward_part_correct", "reward_part_language", "reward_part_brevity"}
        assert parts["reward_part_correct"] == step["pass_rate"]
        assert (parts["reward_part_language"], parts["reward_part_brevity"] < 0) == (1.0, True)
        counted = step["reward_failures_by_reason"]
        assert sum(counted.values()) == step["reward_failures"]
        assert set(counted) <= {"habits:brevity: it took more than 1 s"}
    assert sum(step["reward_failures"] for step in steps) > 0
    status, _, err = jaxrl("sample", run, "--prompt", "1+1=")  # the run's own record may name them: nothing is scored
    assert status == 0, err


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (
            "",
            ["rollout.rewards={'os:getpid': 1}"],
            "override \"rollout.rewards={'os:getpid': 1}\": the reward 'os:getpid'",
        ),
        ("", ["rollout.rewards.os:getpid=1"], "which only a Python config may name"),
        (
            "rollout: {rewards: {'os:getpid': 1.0}}",
            [],
            "the reward 'os:getpid' is a function, which only a Python config",
        ),
        (
            "data: {sources: [{name: a, kind: arithmetic, reward: 'os:getpid'}]}",
            [],
            "the reward 'os:getpid' is a function",
        ),
        (
            "",
            ["data.sources=[{name: a, kind: arithmetic, reward: 'os:getpid'}]"],
            "the reward 'os:getpid' is a function",
        ),
        ("", ["data.sources.addition.reward=os:getpid"], "the reward 'os:getpid' is a function"),
        ("extends: mine.py", [], "is YAML and cannot extend mine.py, which is code"),
        ("", ["extends=mine.py"], "is YAML and cannot extend mine.py, which is code"),
    ],
)
def test_yaml_and_overrides_name_no_functions(text, more, message, config, jaxrl):
    path = config.parent / "other.yaml"
    path.write_text(text)
    status, _, err = jaxrl("config", "show", path, *more)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "mine.py: it assigns nothing to `config`"),
        ("config = 7", "mine.py holds a int, not sections of keys"),
        (CONFIG.replace("habits:brevity", "habits:missing"), "a reward cannot be used: habits:missing: AttributeError"),
        (CONFIG.replace("habits:brevity", "nowhere:f"), "a reward cannot be used: nowhere:f: ModuleNotFoundError"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(text, message, config, jaxrl):
    config.write_text(text)
    status, _, err = jaxrl("train", config, "--run-dir", config.parent / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert message in err
    assert not (config.parent / "run").exists()


def test_math_answers_train_and_are_evaluated_in_the_workers(tiny, jaxrl, records):
    run = tiny.parent / "run"
    more = ["data.sources.addition.reward=math", "sft.steps=0", "train.steps=1", "eval.every=1", "eval.samples=1"]
    more += ["rollout.reward_workers.count=2", "rollout.reward_workers.timeout_s=60"]
    status, _, err = jaxrl("train", tiny, *more, "--run-dir", run)
    assert status == 0, err
    assert {step["reward_failures"] for step in records(run, "metrics")} == {0}
    for sample in records(run, "samples"):
        right = sample["finish"] == "stop" and is_right(sample["completion"], sample["answer"])
        assert sample["reward"] == (1 if right else -1)
    assert all(0 <= record["value"] <= 1 for record in records(run, "eval"))


def test_as_many_groups_are_scored_at_once_as_the_configuration_says(tiny):
    config = load(tiny, ["rollout.reward_workers.groups_at_once=3"])
    tasks = [PromptTask("t/1", np.ones(1, np.int32), "p", "1", "t", "exact")]
    setup = SimpleNamespace(config=config, engine=None, pools=[Pool("t", 1.0, tasks)])
    issuer = new_issuer(setup, {})
    joined = Joined(setup, None, None, None, None, 0, issuer, None, None, Outlets(None), None)
    before = threading.active_count()
    joined.worker.start()
    scoring = threading.active_count() - before
    joined.worker.stop()
    assert scoring == 3
