"""The chunked float32 head against the plain one: values, gradients, precision, memory and sharding."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.losses.logprobs import project_f32, token_logprobs

N, D, V = 13, 8, 29


def draw(n=N, d=D, v=V, seed=0):
    rng = np.random.default_rng(seed)
    hidden_ND, head_VD = rng.normal(size=(n, d)), rng.normal(size=(v, d))
    targets_N = rng.integers(0, v, n).astype(np.int32)
    weights_2N = rng.normal(size=(2, n))
    return hidden_ND.astype(np.float32), head_VD.astype(np.float32), targets_N, weights_2N.astype(np.float32)


def by_hand(hidden_ND, head_VD, targets_N, weights_2N, temperature):
    """Values and gradients in float64 from the formulas: d logp = onehot - p, d entropy = -p (log p + entropy)."""
    hidden_ND, head_VD = hidden_ND.astype(np.float64), head_VD.astype(np.float64)
    z_NV = hidden_ND @ head_VD.T / temperature
    z_NV -= z_NV.max(axis=1, keepdims=True)
    logp_NV = z_NV - np.log(np.exp(z_NV).sum(axis=1, keepdims=True))
    p_NV = np.exp(logp_NV)
    entropy_N = -(p_NV * logp_NV).sum(axis=1)
    d_NV = weights_2N[0][:, None] * (np.eye(head_VD.shape[0])[targets_N] - p_NV)
    d_NV -= weights_2N[1][:, None] * p_NV * (logp_NV + entropy_N[:, None])
    values = (logp_NV[np.arange(len(targets_N)), targets_N], entropy_N)
    return values, (d_NV @ head_VD / temperature, d_NV.T @ hidden_ND / temperature)


@functools.cache
def compiled(chunk, shards=1, dtype="float32"):
    def weighted(hidden_ND, head_VD, targets_N, weights_2N, temperature, wanted_N=None):
        how = {"temperature": temperature, "chunk": chunk, "shards": shards, "wanted_N": wanted_N, "dtype": dtype}
        outputs = token_logprobs(hidden_ND, head_VD, targets_N, **how)
        return jnp.sum(weights_2N * jnp.stack(outputs)), outputs

    return jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("chunk", "shards"), [(4, 1), (5, 2), (100, 1)])
def test_chunked_head_equals_the_plain_one_in_values_and_gradients(chunk, shards, temperature):
    arrays = draw()
    values, gradients = by_hand(*arrays, temperature)
    (_, found), found_gradients = compiled(chunk, shards)(*arrays, temperature)
    for got, wanted in zip((*found, *found_gradients), (*values, *gradients), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-5)


def test_gradient_is_that_of_finite_differences():
    hidden_ND, head_VD, targets_N, weights_2N = draw(n=4, d=3, v=5)
    (_, _), (d_hidden_ND, _) = compiled(3)(hidden_ND, head_VD, targets_N, weights_2N, 0.7)

    def objective(hidden):
        return (weights_2N * np.stack(by_hand(hidden, head_VD, targets_N, weights_2N, 0.7)[0])).sum()

    step = 1e-6
    for place in np.ndindex(*hidden_ND.shape):
        move = np.zeros(hidden_ND.shape)
        move[place] = step
        slope = (objective(hidden_ND + move) - objective(hidden_ND - move)) / (2 * step)
        np.testing.assert_allclose(d_hidden_ND[place], slope, atol=1e-5)


@pytest.mark.parametrize(("chunk", "shards"), [(4, 1), (5, 2)])
@pytest.mark.parametrize("wanted", [(), (0,), (12,), (1, 2, 5, 6, 11), range(N)])
def test_only_wanted_tokens_are_worked_out_and_they_come_out_the_same(chunk, shards, wanted):
    hidden_ND, head_VD, targets_N, weights_2N = draw()
    wanted_N = np.isin(np.arange(N), list(wanted))
    values, gradients = by_hand(hidden_ND, head_VD, targets_N, weights_2N * wanted_N, 1.0)
    hidden_ND[~wanted_N] = np.nan  # what nobody wants cannot hurt
    (_, found), found_gradients = compiled(chunk, shards)(hidden_ND, head_VD, targets_N, weights_2N, 1.0, wanted_N)
    for got, all_of_them in zip(found, values, strict=True):
        np.testing.assert_allclose(got, np.where(wanted_N, all_of_them, 0.0), rtol=1e-5, atol=2e-5)
    for got, expected in zip(found_gradients, gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)


def test_temperature_has_no_gradient():
    hidden_ND, head_VD, targets_N, _ = draw()

    def mean(temperature):
        return token_logprobs(hidden_ND, head_VD, targets_N, temperature=temperature, chunk=4)[0].mean()

    assert jax.jit(jax.grad(mean))(0.7) == 0.0


def test_hidden_states_of_unused_tokens_may_be_nan():
    hidden_ND, head_VD, targets_N, weights_2N = draw()
    weights_2N[:, [3, 7]] = 0.0
    _, clean = compiled(4)(hidden_ND, head_VD, targets_N, weights_2N, 1.0)
    hidden_ND[3], hidden_ND[7] = np.nan, np.inf

    # As a step does it: unused outputs are replaced before they are weighted.
    def weighted(hidden_ND, head_VD):
        outputs = jnp.stack(token_logprobs(hidden_ND, head_VD, targets_N, temperature=1.0, chunk=4))
        return jnp.sum(weights_2N * jnp.where(weights_2N == 0, 0.0, outputs))

    found = jax.jit(jax.grad(weighted, (0, 1)))(hidden_ND, head_VD)
    for got, wanted in zip(found, clean, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_vmap_over_batches_equals_one_call_each():
    batches = [draw(seed=s) for s in (1, 2)]
    hidden, head, targets, _ = (jnp.stack(x) for x in zip(*batches, strict=True))
    found = jax.jit(jax.vmap(functools.partial(token_logprobs, temperature=1.0, chunk=4)))(hidden, head, targets)
    for i, arrays in enumerate(batches):
        for got, wanted in zip(found, by_hand(*arrays, 1.0)[0], strict=True):
            np.testing.assert_allclose(got[i], wanted, rtol=1e-5, atol=2e-5)


def test_a_logit_of_minus_infinity_leaves_entropy_and_gradient_finite():
    # Token 2 is impossible; the other two are 1/2 each: entropy ln 2.
    hidden_ND, head_VD = np.ones((1, 1), np.float32), np.array([[0.0], [0.0], [-1e38]], np.float32)
    weights_2N = np.ones((2, 1), np.float32)
    (_, found), gradients = compiled(1)(hidden_ND, head_VD, np.zeros(1, np.int32), weights_2N, 1e-3)
    np.testing.assert_allclose(np.ravel(found), [-math.log(2), math.log(2)], rtol=1e-6)
    assert all(np.isfinite(g[:2]).all() for g in gradients)


@pytest.mark.parametrize("keywords", [{"chunk": 0}, {"chunk": 4, "shards": 0}])
def test_chunk_and_shards_must_be_positive(keywords):
    with pytest.raises(ValueError, match="is 0; it counts"):
        token_logprobs(*draw()[:3], temperature=1.0, **keywords)


# --- the promise of the head: float32, at the highest precision, never all of [N, V]


def dots(text):
    return [line for line in text.splitlines() if "dot_general" in line]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_dot_of_the_head_is_float32_at_the_highest_precision(dtype):
    hidden_ND, head_VD, targets_N, weights_2N = draw()
    hidden_ND, head_VD = jnp.asarray(hidden_ND, dtype), jnp.asarray(head_VD, dtype)
    trainer = compiled(4).lower(hidden_ND, head_VD, targets_N, weights_2N, 1.0)
    sampler = jax.jit(project_f32).lower(hidden_ND, head_VD)
    assert [len(dots(program.as_text())) for program in (trainer, sampler)] == [4, 1]
    for line in dots(trainer.as_text()) + dots(sampler.as_text()):
        assert "precision = [HIGHEST, HIGHEST]" in line, line
        assert re.findall(r"x(f32|bf16|f64)>", line) == ["f32"] * 3, line
    assert jax.eval_shape(project_f32, hidden_ND, head_VD).dtype == jnp.float32


def test_bfloat16_inputs_lose_nothing_beyond_their_own_rounding():
    hidden_ND, head_VD, targets_N, weights_2N = draw()
    hidden_ND, head_VD = jnp.asarray(hidden_ND, jnp.bfloat16), jnp.asarray(head_VD, jnp.bfloat16)
    rounded = (np.asarray(hidden_ND, np.float32), np.asarray(head_VD, np.float32))
    values, gradients = by_hand(*rounded, targets_N, weights_2N, 1.0)
    (_, found), found_gradients = compiled(4)(hidden_ND, head_VD, targets_N, weights_2N, 1.0)
    for got, wanted in zip(found, values, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-5)
    # Accumulated in float32 over the chunks, the head's gradient is rounded to bfloat16 once: half an ulp, 2^-9.
    for got, wanted in zip(found_gradients, gradients, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=2**-8, atol=2e-5)


def bfloat16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def test_the_ablated_head_rounds_factors_and_logits_in_sampler_and_trainer():
    hidden_ND, head_VD, targets_N, weights_2N = draw(n=64)
    hidden, head = bfloat16(hidden_ND), bfloat16(head_VD)
    logits_NV = bfloat16(hidden @ head.T)
    sampler = jax.jit(functools.partial(project_f32, dtype="bfloat16"))
    np.testing.assert_array_equal(sampler(hidden_ND, head_VD), logits_NV)
    # With an identity for a head the logits are its hidden states, whose gradient is that of the logits.
    values, (d_logits_NV, _) = by_hand(logits_NV, np.eye(V), targets_N, weights_2N, 0.7)
    gradients = (bfloat16(d_logits_NV) @ head, bfloat16(d_logits_NV).T @ hidden)
    (_, found), found_gradients = compiled(16, dtype="bfloat16")(hidden_ND, head_VD, targets_N, weights_2N, 0.7)
    for got, wanted in zip(found, values, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-5)
    exact = by_hand(hidden_ND, head_VD, targets_N, weights_2N, 0.7)[1]
    for got, wanted, unrounded in zip(found_gradients, gradients, exact, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-3)
        assert np.abs(got - unrounded).max() > 5e-3


def buffers(text):
    """Elements of every float array named in a compiled program."""
    return {math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b(?:f32|bf16|f64|pred)\[([\d,]+)\]", text)}


def test_logits_of_all_tokens_never_exist_at_once():
    n, v, chunk = 64, 101, 16
    text = compiled(chunk).lower(*draw(n=n, v=v), 1.0).compile().as_text()
    assert chunk * v in buffers(text)
    assert max(buffers(text)) < n * v // 2
    whole = compiled(n).lower(*draw(n=n, v=v), 1.0).compile().as_text()
    assert n * v in buffers(whole)  # the same search finds it where it exists


@pytest.mark.parametrize(
    ("shape", "head_spec"),
    [((8, 1), P()), ((2, 4), P("tensor", None)), ((4, 2), P(None, "tensor"))],
    ids=["8 data", "vocabulary sharded", "width sharded"],
)
def test_sharded_equals_unsharded(cpu_devices, shape, head_spec):
    devices = cpu_devices[: math.prod(shape)]
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    arrays = draw(n=64, v=40)
    specs = (P("data", None), head_spec, P("data"), P(None, "data"))
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    wanted = (np.arange(64) % 3 == 0) | (np.arange(64) < 16)
    rest = (0.8, jax.device_put(wanted, NamedSharding(mesh, P("data"))))
    program = compiled(16, shape[0]).lower(*placed, *rest).compile()
    (_, values), gradients = program(*placed, *rest)
    (_, plain), plain_gradients = compiled(16)(*arrays, 0.8, wanted)
    for got, wanted in zip((*values, *gradients), (*plain, *plain_gradients), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    if head_spec == P():
        # Every device sorts and works on its own tokens: none asks another for hidden states.
        for moved in ("all-gather", "all-to-all", "collective-permute"):
            assert moved not in program.as_text()
        # The head's gradient is added up across devices once, after the loop over chunks.
        inside, outside = program.as_text().split("\nENTRY")
        assert "all-reduce(" not in inside
        assert re.search(r"f32\[8,40\]\S* all-reduce\(", outside)
