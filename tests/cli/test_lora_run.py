"""A LoRA run from its warm-up to what is sampled, exported and started from again."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxrl_llm.checkpoints.hf import open_hf, read_hf_params
from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.checkpoints.peft import read_peft
from jaxrl_llm.cli.adapters import starting_params
from jaxrl_llm.cli.assemble import assemble
from jaxrl_llm.cli.policy import open_policy
from jaxrl_llm.config import load
from jaxrl_llm.models.lora import merge
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.types import UserError

LORA = ["lora.rank=4", "lora.alpha=8", "sft.lr=1e-2", "optimizer.lr=1e-2"]
# Without the filter every step trains something, so that no record is empty.
KL = ["algorithm.kl.place=loss", "algorithm.kl.coefficient=0.01", "algorithm.zero_variance_filter=false"]
CLOCKS = ("_s", "device_seconds", "tokens_per_s", "prompts_issued", "prompts_in_flight", "samplers", "sampler_idle")


def timeless(records):
    return [{k: v for k, v in record.items() if not k.endswith(CLOCKS)} for record in records]


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_lora_run_trains_resumes_samples_and_leaves(tiny, jaxrl, records):
    run = tiny.parent / "run"
    arguments = ["train", tiny, *LORA, *KL, "--run-dir", run]
    assert jaxrl(*arguments)[0] == 0
    losses, steps = ([r["loss"] for r in records(run, "sft")], records(run, "metrics"))
    assert losses[-1] < 0.3 * losses[0]
    # What the sampler says of merged weights, the trainer says of adapters beside the base.
    assert max(r["mismatch_max"] for r in records(run, "eval")) < 1e-4
    assert max(r["log_ratio_max"] for r in steps) < 1e-4
    # The reference is the policy that RL started from, the warm-up's adapters included.
    kl = [r["kl_reference_k3"] for r in steps]
    assert abs(kl[0]) < 1e-9
    assert kl[-1] > 1e-5

    # Base and adapters apart on disk, together in what is sampled and exported.
    trained, base = (CheckpointStore(run / d, keep=1) for d in ("checkpoints", "base"))
    adapters, weights = trained.read_params(6), base.read_params(0)
    assert sorted(adapters) == ["lora"]
    setup = assemble(load(run / "config.yaml"))
    same(weights, init_params(setup.config.model, 0))
    policy = open_policy(run, (), None, random_weights=False)
    same(policy.params, merge(weights, adapters, setup.config.lora))
    assert np.abs(policy.params["layers"]["q"] - weights["layers"]["q"]).max() > 1e-3
    assert jaxrl("convert", run, run / "hf")[0] == 0
    same(read_hf_params(open_hf(run / "hf")), policy.params)
    assert jaxrl("convert", run, run / "peft", "--adapter", "--step", 4)[0] == 0
    lora, exported = read_peft(run / "peft", setup.config.model)
    assert (lora.rank, lora.alpha) == (4, 8)
    same(exported, trained.read_params(4))
    _, listed, _ = jaxrl("inspect", run)
    assert "lora.q.b  float32  1x4x2x16" in listed

    # As if killed after step 4: the same records again.
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    assert jaxrl(*arguments)[0] == 0
    assert timeless(records(run, "metrics")) == timeless(steps)
    same(trained.read_params(6), adapters)

    # Started from again, under what was exported whole.
    told = [f"model.init={run / 'hf'}", "model.layers=1", f"lora.init={run / 'peft'}"]
    again = assemble(load(tiny, told))
    assert (again.config.lora.rank, again.config.lora.scale) == (4, 2)
    same(starting_params(again), exported)
    started = open_policy(tiny, told, None, random_weights=False).params
    same(jax.tree.map(np.asarray, started), merge(policy.params, exported, again.config.lora))
    with pytest.raises(UserError, match=r"lora\.rank = 8, but .*peft has 4; leave the key out"):
        assemble(load(tiny, [*told, "lora.rank=8"]))
    with pytest.raises(UserError, match="so the adapter is of another rank or of another model"):
        assemble(load(tiny, [told[2], "model.d_ff=48"]))

    status, _, err = jaxrl("sample", run, "lora.alpha=4", "--prompt", "1+1=")
    assert (status, "was trained with another lora than" in err) == (2, True)
    shutil.rmtree(run / "base")
    for command in (["sample", run, "--prompt", "1+1="], ["convert", run, run / "x"], arguments):
        if command is arguments:
            shutil.rmtree(run / "checkpoints" / "step_00000006")
        status, _, err = jaxrl(*command)
        assert (status, "base is missing: it holds the frozen weights under this run's adapters" in err) == (2, True)


def test_an_adapter_alone_needs_a_lora_run(tiny, jaxrl):
    run = tiny.parent / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    CheckpointStore(run / "checkpoints", keep=1).save(0, {"params": {"embed": np.zeros(2)}}, {}, {})
    status, _, err = jaxrl("convert", run, run / "x", "--adapter")
    assert (status, "trained the whole policy (lora.rank = 0)" in err) == (2, True)
    (tiny.parent / "folder").mkdir()
    (tiny.parent / "folder" / "config.json").write_text(json.dumps({}))
    status, _, err = jaxrl("convert", tiny.parent / "folder", run / "x", "--adapter")
    assert (status, "is not a run directory" in err) == (2, True)
