"""The main job end to end on a policy of seconds."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_llm.rollout.worker import RolloutWorker

SUMMARY_KEYS = {
    "state", "steps", "metric", "eval_first", "eval_last", "eval_best", "fit", "forecast_error", "lag_max", "lag_bound",
    "mismatch_max", "truncation_rate", "prompts_issued", "prompts_trained", "prompts_dropped", "tokens_generated",
    "tokens_trained", "wall_s",
}  # fmt: skip

COMMAND = [sys.executable, "-c", "from jaxrl_llm.cli.main import main; main()"]


def start(*arguments):
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_steps(run_dir, count, process):
    """Until the run has recorded `count` steps."""
    deadline = time.monotonic() + 300
    path = run_dir / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def timeless(records):
    """Records without what a clock says, and without how far the sampler had got when they were written."""
    clocks = (
        "_s",
        "device_seconds",
        "tokens_per_s",
        "mfu",
        "prompts_issued",
        "prompts_in_flight",
        "samplers",
        "sampler_idle",
    )
    return [{k: v for k, v in record.items() if not k.endswith(clocks)} for record in records]


def test_train_writes_everything_and_the_books_balance(tiny, jaxrl, records):
    run = tiny.parent / "run"
    status, out, err = jaxrl("train", tiny, "rollout.max_lag=2", "train.steps=8", "--run-dir", run)
    assert status == 0, err
    for name in ("config.yaml", "environment.json", "state.json", "fit.json", "report.html", "checkpoints"):
        assert (run / name).exists(), name
    assert list((run / "events").iterdir())
    assert json.loads((run / "environment.json").read_text())["attention"] == "xla (auto on cpu)"
    steps, evaluations = records(run, "metrics"), records(run, "eval")
    assert [event["event"] for event in records(run, "events")] == ["joined"]
    assert [r["step"] for r in steps] == list(range(1, 9))
    assert [r["step"] for r in evaluations] == [0, 2, 4, 6, 8]
    for record in steps:
        settled = record["prompts_trained"] + sum(record["prompts_dropped"].values())
        assert record["prompts_issued"] == settled + record["prompts_in_flight"]
        assert settled == 2 * record["step"]
        assert record["lag_max"] <= record["lag_bound"] == 2
    assert all(record["mismatch_max"] < 1e-4 for record in evaluations)
    status, out, _ = jaxrl("summary", run, "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts.keys() >= SUMMARY_KEYS
    assert (facts["state"], facts["steps"], facts["metric"]) == ("finished", 8, "mean@2")
    assert jaxrl("summary", run)[0] == 0
    status, out, _ = jaxrl("fit", run, "--json", "-")
    assert status == (0 if json.loads(out)["params"] else 2)  # so short a run may have nothing to fit
    assert jaxrl("report", run)[0] == 0
    # The same command on a finished run changes nothing; another config is refused.
    again = jaxrl("train", tiny, "rollout.max_lag=2", "train.steps=8", "--run-dir", run)
    assert again[0] == 0
    assert records(run, "metrics") == steps
    status, _, err = jaxrl("train", tiny, "rollout.max_lag=2", "train.steps=8", "seed=1", "--run-dir", run)
    assert (status, err.count("\n")) == (2, 1)
    assert "belongs to another config (seed: 0 -> 1)" in err


def test_a_frozen_policy_never_drifts_from_its_sampler(tiny, jaxrl, records, monkeypatch):
    """Reported of other stacks: lr 0 with pushes at every step, and samples as old as the bound allows."""
    hand_out = RolloutWorker.next_groups

    def when_every_slot_is_taken(worker):
        # As a trainer finds it that is slower than its sampler; on this policy either may be the faster one.
        deadline = time.monotonic() + 60
        while worker.exchange._coordinator.outstanding < 6:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return hand_out(worker)

    monkeypatch.setattr(RolloutWorker, "next_groups", when_every_slot_is_taken)
    run = tiny.parent / "run"
    options = ["optimizer.lr=0", "rollout.max_lag=2", "rollout.ready_batches=3", "train.steps=12"]
    options += ["rollout.temperature=0.7", "eval.temperature=0.7"]  # at 1 nobody would see one that is left out
    status, _, err = jaxrl("train", tiny, *options, "--run-dir", run)
    assert status == 0, err
    steps, evaluations = records(run, "metrics"), records(run, "eval")
    assert [r["lag_max"] for r in steps[:3]] == [0, 1, 2]  # the slots' groups, all admitted at version 0
    assert all(1 <= r["lag_max"] <= 2 for r in steps[3:])
    for mismatch in ([r["log_ratio_max"] for r in steps], [r["mismatch_max"] for r in evaluations]):
        assert max(mismatch) < 1e-4
        half = len(mismatch) // 2
        assert max(mismatch[half:]) < 2 * max(mismatch[:half]) + 1e-6


def test_a_run_with_forced_interruption_trains(tiny, jaxrl, records):
    run = tiny.parent / "run"
    how = ["enabled=true", "lowest=1", "highest=2", "answer_tokens=2", "phrase='='", "end_of_thinking=null"]
    options = [f"rollout.interruption.{option}" for option in how]
    sizes = ["rollout.max_new_tokens=5", "sampler.kv_dtype=int8", "sampler.recompute_kv=true", "train.steps=3"]
    status, _, err = jaxrl("train", tiny, *options, *sizes, "--run-dir", run)
    assert status == 0, err
    assert all(0 < record["interruption_rate"] <= 1 for record in records(run, "metrics"))
    assert all("=" in sample["completion"] or sample["finish"] == "stop" for sample in records(run, "samples"))
    assert all(1e-5 < record["mismatch_max"] < 0.1 for record in records(run, "eval"))  # the int8 cache, declared
    status, _, err = jaxrl("train", tiny, *options, "--run-dir", tiny.parent / "short")
    assert (status, err.count("\n")) == (2, 1)
    assert "= 5 exceeds rollout.max_new_tokens = 3" in err


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_and_ends_as_if_uninterrupted(tiny, jaxrl, records, how):
    """Synchronous (max_lag 0), where nothing depends on a clock: the records are equal to the last bit."""
    arguments = ["train", tiny, "train.steps=12"]
    whole, broken = tiny.parent / "whole", tiny.parent / "broken"
    process = start(*arguments, "--run-dir", broken)
    wait_for_steps(broken, 5, process)
    process.send_signal(how)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130), output
    assert len((broken / "metrics.jsonl").read_text().splitlines()) < 12
    assert jaxrl(*arguments, "--run-dir", broken)[0] == 0
    assert jaxrl(*arguments, "--run-dir", whole)[0] == 0
    for name in ("metrics", "eval", "samples", "sft"):
        for one, other in zip(timeless(records(broken, name)), timeless(records(whole, name)), strict=True):
            different = {key: (one.get(key), other.get(key)) for key in one | other if one.get(key) != other.get(key)}
            assert not different, (name, one["step"])


def test_two_processes_cannot_share_a_run_directory(tiny, jaxrl):
    from jaxrl_llm.metrics import lock_run

    lock = lock_run(tiny.parent / "run")
    status, _, err = jaxrl("train", tiny, "--run-dir", tiny.parent / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert "in use by another process" in err
    lock.close()


def test_reference_critic_and_entropy_coefficient_survive_a_stop(tiny, jaxrl, records):
    recipe = Path(__file__).parents[2] / "configs" / "recipes" / "ppo.yaml"
    more = ["algorithm.updates_per_batch=2", "algorithm.kl.reference_dtype=bfloat16", "algorithm.entropy.target=2.0"]
    arguments = ["train", tiny, f"extends={recipe}", *more, "--run-dir", tiny.parent / "run"]
    status, _, err = jaxrl(*arguments)
    assert status == 0, err
    run = tiny.parent / "run"
    whole = timeless(records(run, "metrics"))
    for name in ("kl_reference_k1", "kl_sampler_k3", "value_loss", "old_ratio_max", "clip_low", "zero_variance"):
        assert name in whole[0], name
    assert whole[0]["entropy_coefficient"] < whole[-1]["entropy_coefficient"]
    assert whole[0]["value_mean"] != whole[-1]["value_mean"]
    # As if killed between the checkpoints of steps 4 and 6.
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    assert jaxrl(*arguments)[0] == 0
    assert timeless(records(run, "metrics")) == whole
    shutil.rmtree(run / "reference")
    status, _, err = jaxrl(*arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert "reference is missing: it holds the weights that algorithm.kl compares with" in err


def test_a_killed_pipeline_loses_no_prompt_and_trains_none_twice(tiny, jaxrl, records):
    arguments = ["train", tiny, "train.steps=12", "rollout.max_lag=2", "rollout.ready_batches=2"]
    run = tiny.parent / "run"
    process = start(*arguments, "--run-dir", run)
    wait_for_steps(run, 5, process)
    process.kill()
    process.communicate(timeout=60)
    assert jaxrl(*arguments, "--run-dir", run)[0] == 0
    steps = records(run, "metrics")
    assert [r["step"] for r in steps] == list(range(1, 13))
    for record in steps:
        settled = record["prompts_trained"] + sum(record["prompts_dropped"].values())
        assert settled == 2 * record["step"]
        assert record["prompts_issued"] == settled + record["prompts_in_flight"]
        assert record["lag_max"] <= 2
    assert [r["step"] for r in records(run, "eval")] == [0, 2, 4, 6, 8, 10, 12]


def test_the_warm_up_alone_and_then_training_is_training(tiny, jaxrl, records):
    whole, parts = tiny.parent / "whole", tiny.parent / "parts"
    assert jaxrl("train", tiny, "--run-dir", whole)[0] == 0
    assert jaxrl("sft", tiny, "--run-dir", parts)[0] == 0
    assert len(records(parts, "sft")) == 150
    assert records(parts, "metrics") == []
    assert jaxrl("train", tiny, "--run-dir", parts)[0] == 0
    state = (parts / "state.json").read_text()
    assert jaxrl("sft", tiny, "--run-dir", parts)[0] == 0  # nothing left to warm up, nothing changed
    assert (parts / "state.json").read_text() == state
    for name in ("sft", "metrics", "eval"):
        assert timeless(records(parts, name)) == timeless(records(whole, name)), name
    losses = [r["loss"] for r in records(whole, "sft")]
    assert losses[-1] < 0.5 * losses[0]
