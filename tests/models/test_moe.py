"""Experts in groups against a plain loop over experts: values and gradients, however tokens choose, on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sharding
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models import moe
from jaxrl_llm.models.flops import matmul_params
from jaxrl_llm.models.quantised import Int8Weight
from jaxrl_llm.models.transformer import abstract_params, forward, init_params, logical_axes
from jaxrl_llm.sampler.loading import WeightLoader
from jaxrl_llm.types import UserError

SHAPE = {"d_model": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "d_ff": 12, "vocab_size": 20, "layers": 2}
TOP2 = ModelConfig(**SHAPE, experts=8, experts_per_token=2, router_gate="softmax_chosen")
SCOUT = ModelConfig(**SHAPE, experts=8, experts_per_token=1, router_gate="sigmoid_input", shared_expert_d_ff=12)
SILU = jax.nn.silu
N = 24


def case(config, kind):
    """A layer's weights and tokens that choose freely, all the same experts, or never the last four."""
    rng = np.random.default_rng(0)
    shapes = {name: leaf.shape[1:] for name, leaf in abstract_params(config)["layers"].items() if name in moe.AXES}
    weights = {name: 0.4 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    x = rng.standard_normal((N, 16), np.float32)
    if kind == "one":
        x[:] = x[0]
    if kind == "half":
        x[:, 0], weights["router"][0, 4:] = 1, -50
    return jax.tree.map(jnp.asarray, (weights, x))


def loop(config, weights, x):
    """Every expert on every token, weighed by a gate that is 0 where it was not chosen."""
    logits = jnp.dot(x, weights["router"], precision="highest")
    rank = jnp.argsort(jnp.argsort(-logits, axis=-1), axis=-1)
    chosen = rank < config.experts_per_token
    if config.router_gate.startswith("softmax"):
        p = jnp.where(chosen, jax.nn.softmax(logits, axis=-1), 0)
        if config.router_gate == "softmax_chosen":
            p /= p.sum(axis=-1, keepdims=True)
    else:
        p = jnp.where(chosen, jax.nn.sigmoid(logits), 0)
    weigh, inside = (jnp.ones_like(p), p) if config.router_gate == "sigmoid_input" else (p, jnp.ones_like(p))

    def add_expert(total, at):
        gate, up, down, weigh_N, inside_N = at
        into = x * inside_N[:, None]
        return total + weigh_N[:, None] * ((SILU(into @ gate) * (into @ up)) @ down), None

    experts = tuple(weights[f"expert_{name}"] for name in ("gate", "up", "down"))
    total, _ = jax.lax.scan(add_expert, jnp.zeros_like(x), (*experts, weigh.T, inside.T))
    if config.shared_expert_d_ff:
        total += (SILU(x @ weights["shared_gate"]) * (x @ weights["shared_up"])) @ weights["shared_down"]
    return total


@functools.cache
def with_gradients(config, layer, mesh=None):
    """Jitted (value, gradients of its weighted sum) of a feed-forward layer."""
    weigh = jnp.asarray(np.random.default_rng(9).standard_normal((N, 16), np.float32))

    def total(weights, x):
        y = loop(config, weights, x) if layer == "loop" else moe.feed_forward(config, weights, x, SILU, mesh)[0]
        return jnp.sum(weigh * y), y

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


def assert_same(found, wanted):
    (_, y), gradients = found
    (_, wanted_y), wanted_gradients = wanted
    np.testing.assert_allclose(y, wanted_y, atol=1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(wanted_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("kind", ["free", "one", "half"])
@pytest.mark.parametrize("config", [TOP2, SCOUT], ids=["top2", "scout"])
def test_groups_are_a_loop_over_experts_however_tokens_choose(config, kind):
    weights, x = case(config, kind)
    used = np.unique(moe.route(config, x, weights["router"]).chosen)
    assert len(used) == {"free": 8, "one": config.experts_per_token, "half": 4}[kind]
    assert kind != "half" or max(used) < 4
    assert_same(with_gradients(config, "groups")(weights, x), with_gradients(config, "loop")(weights, x))


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_every_gate_weighs_as_it_says(gate):
    config = ModelConfig(**TOP2.model_dump() | {"router_gate": gate})
    weights, x = case(config, "free")
    assert_same(with_gradients(config, "groups")(weights, x), with_gradients(config, "loop")(weights, x))


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (TOP2, {"expert": 2}),
        (TOP2, {"expert": 4}),
        (TOP2, {"expert": 8}),
        (SCOUT, {"fsdp": 2, "expert": 2, "tensor": 2}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.router_gate,
)
def test_a_mesh_that_splits_experts_changes_nothing(config, axes, cpu_devices):
    mesh = sharding.make_mesh(axes, cpu_devices[: int(np.prod(list(axes.values())))])
    for kind in ("free", "one", "half"):
        weights, x = case(config, kind)
        places = {name: jax.NamedSharding(mesh, sharding.spec(moe.AXES[name])) for name in weights}
        found = with_gradients(config, "groups", mesh)(jax.device_put(weights, places), x)
        assert_same(found, with_gradients(config, "loop")(weights, x))


def test_experts_that_a_mesh_does_not_divide_are_refused(cpu_devices):
    mesh = sharding.make_mesh({"expert": 3}, cpu_devices[:3])
    with pytest.raises(UserError, match=r"layers\.expert_down: experts 8 does not divide over expert 3"):
        sharding.param_shardings(mesh, logical_axes(TOP2), abstract_params(TOP2))


def test_rows_that_a_mesh_does_not_divide_are_filled_up(cpu_devices):
    mesh = sharding.make_mesh({"expert": 4}, cpu_devices[:4])
    weights, x = case(TOP2, "free")
    y = jax.jit(lambda w, x: moe.feed_forward(TOP2, w, x, SILU, mesh)[0])(weights, x[:7])
    np.testing.assert_allclose(y, loop(TOP2, weights, x[:7]), atol=1e-5)


def test_the_router_computes_in_float32_whatever_it_is_given():
    # In bfloat16 the two logits, 1 and 1.0009765625, would be equal and the first expert chosen.
    config = ModelConfig(**SHAPE | {"d_model": 2}, experts=2, experts_per_token=1, router_gate="softmax")
    x, router = jnp.ones((1, 2), jnp.bfloat16), jnp.array([[1, 1], [0, 2**-10]], jnp.bfloat16)
    said = moe.route(config, x, router)
    assert said.logits.dtype == said.gates.dtype == jnp.float32
    assert said.chosen.tolist() == [[1]]


def test_int8_experts_have_a_scale_per_output_and_expert_and_the_router_stays_float32(cpu_devices):
    mesh = sharding.make_mesh({"expert": 2, "tensor": 2}, cpu_devices[:4])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), abstract_params(SCOUT))
    loaded = WeightLoader(SCOUT, mesh, dtype="bfloat16", int8=True, unstack=True).load(params)["layers"][1]
    quantised = {name for name, leaf in loaded.items() if isinstance(leaf, Int8Weight)}
    assert quantised == {"q", "k", "v", "o", *moe.AXES} - {"router"}
    np.testing.assert_array_equal(loaded["router"], params["layers"]["router"][1], strict=True)
    for name, summed in (("expert_up", 1), ("expert_down", 1), ("shared_down", 0)):
        weight, leaf = params["layers"][name][1], loaded[name]
        scale = np.abs(weight).max(axis=summed, keepdims=True) / 127
        np.testing.assert_allclose(leaf.scale, scale, rtol=1e-6)
        assert np.all(np.abs(leaf.values * leaf.scale - weight) <= 0.501 * scale)


def test_flops_count_the_experts_a_token_goes_through():
    sizes = {name: leaf.size // SHAPE["layers"] for name, leaf in abstract_params(SCOUT)["layers"].items()}
    attention = sum(sizes[name] for name in "qkvo")
    shared = sum(sizes[f"shared_{name}"] for name in ("gate", "up", "down"))
    one = sum(sizes[f"expert_{name}"] for name in ("gate", "up", "down")) // 8
    assert matmul_params(SCOUT) == 2 * (attention + shared + one + sizes["router"]) + 20 * 16
    assert matmul_params(TOP2) == 2 * (attention + 2 * one + sizes["router"]) + 20 * 16


def test_every_layer_is_born_with_different_experts():
    params = init_params(TOP2, seed=0)["layers"]["expert_up"]
    flat = np.asarray(params).reshape(16, -1)
    assert len({row.tobytes() for row in flat}) == 16
    np.testing.assert_allclose(flat.std(axis=1), 16**-0.5, rtol=0.25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 4}, "experts_per_token and router_gate are needed"),
        ({"experts_per_token": 2}, "experts_per_token is given, but experts is null"),
        ({"experts": 2, "experts_per_token": 3, "router_gate": "softmax"}, "more than the 2 experts"),
        ({"experts": 1, "experts_per_token": 1, "router_gate": "softmax"}, "greater than 1"),
        ({"attention_pattern": "CG"}, "chunked layers"),
        ({"attention_chunk": 4}, "chunked layers"),
        ({"query_temperature_every": 4}, "together"),
        ({"query_temperature_every": 4, "query_temperature_scale": 0.1}, "no layer without rope"),
    ],
)
def test_keys_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**change)


def test_a_chunked_layer_sees_its_chunk_and_one_without_rope_knows_no_positions():
    row = np.arange(8, dtype=np.int32)[None]
    for pattern, chunk in (("C", 3), ("N", None)):
        config = ModelConfig(**SHAPE | {"layers": 1}, attention_pattern=pattern, attention_chunk=chunk)
        rng = np.random.default_rng(0)
        drawn = jax.tree.map(lambda x, r=rng: 0.3 * r.standard_normal(x.shape, np.float32), abstract_params(config))
        weights = jax.tree.map(jnp.asarray, drawn)
        run = jax.jit(lambda t, p, c=config, w=weights: forward(c, w, t, p, jnp.ones_like(t))[0])
        base = run(row, row)
        for changed in range(8):
            other = row.copy()
            other[0, changed] = 19
            moved = np.flatnonzero(np.abs(run(other, row) - base).max(axis=-1) > 1e-5)
            last = 8 if chunk is None else (changed // chunk + 1) * chunk
            assert moved.tolist() == list(range(changed, min(last, 8)))
        if pattern == "N":
            np.testing.assert_array_equal(run(row, 3 * row), base)
