"""Modes and orders of rollouts, through the whole command."""

from pathlib import Path

import pytest

from jaxrl_llm.cli import join
from jaxrl_llm.cli.training import run_training
from jaxrl_llm.config import load
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.sampler.scheduler import Scheduler

CONFIGS = Path(__file__).parents[2] / "configs"
QUICK = ["sft.steps=20"]
CLOCKS = ("_s", "device_seconds", "tokens_per_s", "mfu", "samplers", "sampler_idle", "prompts_issued", "in_flight")


class IdleScheduler(Scheduler):
    """A sampler that idles while the trainer has anything to do: it looks for weights and work only when it has nothing
    in flight and the version made from all that it has sampled is there. Whatever the lag bound, it then starts every
    batch with the newest weights there will be, and, with as many slots as a batch, no second batch beside it."""

    newest = 0  # the newest version published; a batch of 2 prompts with 4 completions makes one
    sampled = 0

    def step(self, between=None):
        looks = [between] if between and self.idle and IdleScheduler.newest >= self.sampled // 8 else []
        finished = super().step(lambda: looks.pop()() if looks else None)  # once, not again after the dispatch
        self.sampled += len(finished)
        return finished


def sampled_tokens(monkeypatch):
    """Every token that is trained from here on, by step and group, with the weights' version that made it."""
    settle, seen = GroupIssuer.settle, []

    def record(issuer, trained, dropped, scored):
        completions = [(group.group_id, episode.completion) for group in scored for episode in group.episodes]
        seen.append([(g, c.tokens_T.tolist(), c.logprobs_T.tolist(), c.versions_T.tolist()) for g, c in completions])
        return settle(issuer, trained, dropped, scored)

    monkeypatch.setattr(GroupIssuer, "settle", record)
    return seen


def test_a_pipeline_of_one_with_an_idle_sampler_is_sync_token_for_token(tiny, jaxrl, records, monkeypatch):
    seen = sampled_tokens(monkeypatch)
    status, _, err = jaxrl("train", tiny, "rollout.mode=sync", *QUICK, "--run-dir", tiny.parent / "sync")
    assert status == 0, err
    publish = RolloutWorker.publish

    def published(worker, version, make):
        publish(worker, version, make)
        IdleScheduler.newest = version

    monkeypatch.setattr(RolloutWorker, "publish", published)
    monkeypatch.setattr(join, "Scheduler", IdleScheduler)
    how = ["rollout.mode=pipeline", "rollout.max_lag=1"]
    status, _, err = jaxrl("train", tiny, *how, *QUICK, "--run-dir", tiny.parent / "pipeline")
    assert status == 0, err
    assert len(seen) == 2 * 6
    assert seen[:6] == seen[6:]
    for name in ("metrics", "eval"):
        sync, pipeline = (records(tiny.parent / run, name) for run in ("sync", "pipeline"))
        for one, other in zip(sync, pipeline, strict=True):
            same = [k for k in one if not k.endswith(CLOCKS) and not k.startswith(("lag_bound", "lag_histogram"))]
            assert {k: one[k] for k in same} == {k: other[k] for k in same}
            assert one.get("lag_max", 0) == 0


def test_off_policy_trains_k_steps_on_one_version_first_finished_first(tiny, jaxrl, records):
    how = ["rollout.mode=ppo_off_policy", "rollout.max_lag=3", "rollout.order=finished", "train.steps=6"]
    status, _, err = jaxrl("train", tiny, *how, *QUICK, "--run-dir", tiny.parent / "run")
    assert status == 0, err
    steps = records(tiny.parent / "run", "metrics")
    assert [(r["lag_mean"], r["lag_group_mean"], r["lag_bound"]) for r in steps] == [(n, n, 2) for n in [0, 1, 2] * 2]
    for record in steps:
        assert record["samplers"] == pytest.approx(1, abs=0.5)
        assert sum(age["completions"] for age in record["age_by_length_s"]) == 8
        assert set(record["sampler_waits_s"]) <= {"trainer", "weights", "start"}
        assert set(record["trainer_waits_s"]) <= {"sampling", "rewards", "samplers"}
        assert sum(record["rollouts"].values()) == 0
    status, _, err = jaxrl("train", tiny, "rollout.mode=ppo_off_policy", "--run-dir", tiny.parent / "no")
    assert (status, err.count("\n")) == (2, 1)
    assert "trains max_lag steps on what one version sampled" in err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "ppo_off_policy", "pipeline"])
def test_the_quickstart_reaches_its_target_in_every_mode(mode, tmp_path, records):
    config = load(CONFIGS / "quickstart.yaml", [f"rollout.mode={mode}", "device.cpu_devices=8"])
    assert run_training(config, tmp_path / "run", reinforce=True) == "finished"
    assert records(tmp_path / "run", "eval")[-1]["value"] >= 0.75
    bound = {"sync": 0, "ppo_off_policy": 7, "pipeline": 8}[mode]
    lags = [record["lag_max"] for record in records(tmp_path / "run", "metrics")]
    assert max(lags) <= bound
