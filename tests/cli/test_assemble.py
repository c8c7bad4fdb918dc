from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.cli.assemble import assemble
from jaxrl_llm.config import load
from jaxrl_llm.types import Completion

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(("which", "right", "wrong"), [("none", 1, -1), ("all", 0.5, -1.5), ("correct", 0.5, -1)])
def test_length_penalty_reaches_the_reward(tiny, which, right, wrong):
    # limit 4, cache 2: a completion of 3 tokens (two digits and the end) is one token into the cache
    overrides = [f"rollout.length_penalty={which}", "rollout.length_limit=4", "rollout.length_cache=2"]
    setup = assemble(load(tiny, overrides))
    task = next(task for task in setup.train_tasks if len(task.answer) == 2)
    rewards = []
    for answer in (task.answer, task.answer[::-1] if task.answer != task.answer[::-1] else "99"):
        ids = np.array([*setup.tokenizer.encode(answer), setup.tokenizer.eos_id], np.int32)
        completion = Completion(ids, np.zeros(len(ids)), np.zeros(len(ids), np.int32), np.zeros(len(ids), bool), "stop")
        rewards.append(setup.environment.episode(task, completion).reward.value)
    assert rewards == [right, wrong]


def test_dapo_shapes_lengths_as_published():
    rollout = load(CONFIGS / "recipes/dapo.yaml", ["model.max_context=32768", "train.row_length=128"]).rollout
    assert (rollout.length_penalty, rollout.length_limit, rollout.length_cache) == ("all", 20480, 4096)
