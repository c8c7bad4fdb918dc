import jax
import numpy as np
import pytest
from tiny_policy import ADAMW, MODEL

from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.state import abstract_state, random_state, shardings_of, state_from_params
from jaxrl_llm.types import UserError


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"fsdp": 4, "tensor": 2}, jax.devices())


@pytest.fixture(scope="module")
def state(mesh):
    return random_state(MODEL, ADAMW, mesh=mesh, seed=3)


def test_a_seed_gives_the_same_weights_on_every_mesh(state):
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(init_params(MODEL, seed=3)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_moments_live_where_their_parameters_live(state):
    adam = next(s for s in state.opt_state if hasattr(s, "mu"))
    for moment in (adam.mu, adam.nu):
        assert shardings_of(moment) == shardings_of(state.params)
    q = state.params["layers"]["q"]
    assert q.sharding.shard_shape(q.shape) == (2, 8, 2, 8)  # [L D H C], D over fsdp 4, H over tensor 2
    assert adam.count.sharding.is_fully_replicated


def test_the_abstract_state_is_the_real_one_without_its_numbers(state, mesh):
    abstract = abstract_state(MODEL, ADAMW, mesh=mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for a, x in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (x.shape, x.dtype, x.sharding)


def test_the_callers_arrays_are_copied(mesh, host_params):
    mine = jax.tree.map(
        lambda x, s: jax.device_put(x, s), host_params, shardings_of(abstract_state(MODEL, ADAMW, mesh=mesh).params)
    )
    state = state_from_params(MODEL, ADAMW, mesh=mesh, params=mine)
    numpy_params = jax.tree.map(np.copy, host_params)
    from_numpy = state_from_params(MODEL, ADAMW, mesh=mesh, params=numpy_params)
    jax.block_until_ready(from_numpy)
    for x in jax.tree.leaves(numpy_params):
        x[...] = 7.0
    for x in jax.tree.leaves(state.params):
        x.delete()
    for kept in (mine, from_numpy.params):
        for got, want in zip(jax.tree.leaves(kept), jax.tree.leaves(host_params), strict=True):
            np.testing.assert_array_equal(got, want)


def test_optimizer_state_is_float32_for_bfloat16_weights(mesh):
    abstract = abstract_state(MODEL.model_copy(update={"param_dtype": "bfloat16"}), ADAMW, mesh=mesh)
    assert {str(x.dtype) for x in jax.tree.leaves(abstract.params)} == {"bfloat16"}
    assert {str(x.dtype) for x in jax.tree.leaves(abstract.opt_state)} == {"float32", "int32"}


def test_weights_of_another_model_are_refused(mesh, host_params):
    with pytest.raises(UserError, match=r"missing \[\"\['final_norm'\]\"\]"):
        state_from_params(MODEL, ADAMW, mesh=mesh, params={k: v for k, v in host_params.items() if k != "final_norm"})
    other = host_params | {"embed": np.zeros((21, 32), np.float32)}
    with pytest.raises(UserError, match=r"embed.*\(21, 32\).*\(20, 32\)"):
        state_from_params(MODEL, ADAMW, mesh=mesh, params=other)
    with pytest.raises(UserError, match=r"layers.k: kv_heads 2 does not divide over tensor 4"):
        abstract_state(MODEL, ADAMW, mesh=make_mesh({"tensor": 4}, jax.devices()[:4]))
