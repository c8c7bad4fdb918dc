"""launch/local.py: a trainer of two processes and two samplers are one run, with the numbers of one process."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import local
import numpy as np
import pytest
import yaml

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.convert import convert
from jaxrl_llm.cli.training import run_training
from jaxrl_llm.config import load

LAUNCH = Path(__file__).parents[2] / "launch"
# A lag of 0 makes a run the same whoever samples.
TINY = """
device: {platform: cpu, cpu_devices: 2}
model: {layers: 1, d_model: 32, heads: 2, kv_heads: 2, head_dim: 16, d_ff: 64, max_context: 12}
tokenizer: {vocab_size: 32}
data: {sources: [{name: addition, kind: arithmetic, low: 1, high: 9, heldout: 16}]}
algorithm: {no_positive_resampling: null}
rollout: {prompts_per_step: 2, group_size: 4, max_lag: 0, max_prompt_tokens: 4, max_new_tokens: 3}
sampler: {slots: 8, decode_steps: 2}
optimizer: {lr: 1e-3, warmup_steps: 2}
train: {mesh: {data: 2, fsdp: 2}, steps: 3, row_length: 32, microbatch_rows: 4}
sft: {steps: 25, examples_per_step: 8, lr: 2e-2, warmup_steps: 2}
eval: {every: 2, prompts: 16, samples: 2}
checkpoint: {every: 2, keep: 2}
"""


def commands(*words):
    return local.commands(local.parsed(["conf.yaml", "seed=7", *words]))


def test_every_world_gets_the_configuration_and_its_place():
    trainers, samplers = commands("--trainers", "2", "--samplers", "3", "--run-dir", "runs/x")
    assert [c.name for c in trainers + samplers] == ["trainer-0", "trainer-1", "sampler-0", "sampler-1", "sampler-2"]
    assert [c.environment["JAXRL_PROCESS_ID"] for c in trainers] == ["0", "1"]
    assert len({c.environment["JAXRL_COORDINATOR"] for c in trainers}) == 1
    for command in trainers:
        assert command.words[3:] == [
            *("train", "conf.yaml", "seed=7", "sampler.remote.listen=127.0.0.1:0"),
            *("sampler.remote.announce=runs/x/trainer.address", "--run-dir", "runs/x"),
        ]
    for command in samplers:
        assert command.words[3:] == ["sampler", "conf.yaml", "seed=7", "--trainer", "file:runs/x/trainer.address"]
        assert command.environment == {}
    (trainer,), _ = commands()
    assert (trainer.name, trainer.environment) == ("trainer", {})


def test_gpus_are_dealt_out_once():
    trainers, samplers = commands(
        *("--trainers", "2", "--samplers", "2", "--gpus-per-trainer", "2", "--gpus-per-sampler", "1")
    )
    assert [c.environment["CUDA_VISIBLE_DEVICES"] for c in trainers + samplers] == ["0,1", "2,3", "4", "5"]


@pytest.mark.parametrize("words", [("oops",), ("--samplers", "0"), ("--sampler", "2")])
def test_words_that_mean_nothing_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        commands(*words)
    assert "error:" in capsys.readouterr().err


def launched(folder, *words):
    command = [sys.executable, LAUNCH / "local.py", *map(str, words)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(run, name):
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("local") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def together(config):
    """(the run directory of two trainer processes and two samplers, what they said)"""
    run = config.parent / "together"
    with launched(config.parent, config, "--run-dir", run, "--trainers", 2, "--samplers", 2) as process:
        out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    return run, out


@pytest.fixture(scope="module")
def alone(config):
    """The run directory of one process that samples itself."""
    return in_this_process(config, "alone")


def in_this_process(config, name, *overrides):
    run = config.parent / name
    assert run_training(load(config, ["device.cpu_devices=8", *overrides]), run, reinforce=True) == "finished"
    return run


def check_same_run(alone, run):
    for name, numbers in (
        ("metrics", ("reward_mean", "loss", "grad_norm", "update_norm", "entropy", "tokens_generated", "lag_max")),
        ("eval", ("value", "truncation_rate", "prompts")),
        ("sft", ("loss",)),
    ):
        mine, theirs = records(alone, name), records(run, name)
        assert [each["step"] for each in mine] == [each["step"] for each in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert [one[key] for key in numbers] == pytest.approx([other[key] for key in numbers], abs=1e-4)
    assert records(alone, "samples") == records(run, "samples")  # token for token
    # What the samplers said of evaluation's tokens is what the trainer says, within float32.
    assert max(each["mismatch_max"] for each in records(run, "eval")) < 1e-4


def test_several_processes_and_samplers_make_the_same_run_as_one_process(together, alone):
    check_same_run(alone, together[0])
    assert all(record["grad_norm"] > 0 for record in records(alone, "metrics"))


def test_each_process_has_its_log_and_its_end_is_clean(together):
    run, out = together
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
    assert json.loads((run / "environment.json").read_text())["sampler_devices"] == []
    logs = {path.stem: path.read_text() for path in (run / "logs").iterdir()}
    assert logs.keys() == {"trainer-0", "trainer-1", "sampler-0", "sampler-1"}
    assert "finished at step 3 of 3" in logs["trainer-0"]
    assert "held-out" not in logs["trainer-1"]  # process 0 alone speaks
    assert "trainer-0 | finished at step 3 of 3" in out
    assert "launcher |" not in out  # nobody died, nobody was killed
    assert not (run / "trainer.address").exists()
    # Where samplers are is no part of what a run is.
    assert yaml.safe_load((run / "config.yaml").read_text())["sampler"]["remote"]["listen"] is None


@pytest.mark.slow
def test_adapters_on_a_given_checkpoint_train_over_processes_as_in_one(alone, config):
    """`model.init`, LoRA and the frozen reference of a KL penalty, each process with its own part."""
    folder = config.parent / "hf"
    convert(str(alone), folder, dtype=None, step=None, adapter=False, ema=False)
    given = config.with_name("given.yaml")
    given.write_text("\n".join(line for line in TINY.splitlines() if not line.startswith("model:")))
    adapters = (f"model.init={folder}", "lora.rank=4", "algorithm.kl.place=loss", "train.ema=0.9")
    mine = in_this_process(given, "adapters alone", *adapters)
    run = config.parent / "adapters together"
    with launched(config.parent, given, *adapters, "--run-dir", run, "--trainers", 2, "--samplers", 1) as process:
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    check_same_run(mine, run)
    (step,) = CheckpointStore(mine / "checkpoints", keep=2).steps()[-1:]
    for ema in (False, True):
        one, other = (CheckpointStore(r / "checkpoints", keep=2).read_params(step, ema=ema) for r in (mine, run))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), one, other)


@pytest.mark.slow
def test_a_stop_of_the_launcher_saves_and_the_same_command_goes_on(config):
    run = config.parent / "stopped"
    words = (config, "train.steps=60", "rollout.max_lag=2", "--run-dir", run, "--trainers", 2, "--samplers", 2)
    with launched(config.parent, *words) as process:
        path, deadline = run / "metrics.jsonl", time.monotonic() + 600
        while not path.exists() or path.read_text().count("\n") < 5:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 130, out
    assert "is killed" not in out
    state = json.loads((run / "state.json").read_text())
    assert state["state"] == "interrupted"
    with launched(config.parent, *words) as process:
        out, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, out
    assert f"going on from the checkpoint of step {state['step']}" in out
    steps = records(run, "metrics")
    assert [record["step"] for record in steps] == list(range(1, 61))
    # Every group that was issued has one end, and none is trained twice.
    last = steps[-1]
    assert last["prompts_issued"] == (
        last["prompts_trained"] + sum(last["prompts_dropped"].values()) + last["prompts_in_flight"]
    )
    assert max(record["lag_max"] for record in steps) <= 2


@pytest.mark.slow
def test_the_quickstart_reaches_its_target(tmp_path):
    quickstart = LAUNCH.parent / "configs" / "quickstart.yaml"
    words = (quickstart, "train.mesh={data: 2, fsdp: 2}", "--run-dir", tmp_path / "run", "--trainers", 2)
    with launched(tmp_path, *words, "--samplers", 2) as process:
        out, _ = process.communicate(timeout=3600)
    assert process.returncode == 0, out
    values = [each["value"] for each in records(tmp_path / "run", "eval")]
    assert values[0] < 0.5
    assert values[-1] > 0.75
    metrics = records(tmp_path / "run", "metrics")
    assert max(record["lag_max"] for record in metrics) <= 8
    assert {record["samplers"] for record in metrics[10:]} == {2}
