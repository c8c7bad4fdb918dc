"""The reward `code` from its name in a configuration to the sandbox and back."""

import json
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.cli import measuring
from jaxrl_llm.cli.answers import bind_answers, check_answers, reward_processes
from jaxrl_llm.config import RolloutConfig, SandboxConfig
from jaxrl_llm.sandbox.limits import Limits
from jaxrl_llm.types import PromptTask, Sampling, UserError


def task(answer, name="code"):
    return PromptTask("programs/1", np.array([1], np.int32), "Twice x.", answer, "programs", name)


TWICE = json.dumps({"entry_point": "twice", "check": "assert twice(4) == 8"})


def test_programs_are_run_against_the_tests_of_their_task():
    rollout = RolloutConfig(reward_correct=1.0, reward_wrong=-1.0, sandbox=SandboxConfig(count=1, wall_s=20.0))
    with closing(reward_processes(rollout, {"code", "exact"})) as processes:
        processes.start()
        score = bind_answers(rollout, {"code", "exact"}, processes)
        texts = [
            "Here:\n```python\ndef twice(x): return 2 * x\n```",
            "def twice(x): return x",
            "def twice(x): return 2 * x",
        ]
        rewards = score(texts, task(TWICE), finished=[True, True, False])
        assert [r.value for r in rewards] == [1.0, -1.0, -1.0]
        assert [r.parts["tests_passed"] for r in rewards] == [1.0, 0.0, 0.0]
        assert score(["5"], task("5", "exact"), finished=[True])[0].value == 1.0


# Each prints "refused" if the limit that it tries was kept, and "allowed" with the limits that are the defaults.
TRIES = {
    "processes": """
import os, time
children, said = [], "allowed"
try:
    for _ in range(8):
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(20)
except OSError:
    said = "refused"
for child in children:
    os.kill(child, 9)
print(said)
""",
    "disk_mb": """
try:
    with open("big", "wb") as file:
        file.write(bytes(2 * 2**20))
    print("allowed")
except OSError:
    print("refused")
""",
    "output_kb": "import sys\nprint('refused', flush=True)\nsys.stderr.write('x' * 5000)",
}


def test_every_limit_of_the_sandbox_is_that_of_the_configuration():
    """Told to the examiner in its units, and kept by the jails that it opens."""
    tight = {"count": 1, "wall_s": 20.0, "memory_mb": 256, "processes": 4, "output_kb": 2, "disk_mb": 1}
    cases = json.dumps({"cases": [{"input": "", "output": "refused"}]})
    with closing(reward_processes(RolloutConfig(sandbox=tight), {"code"})) as processes:
        examiner = processes.examiner
        assert examiner._workers == 1
        assert examiner._limits == Limits(
            wall_s=20.0, memory_bytes=2**28, processes=4, output_bytes=2048, disk_bytes=2**20
        )
        processes.start()
        found = dict(zip(TRIES, examiner(cases, list(TRIES.values())), strict=True))
    assert {key: verdict.why for key, verdict in found.items()} == {
        "processes": "",
        "disk_mb": "",
        "output_kb": "over its limit of output",
    }


def test_no_sandbox_opens_unless_a_task_asks_for_it():
    with closing(reward_processes(RolloutConfig(), {"exact"})) as processes:
        assert processes.examiner is None


def test_an_answer_that_is_no_tests_is_refused_with_its_task():
    check_answers([task(TWICE), task("whatever", "exact")])
    with pytest.raises(UserError, match=r"the answer of programs/1 is no tests of programs: .*no JSON"):
        check_answers([task("42")])


def test_measuring_opens_the_sandbox_before_it_scores(monkeypatch, tmp_path):
    did = []

    def groups(*_, **__):
        did.append("score")
        return iter(())

    processes = SimpleNamespace(start=lambda: did.append("start"), close=lambda: did.append("close"))
    monkeypatch.setattr(measuring, "answer_environment", lambda config, tokenizer: (None, processes))
    monkeypatch.setattr(measuring, "_groups", groups)
    policy = SimpleNamespace(origin="x", setup=SimpleNamespace(tokenizer=SimpleNamespace(fingerprint="f")))
    plan = measuring._Plan([], 1, Sampling(2), 0)
    assert measuring._measure(policy, None, plan, tmp_path / "found.jsonl", None, print) == []
    assert did == ["start", "score", "close"]
