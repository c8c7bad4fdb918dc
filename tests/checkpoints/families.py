"""The tiny models of tests/data/families.*: their weights, drawn again, and the folders that hold them."""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

# One document that crosses the sliding windows (5) and the original contexts (8, 16), and a short one.
DOCUMENTS = ("long", "short")
TOKENS = (
    np.random.default_rng(1).integers(0, 64, 24).tolist(),
    np.random.default_rng(2).integers(0, 64, 7).tolist(),
)
DATA = Path(__file__).parents[1] / "data"


def hf_weights(shapes, seed):
    """float32 by name, the same whatever else is asked: scales of norms far from what they are born with."""
    drawn = {}
    for name, shape in shapes.items():
        noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
        drawn[name] = 0.3 * noise + (0.5 if "norm" in name else 0.0)
    return drawn


def configs():
    return json.loads((DATA / "families.json").read_text())


def write_folder(path, name, *, layout="released", shards=1, dtype=np.float32):
    """The model `name` as the safetensors library writes it; returns its tensors by name."""
    # The environment that writes the references has no JAX.
    from jaxrl_llm.checkpoints.hf_config import from_hf_config
    from jaxrl_llm.checkpoints.hf_tensors import hf_tensors

    told = configs()[name]
    model = from_hf_config(told[layout])
    tensors = hf_weights({tensor.name: tensor.shape for tensor in hf_tensors(model)}, told["seed"])
    tensors = {key: value.astype(dtype) for key, value in tensors.items()}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(told[layout]))
    write_tensors(path, tensors, shards)
    return tensors


def write_tensors(path, tensors, shards=1):
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[shard::shards]}
        save_file(part, path / file)
        places |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
