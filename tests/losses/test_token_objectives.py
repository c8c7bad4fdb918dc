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


ppo, cispo = objectives.ppo, objectives.cispo
TOKEN_LEVEL = {
    "reinforce": objectives.reinforce,
    "clip .2/.2": ppo,
    "clip .2/.28": functools.partial(ppo, clip_high=0.28),
    "dual clip": functools.partial(ppo, dual_clip=3.0),
    "cispo cap 5": functools.partial(cispo, ratio_cap=5.0),
    "cispo cap 1.5": functools.partial(cispo, ratio_cap=1.5),
    "cispo cap 1.2 floor .9": functools.partial(cispo, ratio_cap=1.2, ratio_floor=0.9),
}
OPEN = {"clip_low": 1.0, "clip_high": 1e9}
WIDE = {"clip_low": 0.2, "clip_high": 0.2}
SEQUENCE_LEVEL = {
    f"{name} {label}": functools.partial(function, **clips)
    for name, function in (("gspo", objectives.gspo), ("gspo_token", objectives.gspo_token))
    for label, clips in (
        (".003/.005", {"clip_low": 0.003, "clip_high": 0.005}),
        ("3e-4/4e-4", {}),
        ("wide", WIDE),
        ("open", OPEN),
    )
}


def all_j(batch, logprobs_BT, old_BT, advantages_BT):
    arrays = (logprobs_BT, old_BT, advantages_BT, batch.mask)
    found = {name: f(*arrays) for name, f in TOKEN_LEVEL.items()}
    return found | {name: f(*arrays, **batch.structure) for name, f in SEQUENCE_LEVEL.items()}


@pytest.fixture(scope="module")
def computed(worked):
    """J of everything in both precisions, compiled once each."""
    found = {}
    for dtype in PRECISION:
        with jax.enable_x64(dtype is np.float64):
            arrays = [x.astype(dtype) for x in (worked.logprobs, worked.old, worked.advantages)]
            found[dtype] = jax.jit(functools.partial(all_j, worked))(*arrays)
            assert {x.dtype for x in found[dtype].values()} == {np.dtype(dtype)}
    return found


@pytest.fixture(scope="module")
def slopes(worked):
    """call(weights_BT, old, advantages) -> gradients of sum(weights J) of everything, float64, one compilation."""

    names = [*TOKEN_LEVEL, *SEQUENCE_LEVEL]

    def gradients(weights_BT, old_BT, advantages_BT):
        def totals(logprobs_BT):
            j = all_j(worked, logprobs_BT, old_BT, advantages_BT)
            return jnp.stack([jnp.sum(weights_BT * j[name]) for name in names])

        return dict(zip(names, jax.jacrev(totals)(worked.logprobs), strict=True))

    jitted = jax.jit(gradients)

    def call(weights_BT=None, old_BT=None, advantages_BT=None):
        with jax.enable_x64(True):
            found = jitted(
                np.ones_like(worked.logprobs) if weights_BT is None else weights_BT,
                worked.old if old_BT is None else old_BT,
                worked.advantages if advantages_BT is None else advantages_BT,
            )
            return {name: np.asarray(x) for name, x in found.items()}

    return call


WORKED = {
    "clip .2/.2": [-1.1179799305, -0.5172773714, -1.0398133486, -0.1746843641],
    "clip .2/.28": [-1.1099799305, -0.5072773714, -1.0331466820, -0.1734343641],
    "cispo cap 5": [-0.5532289877, -0.4574455469, -0.3525901266, -0.0864420293],
    "cispo cap 1.5": [0.0968988852, -0.0511156263, 0.1891831008, 0.0151404508],
}


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("name", WORKED)
def test_worked_numbers_of_token_objectives(worked, computed, name, dtype):
    found = [total(computed[dtype][name], worked, kind) for kind in ("token", "sample", "prompt", "constant")]
    np.testing.assert_allclose(found, WORKED[name], rtol=0, atol=PRECISION[dtype])


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("function", ["gspo", "gspo_token"])
@pytest.mark.parametrize(("clips", "expected"), [(".003/.005", -0.3087845336), ("3e-4/4e-4", -0.3099345336)])
def test_worked_numbers_of_gspo(worked, computed, function, dtype, clips, expected):
    found = total(computed[dtype][f"{function} {clips}"], worked, "sample")
    np.testing.assert_allclose(found, expected, rtol=0, atol=PRECISION[dtype])


@pytest.mark.parametrize("dtype", PRECISION)
def test_worked_sequence_ratios_of_gspo(worked, computed, dtype):
    # With clipping out of reach J is the sequence's ratio times A, and A is +1 or -1.
    s_BT = np.asarray(computed[dtype]["gspo open"]) * worked.advantages
    expected_N = np.array([1.28402542, 1.75505466, 0.54881164, 1.03389511])
    atol = 1e-8 if dtype is np.float64 else 1e-5  # the table has eight decimals
    np.testing.assert_allclose(s_BT[worked.mask], expected_N[worked.completion[worked.mask]], rtol=0, atol=atol)


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


