"""The training step of a model with experts: the router's losses are what they say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_policy import ADAMW, CISPO, HEAD_CHUNK, OPTIMIZER_CONFIG, TEMPERATURE, documents, make_batch

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.transformer import abstract_params, forward_routed
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.algorithm import Algorithm, Router
from jaxrl_llm.train.state import state_from_params
from jaxrl_llm.train.step import make_train_step

MODEL = ModelConfig(
    layers=2, d_model=16, heads=4, kv_heads=2, head_dim=8, d_ff=12, vocab_size=20, max_context=16, experts=4,
    experts_per_token=2, router_gate="softmax_chosen", shared_expert_d_ff=8, attention_pattern="CN", attention_chunk=4,
)  # fmt: skip
BALANCE, Z = 0.5, 0.125


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: 0.3 * rng.standard_normal(x.shape, np.float32), abstract_params(MODEL))


@functools.cache
def one_device():
    mesh = make_mesh({}, jax.devices()[:1])
    algorithm = Algorithm(CISPO.objective, router=Router(BALANCE, Z))
    how = {"temperature": TEMPERATURE, "head_chunk": HEAD_CHUNK, "remat": "full"}
    return make_train_step(MODEL, ADAMW, algorithm, mesh=mesh, **how)


def one_step(params, batch):
    step = one_device()
    state, found = step(state_from_params(MODEL, ADAMW, mesh=step.mesh, params=params), batch)
    return jax.tree.map(np.asarray, (state, found))


def assert_close(left, right, atol):
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def gradient_of(state):
    moment = next(s for s in state.opt_state if hasattr(s, "mu")).mu
    return jax.tree.map(lambda m: m / (1 - OPTIMIZER_CONFIG.b1), moment)


def test_router_losses_are_means_over_the_updates_tokens_however_it_is_cut_up(params):
    # Without advantages the objective has no gradient: what is left is the router's.
    docs = [doc | {"advantages": 0 * doc["advantages"]} for doc in documents(5)]
    tokens = sum(len(doc["tokens"]) for doc in docs)

    def wanted(params):
        alone = make_batch(docs, microbatches=2)
        rows = [x[:2].reshape(-1, x.shape[-1]) for x in (alone.tokens, alone.positions, alone.segment_ids)]
        _, terms = forward_routed(MODEL, params, *rows)
        means = jnp.stack([jnp.sum(jnp.where(rows[2] != 0, x, 0)) / tokens for x in terms])
        return means @ jnp.array([BALANCE, Z]), means

    gradient, means = jax.jit(jax.grad(wanted, has_aux=True))(params)
    norm = max(np.abs(x).max() for x in jax.tree.leaves(gradient))
    assert norm > 1e-2
    for batch in (make_batch(docs), make_batch(docs, microbatches=4, per_row=2)):
        state, found = one_step(params, batch)
        assert_close(gradient_of(state), gradient, atol=1e-5 * max(norm, 1))
        for name, mean in zip(("router_balance", "router_z"), means, strict=True):
            assert found[name].weight == tokens
            np.testing.assert_allclose(found[name].total / tokens, mean, rtol=1e-5)
        np.testing.assert_allclose(found["loss"], means @ np.array([BALANCE, Z]), rtol=1e-4)
