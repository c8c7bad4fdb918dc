"""The tiny reward models of tests/data/reward_models.*: their texts, and the folders that hold them."""

import json

import numpy as np
from families import DATA, hf_weights, write_tensors

NAMES = ("llama31", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
PAD = 3
# The third and the fourth end with padding ids, the third has one inside too.
TEXTS = (
    np.random.default_rng(3).integers(0, 64, 40).tolist(),
    np.random.default_rng(4).integers(0, 64, 7).tolist(),
    [5, PAD, 9, 11, PAD, PAD],
    [PAD, PAD],
    np.random.default_rng(5).integers(0, 64, 33).tolist(),
)


def configs():
    return json.loads((DATA / "reward_models.json").read_text())


def write_reward_folder(path, name, **changed):
    """The model `name` as the safetensors library writes it, with fields of config.json changed (None: left out)."""
    # The environment that writes the references has no JAX.
    from jaxrl_llm.checkpoints.hf_config import from_hf_config
    from jaxrl_llm.checkpoints.hf_reward import reward_tensors

    told = configs()[name]
    config = {key: value for key, value in (told["config"] | changed).items() if value is not None}
    labels = ("id2label", "label2id", "num_labels")
    model = from_hf_config({key: value for key, value in told["config"].items() if key not in labels})
    model = model.model_copy(update={"tie_embeddings": True})
    tensors = hf_weights({tensor.name: tensor.shape for tensor in reward_tensors(model)}, told["seed"])
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_tensors(path, tensors)
    return tensors
