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
from jaxrl_llm.models.transformer import abstract_params, forward, logical_axes
from jaxrl_llm.sampler.loading import WeightLoader

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
    total = jnp.zeros_like(x)
    for e in range(config.experts):
        gate, up, down = (weights[f"expert_{name}"][e] for name in ("gate", "up", "down"))
        weigh, inside = (jnp.ones_like(p), p) if config.router_gate == "sigmoid_input" else (p, jnp.ones_like(p))
        into = x * inside[:, e : e + 1]
        total += weigh[:, e : e + 1] * ((SILU(into @ gate) * (into @ up)) @ down)
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


MESHES = [{"expert": 2}, {"expert": 4}, {"expert": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "tensor": 4}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("config", [TOP2, SCOUT], ids=["top2", "scout"])
def test_a_mesh_that_splits_experts_changes_nothing(config, axes, cpu_devices):
    mesh = sharding.make_mesh(axes, cpu_devices[: int(np.prod(list(axes.values())))])
    for kind in ("free", "one", "half"):
        weights, x = case(config, kind)
        places = {name: jax.NamedSharding(mesh, sharding.spec(moe.AXES[name])) for name in weights}
        found = with_gradients(config, "groups", mesh)(jax.device_put(weights, places), x)
        assert_same(found, with_gradients(config, "loop")(weights, x))
