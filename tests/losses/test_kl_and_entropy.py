"""KL estimators: worked numbers, derivatives, and their on-policy expectations; entropy coefficients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import kl
from jaxrl_llm.losses.entropy import adapt_alpha, applied_alpha, entropy_bonus

LOGP, REF = np.array([-1.0, -2.0]), np.array([-1.5, -1.0])
YES = np.ones(2, bool)


@pytest.mark.parametrize(("dtype", "atol"), [(np.float64, 1e-9), (np.float32, 1e-5)])
def test_worked_numbers(dtype, atol):
    with jax.enable_x64(dtype is np.float64):
        found = jax.jit(lambda *a: (kl.k1(*a), kl.k2(*a), kl.k3(*a)))(LOGP.astype(dtype), REF.astype(dtype), YES)
    assert all(x.dtype == dtype for x in found)
    np.testing.assert_allclose(found, [[0.5, -1.0], [0.125, 0.5], [0.1065306597, 0.7182818285]], atol=atol)


def test_derivatives_are_one_delta_and_one_minus_exp_minus_delta():
    delta = LOGP - REF
    with jax.enable_x64(True):
        found = jax.jit(jax.jacrev(lambda x: jnp.stack([k(x, REF, YES).sum() for k in (kl.k1, kl.k2, kl.k3)])))(LOGP)
    np.testing.assert_allclose(found, [np.ones(2), delta, 1 - np.exp(-delta)], atol=1e-12)


def test_reported_bug_k1_and_k3_gradients_are_not_that_of_the_reverse_kl():
    """On policy, k1 as a loss trains nothing, k2 is the reverse KL, k3 pulls towards the forward KL. Exact sums."""
    reference_V = np.array([1.0, 0.2, -0.5, 0.0]) - np.log(np.exp([1.0, 0.2, -0.5, 0.0]).sum())

    def expected(theta_V, k):
        p_V = jax.nn.softmax(jax.lax.stop_gradient(theta_V))  # the sampling distribution, held fixed
        return jnp.sum(p_V * k(jax.nn.log_softmax(theta_V), reference_V, np.ones(4, bool)))

    def reverse(theta_V):
        return jnp.sum(jax.nn.softmax(theta_V) * (jax.nn.log_softmax(theta_V) - reference_V))

    def forward(theta_V):
        return jnp.sum(jnp.exp(reference_V) * (reference_V - jax.nn.log_softmax(theta_V)))

    functions = [functools.partial(expected, k=k) for k in (kl.k1, kl.k2, kl.k3)] + [reverse, forward]
    with jax.enable_x64(True):
        k1, k2, k3, to_reverse, to_forward = jax.jit(lambda t: [jax.grad(f)(t) for f in functions])(
            np.array([0.3, -1.0, 0.8, 0.1])
        )
    np.testing.assert_allclose(k1, np.zeros(4), atol=1e-15)
    np.testing.assert_allclose(k2, to_reverse, atol=1e-14)
    np.testing.assert_allclose(k3, to_forward, atol=1e-14)
    assert np.abs(to_forward - to_reverse).max() > 0.1


def test_kl_in_the_reward_adds_up_to_the_score_minus_beta_times_the_summed_kl(worked):
    scores_BT = np.where(worked.mask, 2.0 + worked.completion, np.nan)
    kl_BT = jax.jit(kl.k1)(worked.logprobs, worked.old, worked.mask)
    rewards_BT = np.asarray(kl.rewards_with_kl(scores_BT, kl_BT, worked.mask, beta=0.1, **worked.structure))
    assert not rewards_BT[~worked.mask].any()
    for i, summed in enumerate([0.5, 2.25, -0.6, 0.1]):
        mine = rewards_BT[worked.completion == i]
        assert mine.sum() == pytest.approx(2.0 + i - 0.1 * summed, abs=1e-6)
        np.testing.assert_allclose(mine[:-1], -0.1 * np.asarray(kl_BT)[worked.completion == i][:-1], atol=1e-7)


def test_entropy_bonus_is_alpha_times_entropy_and_ignores_masked_places():
    mask = np.array([True, False])
    bonus = jax.jit(jax.value_and_grad(lambda h: entropy_bonus(h, mask, 0.5).sum()))
    value, slope = bonus(np.array([2.0, np.nan]))
    assert value == 1.0
    np.testing.assert_array_equal(slope, [0.5, 0.0])


def test_adaptive_coefficient_rises_below_the_target_falls_above_and_stays_in_its_bounds():
    steer = {"target": 0.2, "step": 0.005, "high": 0.012}
    assert adapt_alpha(0.005, 0.1, **steer) == pytest.approx(0.010)
    assert adapt_alpha(0.010, 0.1, **steer) == pytest.approx(0.012)
    assert adapt_alpha(0.010, 0.3, **steer) == pytest.approx(0.005)
    assert adapt_alpha(0.002, 0.3, **steer) == 0.0
    assert applied_alpha(0.01, 0.2, target=0.2) == pytest.approx(0.01)
    assert applied_alpha(0.01, 0.21, target=0.2) == 0.0
