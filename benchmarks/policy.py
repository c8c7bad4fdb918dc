"""A preset as this project's model, with random weights."""

import jax
import numpy as np
from workload import PRESETS, Work

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.transformer import abstract_params


def model_of(work: Work) -> ModelConfig:
    shape = PRESETS[work.preset]
    return ModelConfig(
        layers=shape.layers,
        d_model=shape.d_model,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        d_ff=shape.d_ff,
        vocab_size=shape.vocab,
        rope_theta=shape.rope_theta,
        max_context=work.prompt_len + work.new,
    )


def random_params(model: ModelConfig):
    rng = np.random.default_rng(0)

    def leaf(path, abstract):
        if "norm" in path[-1].key:
            return np.ones(abstract.shape, np.float32)
        return 0.02 * rng.standard_normal(abstract.shape, np.float32)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(model))