def test_gradient_is_that_of_finite_differences(worked, slopes):
    names = ["reinforce", "dual clip", "gspo wide"]  # the others hold stopped gradients
    weights_BT = np.linspace(0.5, 1.5, worked.logprobs.size).reshape(worked.logprobs.shape)

    def weighted(logprobs_BT):
        j = all_j(worked, logprobs_BT, worked.old, worked.advantages)
        return jnp.stack([jnp.sum(weights_BT * j[name]) for name in names])

    size, step = worked.logprobs.size, 1e-6
    moves = step * np.eye(size).reshape(size, *worked.logprobs.shape)
    with jax.enable_x64(True):
        at = jax.jit(jax.vmap(weighted))
        differences = np.asarray(at(worked.logprobs + moves) - at(worked.logprobs - moves)) / (2 * step)
    found = slopes(weights_BT)
    for i, name in enumerate(names):
        assert np.count_nonzero(found[name]) > 3
        np.testing.assert_allclose(found[name].ravel(), differences[:, i], atol=1e-8)


def test_ppo_gradient_is_ratio_times_advantage_inside_the_clip_range_and_zero_outside(worked, slopes):
    ratio, a = np.exp(worked.logprobs - worked.old), worked.advantages
    open_BT = worked.mask & ~((a > 0) & (ratio > 1.28)) & ~((a < 0) & (ratio < 0.8))
    np.testing.assert_allclose(slopes()["clip .2/.28"], np.where(open_BT, ratio * a, 0.0), atol=1e-12)
    assert 0 < open_BT.sum() < worked.mask.sum()


@pytest.mark.parametrize(
    ("name", "floor", "cap"),
    [("cispo cap 5", 0.0, 5.0), ("cispo cap 1.5", 0.0, 1.5), ("cispo cap 1.2 floor .9", 0.9, 1.2)],
)
def test_cispo_gradient_is_weight_times_advantage_also_where_the_ratio_is_capped(worked, slopes, name, floor, cap):
    weight = np.clip(np.exp(worked.logprobs - worked.old), floor, cap)
    found = slopes()[name]
    np.testing.assert_allclose(found, np.where(worked.mask, weight * worked.advantages, 0.0), atol=1e-12)
    assert np.abs(found[worked.mask]).min() > 0.5


def test_gspo_gradient_is_sequence_ratio_times_advantage_over_n_and_length(worked, slopes):
    s_N = np.exp([0.25, 0.5625, -0.6, 1 / 30])
    a_N = np.array([1.0, -1.0, 1.0, -1.0])
    open_N = np.array([False, True, True, True])  # s_0 = 1.28 > 1.2 with A > 0
    found = slopes(spread(completion_weights(worked.lengths, worked.groups, worked.keep, kind="sample"), worked))
    expected_N = np.where(open_N, s_N * a_N, 0.0) / (4 * worked.lengths)
    np.testing.assert_allclose(found["gspo wide"][worked.mask], expected_N[worked.completion[worked.mask]], atol=1e-12)
    # advantages are constant in every sequence
    np.testing.assert_allclose(found["gspo_token wide"], found["gspo wide"], atol=1e-12)


def test_gspo_token_follows_advantages_that_vary_in_a_sequence_where_gspo_averages_them(worked, slopes):
    a_BT = np.where(worked.mask, np.arange(1.0, 1 + worked.mask.size).reshape(worked.mask.shape), 0.0)
    found = slopes(advantages_BT=a_BT)
    s_BT = np.exp(np.array([0.25, 0.5625, -0.6, 1 / 30]))[worked.completion]
    np.testing.assert_allclose(found["gspo_token open"], np.where(worked.mask, s_BT * a_BT, 0.0), atol=1e-12)
    assert np.abs(found["gspo open"] - found["gspo_token open"]).max() > 0.1


def test_on_policy_every_objective_has_the_gradient_of_reinforce(worked, slopes):
    weights_BT = spread(completion_weights(worked.lengths, worked.groups, worked.keep, kind="sample"), worked)
    found = slopes(weights_BT, old_BT=worked.logprobs)
    assert len(found) == 15
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, weights_BT * worked.advantages, atol=1e-15, err_msg=name)


def test_no_gradient_reaches_the_anchor_or_the_advantages(worked):
    def total(old_BT, advantages_BT):
        return sum(jnp.sum(j) for j in all_j(worked, worked.logprobs, old_BT, advantages_BT).values())

    assert not any(np.any(g) for g in jax.jit(jax.grad(total, (0, 1)))(worked.old, worked.advantages))
