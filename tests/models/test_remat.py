"""Rematerialisation: the same gradient by every policy, in less and less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.models.transformer import forward, init_params

# Attention scores are the largest array of a layer, and four layers outweigh what one alone needs.
MODEL = ModelConfig(layers=4, d_model=16, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab_size=19, max_context=64)
ROWS = 2 * np.arange(64, dtype=np.int32)[None].repeat(4, 0) % 19
POLICIES = ("none", "dots", "dots_no_batch", "full")


@pytest.fixture(scope="module")
def compiled():
    params = init_params(MODEL, seed=3)
    positions = np.arange(64, dtype=np.int32)[None].repeat(4, 0)

    def program(remat):
        def loss(p):
            return jnp.sum(forward(MODEL, p, ROWS, positions, np.ones_like(ROWS), remat=remat) ** 2)

        return jax.jit(jax.grad(loss)).lower(params).compile()

    return params, {remat: program(remat) for remat in POLICIES}


def test_the_policies_of_the_config_are_these():
    assert TrainConfig.model_json_schema()["properties"]["remat"]["enum"] == list(POLICIES)


def test_every_policy_gives_the_same_gradient(compiled):
    params, programs = compiled
    plain, *others = (program(params) for program in programs.values())
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, other)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(plain)) > 1.0


def test_each_policy_needs_less_memory_than_the_one_before(compiled):
    sizes = [program.memory_analysis().temp_size_in_bytes for program in compiled[1].values()]
    scores = 4 * MODEL.layers * 4 * MODEL.heads * 64 * 64  # bytes of [L B H T T]
    none, dots, dots_no_batch, full = sizes
    assert none - dots > scores / 2
    assert dots - dots_no_batch > scores / 2
    assert dots_no_batch - full > 4 * MODEL.layers * 4 * 64 * MODEL.d_ff  # gate and up
