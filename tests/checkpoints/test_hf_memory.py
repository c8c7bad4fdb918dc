"""What loading a folder costs in host memory, measured in a process of its own (Linux)."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm.checkpoints.hf_config import to_hf_config
from jaxrl_llm.checkpoints.hf_tensors import hf_tensors
from jaxrl_llm.checkpoints.safetensors_file import write_file
from jaxrl_llm.config import ModelConfig

WIDE = {"d_model": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "d_ff": 1024, "layers": 6}
EXPERTS = {"d_model": 512, "heads": 2, "kv_heads": 2, "head_dim": 64, "layers": 1, "vocab_size": 64}
MIXTRAL = {"experts": 2, "experts_per_token": 2, "router_gate": "softmax_chosen", "d_ff": 16384}
LLAMA4 = {"experts": 4, "experts_per_token": 1, "router_gate": "sigmoid_input", "shared_expert_d_ff": 2048}
LARGEST_IS = {
    "the embedding": ({"fsdp": 2, "tensor": 4}, ModelConfig(**WIDE, vocab_size=32768)),
    "a layer's matrix": (
        {"fsdp": 2, "tensor": 4},
        ModelConfig(**WIDE | {"d_ff": 65536, "layers": 1}, vocab_size=64),
    ),
    "an expert's matrix": ({"fsdp": 2, "expert": 2, "tensor": 2}, ModelConfig(**EXPERTS | MIXTRAL)),
    "gates and ups of all experts": (
        {"fsdp": 2, "expert": 2, "tensor": 2},
        ModelConfig(**EXPERTS | LLAMA4 | {"d_ff": 2048}),
    ),
}

LOAD = """
import gc, json, re, sys
from pathlib import Path
import jax
from jaxrl_llm import sharding
from jaxrl_llm.checkpoints.hf import open_hf, read_hf_params
from jaxrl_llm.models.transformer import abstract_params, logical_axes

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

def memory(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

mesh = sharding.make_mesh(json.loads(sys.argv[3]), jax.devices())
def load(path):
    folder = open_hf(path)
    places = sharding.param_shardings(mesh, logical_axes(folder.model), abstract_params(folder.model))
    return jax.block_until_ready(read_hf_params(folder, sys.argv[2], places))

load(sys.argv[1])  # what the programs and their compilation take is not the weights
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = memory("VmRSS")
params = load(sys.argv[1])
# Of every device: an expert axis repeats what is no expert.
sizes = [shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards]
print(json.dumps({"peak": memory("VmHWM") - before, "shards": sum(sizes)}))
"""


def write(path, model):
    tensors = list(hf_tensors(model))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_hf_config(model)))
    rows = [(tensor.name, np.dtype("float32"), tensor.shape) for tensor in tensors]
    write_file(path / "model.safetensors", rows, (np.full(tensor.shape, 0.5, np.float32) for tensor in tensors))
    return max(int(np.prod(tensor.shape)) for tensor in tensors) * 4


@pytest.mark.parametrize("largest_is", LARGEST_IS)
def test_loading_holds_the_shards_and_little_more_than_the_largest_tensor(largest_is, tmp_path):
    mesh, model = LARGEST_IS[largest_is]
    largest = write(tmp_path / "model", model)
    for dtype in ("float32", "bfloat16")[: 1 if model.experts else 2]:
        done = subprocess.run(
            [sys.executable, "-c", LOAD, tmp_path / "model", dtype, json.dumps(mesh)],
            # glibc would keep freed blocks of a few MB for itself.
            capture_output=True, text=True, check=False, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        measured = json.loads(done.stdout)
        beyond = (measured["peak"] - measured["shards"]) / largest
        assert beyond < 1.2, (dtype, measured, largest)
        print(f"{largest_is}, {dtype}: {beyond:.2f} of the largest tensor beyond the shards")
