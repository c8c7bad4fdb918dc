"""The train step with adapters: the same step, with the policy's own weights frozen."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_policy import ADAMW, CISPO, HEAD_CHUNK, MODEL, OPTIMIZER_CONFIG, TEMPERATURE, documents, make_batch

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models.lora import attach, init_adapters, merge, trainable
from jaxrl_llm.models.transformer import abstract_params, logical_axes
from jaxrl_llm.sharding import make_mesh, param_shardings
from jaxrl_llm.train.state import abstract_state, random_state, state_from_params
from jaxrl_llm.train.step import make_score, make_train_step
from jaxrl_llm.types import UserError
from jaxrl_llm.weights import digest

LORA = LoraConfig(rank=2, alpha=3.0)
SPREAD = {"fsdp": 2, "context": 2, "tensor": 2}


@pytest.fixture(scope="module")
def adapters():
    rng = np.random.default_rng(8)
    return jax.tree.map(lambda x: 0.1 * rng.standard_normal(x.shape, np.float32), trainable(MODEL, LORA)[0])


@pytest.fixture(scope="module")
def build(host_params):
    """`build(axes, remat) -> step` that trains adapters on a frozen `host_params`."""

    def made(axes, remat="none"):
        mesh = make_mesh(axes, jax.devices()[: int(np.prod(list(axes.values())))])
        places = param_shardings(mesh, logical_axes(MODEL), abstract_params(MODEL))
        return make_train_step(
            MODEL,
            ADAMW,
            CISPO,
            mesh=mesh,
            temperature=TEMPERATURE,
            head_chunk=HEAD_CHUNK,
            remat=remat,
            lora=LORA,
            base=jax.device_put(host_params, places),
        )

    return made


@pytest.fixture(scope="module")
def step(build):
    """On one device."""
    one = build({"data": 1})
    state = state_from_params(MODEL, ADAMW, mesh=one.mesh, params=init_adapters(MODEL, LORA, 0), lora=LORA)
    return one.compiled(state, make_batch(documents(0)))


@pytest.fixture(scope="module")
def full_step(one_device):
    """The step that trains every weight, compiled, and its new states."""
    step, new_state = one_device
    return step.compiled(new_state(), make_batch(documents(0))), new_state


@pytest.fixture
def start(step, adapters):
    return state_from_params(MODEL, ADAMW, mesh=step.mesh, params=adapters, lora=LORA)


def run(step, state, seeds):
    for seed in seeds:
        state, metrics = step(state, make_batch(documents(seed)))
    return state, metrics


@pytest.fixture(scope="module")
def after_five_steps(step, adapters):
    state = state_from_params(MODEL, ADAMW, mesh=step.mesh, params=adapters, lora=LORA)
    return jax.tree.map(np.asarray, run(step, state, range(5))[0])


def test_the_state_holds_adapters_alone(start, host_params):
    names = {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(start)}
    adam = f"opt_state.{next(i for i, s in enumerate(start.opt_state) if hasattr(s, 'mu'))}"
    own = [f"lora.{target}.{part}" for target in LORA.targets for part in "ab"]
    trees = ("params", f"{adam}.mu", f"{adam}.nu")
    assert names == {f"{tree}.{name}" for tree in trees for name in own} | {"step", f"{adam}.count"}
    numbers = sum(x.size for x in jax.tree.leaves(start))
    assert numbers < 0.5 * sum(x.size for x in jax.tree.leaves(host_params))


def test_the_base_is_bit_equal_after_five_steps(step, after_five_steps, adapters, host_params):
    assert digest(step.base) == digest(host_params)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after_five_steps.params, adapters)
    assert min(jax.tree.leaves(moved)) > 1e-3


def products(compiled):
    """Shapes of all matrix products of a compiled program, leading ones left out."""
    found = re.findall(r"= f32\[([\d,]*)\]\S* (?:dot|custom-call)\(", compiled.as_text())
    return {tuple(int(n) for n in shape.split(",") if n not in ("", "1")) for shape in found}


def test_no_gradient_of_a_frozen_matrix_is_formed(step, full_step):
    # Rows are 8 x 16 = 128 tokens: no activation has the shape of a matrix.
    def is_matrix(shape):
        return tuple(sorted(shape)) in {(20, 32), (16, 32), (32, 32), (32, 48), (4, 8, 32), (2, 8, 32)}

    assert any(map(is_matrix, products(full_step[0].jitted)))
    assert not any(map(is_matrix, products(step.jitted)))


def test_gradients_are_the_full_weights_gradients_by_the_chain_rule(step, start, full_step, adapters, host_params):
    def gradient(step, state):
        state, metrics = step(state, make_batch(documents(0)))
        moment = next(s for s in state.opt_state if hasattr(s, "mu")).mu
        return jax.tree.map(lambda m: np.asarray(m, np.float64) / (1 - OPTIMIZER_CONFIG.b1), moment), metrics

    got, metrics = gradient(step, start)
    full, new_state = full_step
    merged = jax.device_put(merge(host_params, adapters, LORA), jax.devices()[0])
    whole, whole_metrics = gradient(full, replace(new_state(), params=merged))
    np.testing.assert_allclose(metrics["loss"], whole_metrics["loss"], atol=1e-5)
    for target, pair in got["lora"].items():
        a, b = (adapters["lora"][target][part].astype(np.float64) for part in "ab")
        a, b, dw = a.reshape(2, -1, 2), b.reshape(2, 2, -1), whole["layers"][target]
        dw = LORA.scale * dw.reshape(2, a.shape[1], b.shape[2])
        for part, want in (("a", dw @ b.swapaxes(1, 2)), ("b", a.swapaxes(1, 2) @ dw)):
            np.testing.assert_allclose(pair[part].reshape(want.shape), want, atol=2e-6, err_msg=f"{target}.{part}")
            assert np.abs(want).max() > 1e-3


def test_any_mesh_and_rematerialisation_give_the_adapters_of_one_device(build, adapters, after_five_steps):
    spread = build(SPREAD, remat="full")
    state = state_from_params(MODEL, ADAMW, mesh=spread.mesh, params=adapters, lora=LORA)
    q, o = state.params["lora"]["q"], state.params["lora"]["o"]
    assert q["a"].sharding.shard_shape(q["a"].shape) == (2, 16, 2)  # the width over fsdp
    assert q["b"].sharding.shard_shape(q["b"].shape) == (2, 2, 2, 8)  # the heads over tensor
    assert o["a"].sharding.shard_shape(o["a"].shape) == (2, 2, 8, 2)
    got, _ = run(spread, state, range(5))
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got.params), jax.tree.leaves(after_five_steps.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_a_restart_goes_on_bit_by_bit(step, start, after_five_steps, tmp_path):
    CheckpointStore(tmp_path, keep=1).save(2, run(step, start, range(2))[0], {}, {})
    abstract = abstract_state(MODEL, ADAMW, mesh=step.mesh, lora=LORA)
    state = CheckpointStore(tmp_path, keep=1).restore_latest(abstract, fingerprints={}).state
    got, _ = run(step, state, range(2, 5))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(after_five_steps), strict=True):
        assert np.asarray(a).tobytes() == b.tobytes(), jax.tree_util.keystr(path)
    with pytest.raises(UserError, match=r"has no array"):
        CheckpointStore(tmp_path, keep=1).restore_latest(abstract_state(MODEL, ADAMW, mesh=step.mesh), fingerprints={})


def test_a_seed_draws_the_same_adapters_on_every_mesh():
    mesh = make_mesh(SPREAD, jax.devices())
    state = random_state(MODEL, ADAMW, mesh=mesh, seed=3, lora=LORA)
    jax.tree.map(np.testing.assert_array_equal, state.params, init_adapters(MODEL, LORA, 3))
    abstract = abstract_state(MODEL, ADAMW, mesh=mesh, lora=LORA)
    assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(abstract)]


def test_adapters_are_scored_unmerged(step, adapters, host_params):
    batch = make_batch(documents(0))
    rows = [x[0] for x in (batch.tokens, batch.targets, batch.positions, batch.segment_ids)]
    how = {"mesh": step.mesh, "temperature": TEMPERATURE, "head_chunk": HEAD_CHUNK}
    unmerged = make_score(MODEL, **how, lora=LORA, base=step.base)(adapters, *rows)
    score = make_score(MODEL, **how)
    merged = score(merge(host_params, adapters, LORA), *rows)
    np.testing.assert_allclose(unmerged, merged, atol=1e-5)
    plain = score(host_params, *rows)
    assert np.abs(plain - merged).max() > 0.1
    assert attach(None, host_params, None) is host_params


def test_adapters_of_another_shape_are_refused(step, adapters):
    other = LORA.model_copy(update={"rank": 4})
    with pytest.raises(UserError, match=r"\['lora'\]\['down'\]\['a'\] has shape \(2, 48, 2\), the model wants"):
        state_from_params(MODEL, ADAMW, mesh=step.mesh, params=adapters, lora=other)
