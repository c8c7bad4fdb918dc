"""Updates that are left out because their gradient is far larger than usual."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_policy import ADAMW, CISPO, HEAD_CHUNK, MODEL, TEMPERATURE, documents, make_batch

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.spikes import SpikeRule, judge, no_norms
from jaxrl_llm.train.state import abstract_state, shardings_of, state_from_params
from jaxrl_llm.train.step import make_train_step

RULE = SpikeRule(3.0, warmup=2, memory=4, patience=3)
DECAY = 0.75


def heard(norms, rule=RULE):
    """Which norms were taken for spikes, and the record after them."""
    record, spikes = no_norms(), []
    for norm in norms:
        spike, applied, refused = judge(record, jnp.float32(norm), rule)
        record = refused if spike else applied
        spikes.append(bool(spike))
    return spikes, record


def test_the_mean_of_applied_norms_worked_by_hand():
    # 1, 3: mean 2. 6.1 exceeds 3 x 2, 6 does not: 2 + 4/3. 2: 10/3 - (4/3)/4 = 3. 7, the fifth, counts as a fourth: 4.
    spikes, record = heard([1, 3, 6.1, 6, 2, 7])
    assert spikes == [False, False, True, False, False, False]
    np.testing.assert_allclose(record.mean, 4.0, rtol=1e-6)
    assert (int(record.applied), int(record.refused)) == (5, 0)


def test_nothing_is_a_spike_before_the_warm_up_is_over():
    assert heard([1, 100, 1e6]) == ([False, False, True], heard([1, 100, 1e6])[1])
    assert heard([1e-9, 1.0])[0] == [False, False]


def test_larger_gradients_that_stay_are_taken_for_how_things_are_now():
    spikes, record = heard([1, 1, 1, *[100] * 6])
    assert spikes == [False] * 3 + [True, True] + [False] * 4
    assert float(record.mean) == 100.0
    assert int(record.applied) == 4  # the third of them began the statistic anew
    # With a normal one between them they are spikes all the same: none is in the mean.
    spikes, record = heard([1, 1, *[100, 100, 1] * 3])
    assert spikes == [False, False, *[True, True, False] * 3]
    assert float(record.mean) == 1.0


def test_a_gradient_of_zero_says_nothing():
    spikes, record = heard([0, 0, 0, 0, 5, 5, 0, 14])
    assert spikes == [False] * 8
    assert int(record.applied) == 3


@pytest.fixture(scope="module")
def step():
    mesh = make_mesh({"data": 2, "fsdp": 2}, jax.devices()[:4])
    how = {"mesh": mesh, "temperature": TEMPERATURE, "head_chunk": HEAD_CHUNK, "remat": "none"}
    made = make_train_step(MODEL, ADAMW, CISPO, spikes=RULE, ema=DECAY, **how)
    return made.compiled(abstract_state(MODEL, ADAMW, **beside(mesh)), make_batch(documents(0)))


def beside(mesh):
    return {"mesh": mesh, "watches_norms": True, "averages": True}


@pytest.fixture
def state(step, host_params):
    return state_from_params(MODEL, ADAMW, params=host_params, **beside(step.mesh))


def host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_bit_equal(left, right):
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def batch(seed, heavier=1.0):
    """A batch in which one token weighs `heavier` times what it should."""
    made = make_batch(documents(seed))
    weights = made.token_weights.copy()
    weights[tuple(np.argwhere(weights != 0)[0])] *= heavier
    return made.replace(token_weights=weights)


def test_a_planted_spike_changes_nothing_and_the_next_update_is_applied(step, state):
    for seed in range(3):
        state, metrics = step(state, batch(seed))
        assert float(metrics["skipped_spikes"]) == 0.0
    before = host(state)
    state, metrics = step(state, batch(3, heavier=1e6))
    assert (float(metrics["skipped_spikes"]), float(metrics["skipped"]), float(metrics["update_norm"])) == (1, 0, 0)
    assert float(metrics["grad_norm"]) > 3 * float(metrics["grad_norm_usual"]) == 3 * before.norms.mean > 0
    assert_bit_equal(
        replace(state, step=0, norms=0), replace(before, step=0, norms=0)
    )  # weights, moments, count and average
    assert_bit_equal(state.norms, replace(before.norms, refused=np.int32(1)))
    state, metrics = step(state, batch(4))
    assert (float(metrics["skipped_spikes"]), int(state.norms.refused), int(state.norms.applied)) == (0, 0, 4)
    assert float(metrics["update_norm"]) > 0


def test_gradients_that_stay_larger_do_not_lock_training_up(step, state):
    skipped = []
    for seed in range(8):
        state, metrics = step(state, batch(seed, heavier=1.0 if seed < 3 else 1e6))
        skipped.append(float(metrics["skipped_spikes"]))
    assert skipped == [0, 0, 0, 1, 1, 0, 0, 0]


def test_a_non_finite_update_is_no_spike_and_is_not_recorded(step, state):
    state, _ = step(state, batch(0))
    before = host(state.norms)
    state, metrics = step(state, batch(1, heavier=np.nan))
    assert (float(metrics["skipped"]), float(metrics["skipped_spikes"])) == (1, 0)
    assert_bit_equal(state.norms, before)


def test_the_average_is_worked_out_after_every_update_and_lives_where_the_weights_live(step, state, host_params):
    assert shardings_of(state.ema) == shardings_of(state.params)
    want = jax.tree.map(np.float64, host_params)
    for seed in range(3):
        state, _ = step(state, batch(seed))
        want = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * np.asarray(p), want, state.params)
    for (path, a), b in zip(jax.tree.leaves_with_path(state.ema), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    moved = np.abs(np.asarray(state.ema["embed"]) - np.asarray(state.params["embed"])).max()
    assert moved > 1e-4


def test_spikes_and_average_survive_a_restart(step, state, tmp_path, host_params):
    order = [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1e6), (4, 1e6), (5, 1e6), (6, 1.0)]
    for seed, heavier in order[:4]:
        state, _ = step(state, batch(seed, heavier))
    store = CheckpointStore(tmp_path, keep=1)
    store.save(4, state, {}, {})
    restored = store.restore_latest(abstract_state(MODEL, ADAMW, **beside(step.mesh)), fingerprints={}).state
    skipped = []
    for seed, heavier in order[4:]:
        state, _ = step(state, batch(seed, heavier))
        restored, metrics = step(restored, batch(seed, heavier))
        skipped.append(float(metrics["skipped_spikes"]))
    assert skipped == [1, 0, 0]
    assert_bit_equal(restored, state)
    average = store.read_params(4, ema=True)
    assert np.abs(average["embed"] - store.read_params(4)["embed"]).max() > 1e-4
