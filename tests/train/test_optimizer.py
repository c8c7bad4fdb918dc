import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import ModelConfig, OptimizerConfig
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.optimizer import decayed, for_batch, learning_rate, make_optimizer, matrix_axes
from jaxrl_llm.train.state import abstract_state


def rates(config, steps, total_steps):
    """As the record has them; those of the step on the device are the same."""
    on_host = [learning_rate(config, n, total_steps=total_steps) for n in steps]
    assert not any(isinstance(rate, jax.Array) for rate in on_host)  # which would wait for the device
    on_device = [learning_rate(config, jnp.int32(n), total_steps=total_steps) for n in steps]
    np.testing.assert_allclose(on_host, on_device, rtol=1e-6, atol=1e-9)
    return [float(rate) for rate in on_host]


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


def test_cosine_decay_and_its_floor_worked_by_hand():
    config = OptimizerConfig(lr=1.0, warmup_steps=0, decay_steps=4, decay_shape="cosine", lr_floor=0.2)
    # (1 + cos(pi (1 - x))) / 2 at x = 1, 3/4, 1/2, 1/4, 0, then .2 + .8 of it
    shares = [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]
    np.testing.assert_allclose(rates(config, range(5, 10), 8), [0.2 + 0.8 * x for x in shares], rtol=1e-6)
    linear = config.model_copy(update={"decay_shape": "linear"})
    np.testing.assert_allclose(rates(linear, range(5, 10), 8), [1.0, 0.8, 0.6, 0.4, 0.2], rtol=1e-6)


def test_the_rate_grows_with_the_root_of_the_batch():
    # IsoCompute: 1e-6 sqrt(B / 1024); 512 completions give 7.07e-7
    config = OptimizerConfig(lr=1e-6, lr_batch=1024, warmup_steps=0)
    np.testing.assert_allclose(rates(for_batch(config, 512), [3], 10), [7.0710678e-7], rtol=1e-6)
    assert for_batch(OptimizerConfig(lr=0.3), 512).lr == 0.3
    with pytest.raises(ValueError, match="lr 1e-06 is meant for 1024 completions"):
        rates(config, [3], 10)


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


MODEL = ModelConfig(layers=2, d_model=16, heads=4, kv_heads=2, head_dim=8, d_ff=24, vocab_size=20)


def drawn(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), abstract_params(MODEL))


def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adamw():
    config = OptimizerConfig(kind="muon", lr=1.0, warmup_steps=0, weight_decay=0.0)
    params, gradients = drawn(0), drawn(1)
    optimizer, adamw = (
        make_optimizer(config.model_copy(update={"kind": kind}), total_steps=9) for kind in ("muon", "adamw")
    )
    moved, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p, step=1))(gradients, params)
    plain, _ = jax.jit(lambda g, p: adamw.update(g, adamw.init(p), p, step=1))(gradients, params)
    for name in ("embed", "final_norm"):
        np.testing.assert_allclose(moved[name], plain[name], rtol=1e-6)
    sides = {"q": (16, 32), "k": (16, 16), "o": (32, 16), "gate": (16, 24), "down": (24, 16)}
    for name, (inputs, outputs) in sides.items():
        for layer in range(MODEL.layers):
            matrix = np.asarray(moved["layers"][name][layer]).reshape(inputs, outputs)
            gradient = np.asarray(gradients["layers"][name][layer]).reshape(inputs, outputs)
            u, singular, vt = np.linalg.svd(gradient, full_matrices=False)
            scale = 0.2 * np.sqrt(max(inputs, outputs))
            # Five Newton-Schulz steps bring singular values near 1 (the published range), and turn nothing.
            found = -np.einsum("ik,ij,kj->k", u, matrix / scale, vt)
            assert ((found > 0.6) & (found < 1.25)).all(), (name, singular)
            np.testing.assert_allclose(-(matrix / scale), u * found @ vt, atol=2e-3)


def test_muons_momentum_is_what_it_remembers():
    params, first, second = drawn(0), drawn(1), drawn(2)

    def second_update(momentum):
        config = OptimizerConfig(kind="muon", lr=1.0, warmup_steps=0, weight_decay=0.0, momentum=momentum)
        optimizer = make_optimizer(config, total_steps=9)

        @jax.jit
        def both(params):
            _, state = optimizer.update(first, optimizer.init(params), params, step=1)
            return optimizer.update(second, state, params, step=2)[0], optimizer.update(
                second, optimizer.init(params), params, step=2
            )[0]

        after, fresh = both(params)
        return np.asarray(after["layers"]["q"]), np.asarray(fresh["layers"]["q"])

    forgetful, fresh = second_update(0.0)
    np.testing.assert_allclose(forgetful, fresh, atol=1e-6)
    remembering, fresh = second_update(0.9)
    assert np.abs(remembering - fresh).max() > 0.1


def test_every_layer_matrix_has_inputs_and_outputs():
    axes = matrix_axes(abstract_params(MODEL))
    assert (axes["layers"]["o"], axes["layers"]["q"]) == (((1, 2), (3,)), ((1,), (2, 3)))
    assert {name for name, pair in axes["layers"].items() if pair is None} == {"attn_norm", "mlp_norm"}
    assert axes["embed"] is None
    shape = MODEL.model_dump() | {"experts": 3, "experts_per_token": 1, "router_gate": "softmax"}
    axes = matrix_axes(abstract_params(ModelConfig(**shape | {"shared_expert_d_ff": 8})))["layers"]
    assert axes["expert_up"] == axes["expert_down"] == ((2,), (3,))  # an expert's matrix is its own
    assert axes["shared_down"] == ((1,), (2,))
    assert axes["router"] is None


def test_adafactor_is_its_formula():
    # First step, small matrix, not factored: v = g^2, so the direction is the sign, whose root mean square is 1.
    optimizer = make_optimizer(
        OptimizerConfig(kind="adafactor", lr=0.5, warmup_steps=0, weight_decay=0.0), total_steps=2
    )
    params = {"w": jnp.ones((2, 2)), "big": jnp.ones((128, 256))}
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    updates, state = optimizer.update(gradients, optimizer.init(params), params, step=1)
    np.testing.assert_allclose(updates["w"], -0.5 * np.sign(gradients["w"]), rtol=1e-5)
    square = np.asarray(gradients["big"], np.float64) ** 2
    rows, columns = square.mean(1), square.mean(0)
    direction = gradients["big"] / np.sqrt(np.outer(rows, columns) / rows.mean())
    direction = direction / max(1.0, np.sqrt((direction**2).mean()))
    np.testing.assert_allclose(updates["big"], -0.5 * direction, rtol=2e-4, atol=1e-5)
    sizes = {x.size for x in jax.tree.leaves(state)}
    assert 128 * 256 not in sizes  # a row and a column instead of a matrix


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon"])
def test_optimizer_state_lives_with_its_parameters(kind, cpu_devices):
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, cpu_devices[:4])
    optimizer = make_optimizer(OptimizerConfig(kind=kind, moment_dtype="bfloat16"), total_steps=3)
    state = abstract_state(MODEL, optimizer, mesh=mesh)
    places = {tuple(x.shape): x.sharding.spec for x in jax.tree.leaves(state.params)}
    found = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 1]
    assert found
    for x in found:
        assert x.sharding.spec == places[tuple(x.shape)]
    kinds = {x.dtype.name for x in found}
    assert kinds == {"adamw": {"bfloat16", "float32"}, "adafactor": {"float32"}, "muon": {"bfloat16", "float32"}}[kind]
