"""The train step and the decode step, compiled for accelerators on a machine without any."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.aot]

CONFIG = """
model:
  {layers: 2, d_model: 256, heads: 4, kv_heads: 2, head_dim: 64, d_ff: 512, compute_dtype: bfloat16, max_context: 256}
train: {mesh: {fsdp: 1, tensor: 2}, row_length: 256, microbatch_rows: 4, remat: full}
sampler: {mesh: {data: 1, tensor: 2}, slots: 16, dtype: bfloat16}
rollout: {prompts_per_step: 4, group_size: 4}
"""
# The tokenizer of the addition task has 14 pieces; tensor 2 leaves 7 logits on each device.
HEAD = re.compile(r"= (\w+)\[\d+,7\]\S* ")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def run(config, topology, *overrides):
    """In a process of its own: libtpu and the flags of XLA belong to a whole process."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, Path(__file__).with_name("compile_run.py"), config, topology, *overrides]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)


def compiled(config, topology, *overrides):
    done = run(config, topology, *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    train, decode = json.loads(done.stdout.splitlines()[-1])
    for program in (train, decode):
        print({key: value for key, value in program.items() if key != "products"})
        head = [line for line in program["products"] if HEAD.search(line)]
        assert head, program["products"]
        for line in head:
            assert HEAD.search(line)[1] == "f32"
            assert "operand_precision={highest,highest}" in line
        assert any("bf16[" in line for line in program["products"])
        assert 0 < program["argument_bytes"] < program["peak_bytes"] < 2**28
    return train, decode


def refused(config, topology, *overrides):
    done = run(config, topology, *overrides)
    error = done.stderr.splitlines()[-1]
    assert error.startswith("jaxrl_llm.types.UserError: "), done.stderr[-3000:]
    return error


_LOCAL = ("model.attention_pattern=LG", "model.window=64", "model.attention_softcap=50", "model.local_rope_theta=100")


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("v5e:2x2", ()),
        ("v5e:2x2", _LOCAL),
        ("v5e:2x4", (*_LOCAL, "train.mesh={context: 2, tensor: 2}")),
        ("v5e:2x4", ("train.share_prompts=true", "train.mesh={context: 2, tensor: 2}")),
    ],
    ids=["llama", "local layers and soft cap", "rows in pieces", "shared prompts, rows in pieces"],
)
def test_both_steps_compile_for_a_tpu_with_splash_and_a_float32_head(config, topology, options):
    train, decode = compiled(config, topology, *options)
    # Forward, forward again for the backward pass (remat), backward; each again for every kind of layers, and over a
    # shared prompt.
    times = 2 if options else 1
    fwd, dq, dkv = (f"splash_mha_{kernel}" for kernel in ("fwd", "dq", "dkv"))
    assert sorted(train["splash"]) == sorted([fwd, fwd, dq, dkv] * times)
    assert train["cudnn"] == decode["cudnn"] == []


@pytest.mark.parametrize("splits", ["fsdp", "context"])
def test_both_steps_compile_for_eight_h100_with_cudnn_and_a_float32_head(config, splits):
    train, _ = compiled(config, "h100:8", f"train.mesh={{{splits}: 2, tensor: 2}}", "sampler.mesh={data: 2, tensor: 2}")
    # Forward, forward again for the backward pass (remat), backward.
    assert train["cudnn"] == ["fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"]
    assert not train["splash"]


def test_what_does_not_fit_a_chip_is_said_with_its_figures(config):
    large = ("model.d_model=4096", "model.d_ff=11008", "model.layers=40", "model.heads=32", "model.head_dim=128")
    message = refused(config, "v5e:2x2", *large)
    found = re.search(
        r"the train step does not fit a device of v5e:2x2: it needs ([\d.]+)G of ([\d.]+)G; .*fsdp", message
    )
    assert found, message
    assert float(found[1]) > float(found[2]) > 15
    message = refused(config, "h100:8", *large, "model.layers=80")
    assert re.search(r"the train step does not fit a device of h100:8: it needs 1\d\d\.\d+G of 80.00G; ", message), (
        message
    )


def test_chips_that_make_no_rectangle_are_refused(config):
    small = ("train.mesh={fsdp: 3}", "sampler.mesh={data: 1}", "train.microbatch_rows=6")
    assert "cannot be laid over 3 chips" in refused(config, "v5e:2x2", *small)
    assert "Invalid TPU external name: TPU v9" in refused(config, "v9:2x2")
