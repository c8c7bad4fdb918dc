import jax
import numpy as np
import pytest
from tiny_policy import ADAMW, MODEL, documents, make_batch

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.train.state import abstract_state


@pytest.fixture(scope="module")
def uninterrupted(one_device):
    """(step function, new_state, host state after 5 steps)."""
    step, new_state = one_device
    return step, new_state, run(step, new_state(), range(5))


def run(step, state, seeds):
    for seed in seeds:
        state, _ = step(state, make_batch(documents(seed)))
    return state


def test_steps_before_and_after_a_restart_equal_uninterrupted_ones(uninterrupted, tmp_path):
    step, new_state, want = uninterrupted
    CheckpointStore(tmp_path, keep=1).save(2, run(step, new_state(), range(2)), {"cursor": 2}, {})

    abstract = abstract_state(MODEL, ADAMW, mesh=step.mesh)
    _, state, extras = CheckpointStore(tmp_path, keep=1).restore_latest(abstract, fingerprints={})
    got = run(step, state, range(extras["cursor"], 5))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def test_a_restart_may_change_the_mesh(uninterrupted, build_step, tmp_path):
    step, new_state, want = uninterrupted
    CheckpointStore(tmp_path, keep=1).save(2, run(step, new_state(), range(2)), {}, {})

    spread, _ = build_step((("data", 2), ("fsdp", 2), ("tensor", 2)))
    abstract = abstract_state(MODEL, ADAMW, mesh=spread.mesh)
    state = CheckpointStore(tmp_path, keep=1).restore_latest(abstract, fingerprints={}).state
    got = run(spread, state, range(2, 5))
    for (path, a), b in zip(jax.tree.leaves_with_path(got.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_parameters_are_read_without_the_optimizer(uninterrupted, tmp_path):
    _, _, state = uninterrupted
    store = CheckpointStore(tmp_path, keep=1)
    store.save(5, state, {}, {})
    params = store.read_params(5)
    assert jax.tree.structure(params) == jax.tree.structure(state.params)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)
