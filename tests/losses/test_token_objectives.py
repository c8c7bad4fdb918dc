"""Objectives against the worked numbers, against hand-derived gradients and against finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import objectives
from jaxrl_llm.losses.aggregate import completion_weights

PRECISION = {np.float64: 1e-9, np.float32: 1e-5}


def spread(weights_N, batch):
    """Token weights [B, T] from one weight per completion."""
    return np.where(batch.mask, weights_N[batch.completion], 0.0)


def total(j_BT, batch, kind):
    max_tokens = 16 if kind == "constant" else None
    weights_N = completion_weights(batch.lengths, batch.groups, batch.keep, kind=kind, max_tokens=max_tokens)
    return np.sum(spread(weights_N, batch) * np.asarray(j_BT))


def evaluate(function, batch, dtype, **structure):
    arrays = [x.astype(dtype) for x in (batch.logprobs, batch.old, batch.advantages)]
    with jax.enable_x64(dtype is np.float64):
        j_BT = jax.jit(functools.partial(function, **structure))(*arrays, batch.mask)
        assert j_BT.dtype == dtype
        return np.asarray(j_BT)


WORKED = {
    "clip .2/.2": (
        functools.partial(objectives.ppo, clip_low=0.2, clip_high=0.2),
        [-1.1179799305, -0.5172773714, -1.0398133486, -0.1746843641],
    ),
    "clip .2/.28": (
        functools.partial(objectives.ppo, clip_low=0.2, clip_high=0.28),
        [-1.1099799305, -0.5072773714, -1.0331466820, -0.1734343641],
    ),
    "cispo cap 5": (
        functools.partial(objectives.cispo, ratio_cap=5.0),
        [-0.5532289877, -0.4574455469, -0.3525901266, -0.0864420293],
    ),
    "cispo cap 1.5": (
        functools.partial(objectives.cispo, ratio_cap=1.5),
        [0.0968988852, -0.0511156263, 0.1891831008, 0.0151404508],
    ),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", WORKED)
def test_worked_numbers_of_token_objectives(worked, name, dtype):
    function, expected = WORKED[name]
    j_BT = evaluate(function, worked, dtype)
    found = [total(j_BT, worked, kind) for kind in ("token", "sample", "prompt", "constant")]
    # Half a unit of the tenth decimal comes from the table itself.
    np.testing.assert_allclose(found, expected, rtol=0, atol=PRECISION[dtype])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("function", [objectives.gspo, objectives.gspo_token])
@pytest.mark.parametrize(
    ("clip_low", "clip_high", "expected"), [(0.003, 0.005, -0.3087845336), (3e-4, 4e-4, -0.3099345336)]
)
def test_worked_numbers_of_gspo(worked, function, dtype, clip_low, clip_high, expected):
    j_BT = evaluate(function, worked, dtype, clip_low=clip_low, clip_high=clip_high, **worked.structure)
    np.testing.assert_allclose(total(j_BT, worked, "sample"), expected, rtol=0, atol=PRECISION[dtype])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_worked_sequence_ratios_of_gspo(worked, dtype):
    # With clipping out of reach and A = 1, J is the sequence's ratio.
    batch = type(worked)(**{**vars(worked), "advantages": np.ones_like(worked.advantages)})
    s_BT = evaluate(objectives.gspo, batch, dtype, clip_low=1.0, clip_high=1e9, **worked.structure)
    expected_N = np.array([1.28402542, 1.75505466, 0.54881164, 1.03389511])
    atol = 1e-8 if dtype is np.float64 else 1e-5  # the table has eight decimals
    np.testing.assert_allclose(s_BT[batch.mask], expected_N[batch.completion[batch.mask]], rtol=0, atol=atol)


def test_dual_clip_holds_the_loss_of_bad_tokens():
    # A = -1: ratio 10 is held at c = 3, ratio 2 is not; A = 1: ratio 10 is held by the ordinary clip.
    logprobs = jnp.log(jnp.array([10.0, 2.0, 10.0]))
    advantages, mask = jnp.array([-1.0, -1.0, 1.0]), jnp.ones(3, bool)

    def j(logprobs):
        return objectives.ppo(logprobs, jnp.zeros(3), advantages, mask, dual_clip=3.0)

    found, slopes = jax.jit(lambda x: (j(x), jax.grad(lambda x: j(x).sum())(x)))(logprobs)
    np.testing.assert_allclose(found, [-3.0, -2.0, 1.2], rtol=1e-6)
    np.testing.assert_allclose(slopes, [0.0, -2.0, 0.0], rtol=1e-6)


# --- gradients


def gradient(function, batch, weights_BT=None, **structure):
    weights_BT = np.ones_like(batch.logprobs) if weights_BT is None else weights_BT
    with jax.enable_x64(True):

        def weighted(logprobs_BT):
            j_BT = function(logprobs_BT, batch.old, batch.advantages, batch.mask, **structure)
            return jnp.sum(weights_BT * j_BT)

        return np.asarray(jax.jit(jax.grad(weighted))(batch.logprobs))


def central_differences(function, batch, weights_BT, step=1e-6, **structure):
    with jax.enable_x64(True):

        def weighted(logprobs_BT):
            return jnp.sum(weights_BT * function(logprobs_BT, batch.old, batch.advantages, batch.mask, **structure))

        size = batch.logprobs.size
        moves = step * np.eye(size).reshape(size, *batch.logprobs.shape)
        at = jax.jit(jax.vmap(weighted))
        slopes = np.asarray(at(batch.logprobs[None] + moves) - at(batch.logprobs[None] - moves)) / (2 * step)
        return slopes.reshape(batch.logprobs.shape)


@pytest.mark.parametrize(
    ("function", "reads_structure"),
    [
        (objectives.reinforce, False),
        (functools.partial(objectives.ppo, dual_clip=3.0), False),
        (functools.partial(objectives.gspo, clip_low=0.3, clip_high=0.4), True),
    ],
    ids=["reinforce", "ppo", "gspo"],
)
def test_gradient_is_that_of_finite_differences(worked, function, reads_structure):
    structure = worked.structure if reads_structure else {}
    weights_BT = np.linspace(0.5, 1.5, worked.logprobs.size).reshape(worked.logprobs.shape)
    found = gradient(function, worked, weights_BT, **structure)
    assert np.count_nonzero(found) > 3
    np.testing.assert_allclose(found, central_differences(function, worked, weights_BT, **structure), atol=1e-8)


def test_ppo_gradient_is_ratio_times_advantage_inside_the_clip_range_and_zero_outside(worked):
    ratio, a = np.exp(worked.logprobs - worked.old), worked.advantages
    open_BT = worked.mask & ~((a > 0) & (ratio > 1.28)) & ~((a < 0) & (ratio < 0.8))
    found = gradient(functools.partial(objectives.ppo, clip_high=0.28), worked)
    np.testing.assert_allclose(found, np.where(open_BT, ratio * a, 0.0), atol=1e-12)
    assert 0 < open_BT.sum() < worked.mask.sum()


@pytest.mark.parametrize(("cap", "floor"), [(1.5, 0.0), (5.0, 0.0), (1.2, 0.9)])
def test_cispo_gradient_is_weight_times_advantage_also_where_the_ratio_is_capped(worked, cap, floor):
    weight = np.clip(np.exp(worked.logprobs - worked.old), floor, cap)
    found = gradient(functools.partial(objectives.cispo, ratio_cap=cap, ratio_floor=floor), worked)
    np.testing.assert_allclose(found, np.where(worked.mask, weight * worked.advantages, 0.0), atol=1e-12)
    assert np.abs(found[worked.mask]).min() > 0.5


def test_gspo_gradient_is_sequence_ratio_times_advantage_over_n_and_length(worked):
    s_N = np.exp([0.25, 0.5625, -0.6, 1 / 30])
    a_N = np.array([1.0, -1.0, 1.0, -1.0])
    open_N = np.array([False, True, True, True])  # s_0 = 1.28 > 1.2 with A > 0
    weights_N = completion_weights(worked.lengths, worked.groups, worked.keep, kind="sample")
    clip = {"clip_low": 0.2, "clip_high": 0.2, **worked.structure}
    found = gradient(objectives.gspo, worked, spread(weights_N, worked), **clip)
    expected_N = np.where(open_N, s_N * a_N, 0.0) / (4 * worked.lengths)
    np.testing.assert_allclose(found[worked.mask], expected_N[worked.completion[worked.mask]], atol=1e-12)
    token = gradient(objectives.gspo_token, worked, spread(weights_N, worked), **clip)
    np.testing.assert_allclose(token, found, atol=1e-12)  # advantages are constant in every sequence


def test_gspo_token_follows_advantages_that_vary_in_a_sequence_where_gspo_averages_them(worked):
    batch = type(worked)(**vars(worked))
    batch.advantages = np.where(worked.mask, np.arange(1.0, 1 + worked.mask.size).reshape(worked.mask.shape), 0.0)
    open_ = {"clip_low": 1.0, "clip_high": 1e9, **worked.structure}
    token = gradient(objectives.gspo_token, batch, **open_)
    s_BT = np.exp(np.array([0.25, 0.5625, -0.6, 1 / 30]))[worked.completion]
    np.testing.assert_allclose(token, np.where(worked.mask, s_BT * batch.advantages, 0.0), atol=1e-12)
    assert np.abs(gradient(objectives.gspo, batch, **open_) - token).max() > 0.1


@pytest.mark.parametrize(
    ("function", "reads_structure"),
    [
        (objectives.ppo, False),
        (functools.partial(objectives.ppo, dual_clip=3.0, clip_high=0.28), False),
        (functools.partial(objectives.cispo, ratio_cap=5.0), False),
        (objectives.gspo, True),
        (objectives.gspo_token, True),
    ],
    ids=["ppo", "dual", "cispo", "gspo", "gspo_token"],
)
def test_on_policy_every_objective_has_the_gradient_of_reinforce(worked, function, reads_structure):
    batch = type(worked)(**{**vars(worked), "old": worked.logprobs})
    weights_BT = spread(completion_weights(worked.lengths, worked.groups, worked.keep, kind="sample"), worked)
    expected = gradient(objectives.reinforce, batch, weights_BT)
    found = gradient(function, batch, weights_BT, **(worked.structure if reads_structure else {}))
    np.testing.assert_allclose(found, expected, atol=1e-15)
    np.testing.assert_allclose(expected, weights_BT * worked.advantages, atol=1e-15)


def test_no_gradient_reaches_the_anchor_or_the_advantages(worked):
    structure = worked.structure
    for function in (
        objectives.reinforce,
        objectives.ppo,
        functools.partial(objectives.cispo, ratio_cap=1.5),
        functools.partial(objectives.gspo, **structure),
        functools.partial(objectives.gspo_token, **structure),
    ):
        summed = jax.jit(jax.grad(lambda old, a, f=function: f(worked.logprobs, old, a, worked.mask).sum(), (0, 1)))
        gradients = summed(worked.old, worked.advantages)
        assert all(not np.any(g) for g in gradients), function
