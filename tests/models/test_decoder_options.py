"""What each declared option of the decoder promises; tests/checkpoints holds whole families to their reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sharding
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.logprobs import soft_cap, token_logprobs
from jaxrl_llm.models.flops import matmul_params
from jaxrl_llm.models.quantised import Int8Weight, is_matrix
from jaxrl_llm.models.transformer import abstract_params, forward, init_params, logical_axes
from jaxrl_llm.sampler.loading import WeightLoader
from jaxrl_llm.train.optimizer import decayed

EVERYTHING = ModelConfig(
    layers=3, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab_size=20, max_context=16,
    attention_pattern="LG", window=3, local_rope_theta=100.0, rope_theta=1000.0, qk_norm=True, qkv_bias=True,
    query_pre_attn_scalar=12, attention_softcap=2.0, final_softcap=8.0, activation="gelu_tanh", post_norms=True,
    unit_offset_norms=True, scale_embeddings=True, rope_scaling={"kind": "linear", "factor": 2},
)  # fmt: skip
T = 16


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape, np.float32)), abstract_params(config))


@pytest.fixture(scope="module")
def params():
    return random_params(EVERYTHING)


def packed(documents):
    tokens, positions, segments = (np.zeros((1, T), np.int32) for _ in range(3))
    at = 0
    for segment, document in enumerate(documents, 1):
        part = slice(at, at + len(document))
        tokens[0, part], positions[0, part], segments[0, part] = document, range(len(document)), segment
        at += len(document)
    return tokens, positions, segments


def test_a_local_layer_sees_its_window_inside_its_document_and_no_further():
    one_local = ModelConfig(
        layers=1, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=16, vocab_size=20, attention_pattern="L", window=3
    )
    weights = random_params(one_local)
    run = jax.jit(lambda t, p, s: forward(one_local, weights, t, p, s))
    first, second = [5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]
    base = run(*packed([first, second]))[0, 3:]
    for changed in range(8):
        other = list(second)
        other[changed] = 19
        moved = np.abs(run(*packed([first, other]))[0, 3:] - base).max(axis=-1)[: len(second)] > 1e-4
        assert np.flatnonzero(moved).tolist() == [at for at in range(8) if changed <= at < changed + 3]
    alone = run(*packed([second]))[0, : len(second)]
    np.testing.assert_allclose(base[: len(second)], alone, atol=1e-6)


def test_a_mesh_changes_nothing(params, cpu_devices):
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, cpu_devices)
    places = sharding.param_shardings(mesh, logical_axes(EVERYTHING), abstract_params(EVERYTHING))
    assert places["layers"]["q_bias"].spec == jax.sharding.PartitionSpec(None, "tensor", None)
    row = np.arange(T, dtype=np.int32)[None]
    run = jax.jit(lambda p: forward(EVERYTHING, p, row, row, np.ones_like(row)))
    np.testing.assert_allclose(run(jax.device_put(params, places)), run(params), atol=2e-5)


def test_biases_and_norms_are_neither_quantised_nor_decayed(params, cpu_devices):
    mesh = sharding.make_mesh({"data": 1, "tensor": 2}, cpu_devices[:2])
    matrices = {"q", "k", "v", "o", "gate", "up", "down"}
    for unstack in (False, True):
        loaded = WeightLoader(EVERYTHING, mesh, dtype="float32", int8=True, unstack=unstack).load(params)
        layer = loaded["layers"][1] if unstack else jax.tree.map(lambda x: x[1], loaded["layers"])
        assert {name for name, leaf in layer.items() if isinstance(leaf, Int8Weight)} == matrices
        np.testing.assert_array_equal(layer["k_bias"], params["layers"]["k_bias"][1])
    assert {name for name, yes in decayed(params)["layers"].items() if yes} == matrices
    assert not decayed(params)["final_norm"]


def test_new_weights_start_as_the_identity():
    fresh = init_params(EVERYTHING, seed=0)
    for name, leaf in fresh["layers"].items():
        assert bool(jnp.all(leaf == 0)) == name.endswith(("norm", "bias")), name


def test_flops_count_every_matrix_and_the_head():
    sizes = jax.tree.map(lambda x: x.size, abstract_params(EVERYTHING))
    axes = logical_axes(EVERYTHING)["layers"]
    matrices = sum(size for name, size in sizes["layers"].items() if is_matrix(axes[name]))
    assert matmul_params(EVERYTHING) == matrices + sizes["embed"]  # tied: the embedding multiplies as the head


def test_capped_logits_have_the_formulas_values_and_gradients():
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((7, 8), np.float32) * 2, rng.standard_normal((11, 8), np.float32)
    targets, weights = rng.integers(0, 11, 7), rng.standard_normal((2, 7), np.float32)

    def ours(h, w):
        return jnp.sum(weights * jnp.stack(token_logprobs(h, w, targets, temperature=0.7, chunk=3, softcap=2.5)))

    def formula(h, w):
        logp = jax.nn.log_softmax(2.5 * jnp.tanh(h @ w.T / 2.5) / 0.7)
        chosen = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
        return jnp.sum(weights * jnp.stack([chosen, -jnp.sum(jnp.exp(logp) * logp, axis=1)]))

    for got, wanted in zip(
        jax.tree.leaves(jax.value_and_grad(ours, (0, 1))(hidden, head)),
        jax.tree.leaves(jax.value_and_grad(formula, (0, 1))(hidden, head)),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_a_cap_bounds_and_keeps_small_numbers():
    x = jnp.array([-1e9, -0.001, 0.0, 1.0, 1e9])
    np.testing.assert_allclose(soft_cap(x, 5.0), [-5, -0.001, 0, 5 * np.tanh(0.2), 5], rtol=1e-5)
    assert soft_cap(x, None) is x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_pattern": "LG"}, "need a window"),
        ({"window": 3}, "needs local layers"),
        ({"attention_pattern": "LGX", "window": 3}, "pattern"),
        ({"attention_pattern": "LGGG", "window": 3}, "longer than the 2 layers"),
        ({"local_rope_theta": 100.0}, "no local layer"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**change)
