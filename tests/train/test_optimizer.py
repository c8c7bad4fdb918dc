import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.train.optimizer import decayed, learning_rate, make_optimizer


def rates(config, steps, total_steps):
    return [float(learning_rate(config, n, total_steps=total_steps)) for n in steps]


def test_warm_up_reaches_the_rate_at_its_last_step():
    config = OptimizerConfig(lr=0.8, warmup_steps=4)
    np.testing.assert_allclose(rates(config, [1, 2, 3, 4, 5, 90], 100), [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rtol=1e-6)


def test_no_warm_up_starts_at_the_rate():
    assert rates(OptimizerConfig(lr=0.5, warmup_steps=0), [1, 2], 10) == [0.5, 0.5]


def test_decay_mirrors_the_warm_up():
    config = OptimizerConfig(lr=0.8, warmup_steps=2, decay_steps=4)
    np.testing.assert_allclose(
        rates(config, range(1, 10), 8), [0.4, 0.8, 0.8, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0], rtol=1e-6, atol=1e-9
    )
    # Overlapping ramps: the smaller counts.
    config = OptimizerConfig(lr=0.8, warmup_steps=4, decay_steps=4)
    np.testing.assert_allclose(rates(config, range(1, 6), 5), [0.2, 0.4, 0.6, 0.4, 0.2], rtol=1e-6)


def test_only_matrices_decay():
    leaf = np.zeros((2, 3))
    tree = {"embed": leaf, "final_norm": leaf[0], "layers": {"attn_norm": leaf, "q": leaf, "mlp_norm": leaf}}
    assert decayed(tree) == {
        "embed": True,
        "final_norm": False,
        "layers": {"attn_norm": False, "q": True, "mlp_norm": False},
    }


def numpy_adamw(config, params, gradients, rates):
    """AdamW as published, in float64."""
    m = {k: np.zeros_like(p) for k, p in params.items()}
    v = {k: np.zeros_like(p) for k, p in params.items()}
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        if config.clip_norm is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
            gradient = {k: g * min(1.0, config.clip_norm / norm) for k, g in gradient.items()}
        for k, g in gradient.items():
            m[k] = config.b1 * m[k] + (1 - config.b1) * g
            v[k] = config.b2 * v[k] + (1 - config.b2) * g**2
            update = m[k] / (1 - config.b1**t) / (np.sqrt(v[k] / (1 - config.b2**t)) + config.eps)
            decay = 0.0 if k == "norm" else config.weight_decay
            params[k] = params[k] - rate * (update + decay * params[k])
    return params


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_updates_are_those_of_adamw(clip_norm):
    config = OptimizerConfig(lr=0.1, warmup_steps=3, decay_steps=2, weight_decay=0.2, clip_norm=clip_norm)
    optimizer = make_optimizer(config, total_steps=5)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(2, 3)), "norm": np.ones(3)}
    gradients = [{k: rng.normal(size=p.shape) for k, p in params.items()} for _ in range(5)]
    gradients[1] = {k: 1e-9 * g for k, g in gradients[1].items()}

    got = jax.tree.map(jnp.float32, params)
    state = optimizer.init(got)
    for n, gradient in enumerate(gradients, 1):
        updates, state = optimizer.update(jax.tree.map(jnp.float32, gradient), state, got, step=jnp.int32(n))
        got = jax.tree.map(jnp.add, got, updates)

    # rates by hand: warm-up 1/3, 2/3, 1; decay over steps 4 and 5: 1, 1/2
    want = numpy_adamw(config, params, gradients, [0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.05])
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_a_tiny_gradient_is_not_lost_in_epsilon():
    # eps 1e-15 leaves Adam scale-free: gradients of 1e-9 move the weights as far as gradients of 1.
    optimizer = make_optimizer(OptimizerConfig(lr=1.0, warmup_steps=0, weight_decay=0.0), total_steps=1)
    params = {"w": jnp.zeros(2)}
    updates, _ = optimizer.update({"w": jnp.array([1e-9, -1.0])}, optimizer.init(params), params, step=jnp.int32(1))
    np.testing.assert_allclose(updates["w"], [-1.0, 1.0], rtol=1e-5)
