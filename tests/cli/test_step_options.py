"""Options of the training step in a whole run: other optimizers on a mesh, the averaged policy, what is recorded."""

import json
import shutil

import jax
import numpy as np
import pytest
from test_train import timeless

from jaxrl_llm.checkpoints.hf import open_hf, read_hf_params
from jaxrl_llm.checkpoints.orbax import CheckpointStore

PARTS = ("trainer_wait_s", "pack_s", "dispatch_s", "publish_s", "device_wait_s", "record_s")
SHORT = ["sft.steps=0", "train.steps=4", "train.mesh={fsdp: 2}", "train.remat=full", "train.gradient_dtype=bfloat16"]
# An untrained policy is always wrong: with a baseline there would be nothing to train on.
SHORT += ["algorithm.zero_variance_filter=false", "algorithm.baseline=none", "algorithm.normalisation=none"]


@pytest.mark.parametrize("kind", ["muon", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_a_run_with_another_optimizer_goes_on_as_if_uninterrupted(kind, tiny, jaxrl, records):
    run = tiny.parent / "run"
    options = [f"optimizer.kind={kind}", "optimizer.skip_norm_factor=3", "train.ema=0.5", "device.peak_flops=1e12"]
    command = ["train", tiny, *SHORT, *options, "--run-dir", run]
    assert jaxrl(*command)[0] == 0
    whole = timeless(records(run, "metrics"))
    assert whole[0]["update_norm"] > 0
    assert [record["skipped_spikes"] for record in whole] == [0] * 4
    store = CheckpointStore(run / "checkpoints", keep=2)
    last = jax.tree.leaves((store.read_params(4), store.read_params(4, ema=True)))
    shutil.rmtree(run / "checkpoints" / "step_00000004")  # as if killed between the checkpoints of steps 2 and 4
    assert jaxrl(*command)[0] == 0
    assert timeless(records(run, "metrics")) == whole
    again = jax.tree.leaves((store.read_params(4), store.read_params(4, ema=True)))
    for one, other in zip(last, again, strict=True):
        np.testing.assert_array_equal(one, other)
    if kind == "muon":
        check_the_average_is_sampled_and_exported(run, store, jaxrl)
        check_what_is_recorded(records(run, "metrics"))


def check_the_average_is_sampled_and_exported(run, store, jaxrl):
    status, _, err = jaxrl("sample", run, "--ema", "--prompt", "1+2=", "--temperature", "0")
    assert status == 0, err
    assert "sampling with the averaged weights of step 4" in err
    assert jaxrl("convert", run, run / "averaged", "--ema")[0] == 0
    average, folder = store.read_params(4, ema=True), open_hf(run / "averaged")
    np.testing.assert_array_equal(read_hf_params(folder, "float32")["layers"]["q"], average["layers"]["q"])
    assert np.abs(average["layers"]["q"] - store.read_params(4)["layers"]["q"]).max() > 0


def check_what_is_recorded(steps):
    for record in steps:
        assert {"grad_norm_attention", "param_norm_mlp", "update_norm_embed", "grad_norm_usual"} <= record.keys()
        assert 0 < record["mfu"] < 1
        assert record["trainer_tokens_per_s"] > 0
        assert "hbm_peak_bytes" not in record  # the CPU backend does not say
        assert abs(sum(record[part] for part in PARTS) - record["step_s"]) < 0.05


def test_the_ablated_head_is_announced_and_recorded(tiny, jaxrl, records):
    run = tiny.parent / "run"
    loud = "ABLATION: model.head_dtype = bfloat16: logits in bfloat16 in trainer and sampler"
    status, out, err = jaxrl("train", tiny, *SHORT[:1], "train.steps=1", "model.head_dtype=bfloat16", "--run-dir", run)
    assert status == 0, err
    assert out.count(loud) == 1
    assert json.loads((run / "environment.json").read_text())["head_dtype"] == "bfloat16"
    assert "Ablation: the output head computed in bfloat16" in (run / "report.html").read_text()
    for record in records(run, "eval"):
        assert record["head_dtype"] == "bfloat16"
        assert record["mismatch_max"] < 0.02  # a step of bfloat16 between 1 and 2 is .008; both sides take it
    status, _, err = jaxrl("sample", run, "--prompt", "1+2=")
    assert (status, err.count(loud)) == (0, 1)


def test_no_average_is_made_up(tiny, jaxrl):
    run = tiny.parent / "run"
    assert jaxrl("train", tiny, "sft.steps=0", "train.steps=1", "--run-dir", run)[0] == 0
    for command in (["sample", run, "--prompt", "1+2="], ["convert", run, run / "averaged"]):
        status, _, err = jaxrl(*command, "--ema")
        assert (status, err.count("\n")) == (2, 1)
        assert "train.ema" in err
    status, _, err = jaxrl("sample", tiny, "--random-weights", "--ema", "--prompt", "1+2=")
    assert (status, err.count("\n")) == (2, 1)
    assert "--ema takes the averaged weights of a run's checkpoint" in err
    status, _, err = jaxrl("convert", tiny, run / "averaged", "--ema")
    assert (status, err.count("\n")) == (2, 1)
    assert "--ema is given, but" in err
