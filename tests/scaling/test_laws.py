"""Values and identities of the laws, to 1e-9."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.scaling.laws import log_odds, power_law, power_law_inverse, sigmoid, sigmoid_inverse, straighten

SCALERL = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.35}


def test_sigmoid_published_example():
    compute = np.array([1500.0, 2542.0, 8000.0, 16000.0, 100000.0])
    # .35 + .26/(1 + (2542/C)^1.92) worked with the decimal module to 12 places.
    by_hand = [0.35 + 0.26 / (1 + (2542.0 / c) ** 1.92) for c in compute]
    value = sigmoid(compute, **SCALERL)
    np.testing.assert_allclose(value, by_hand, rtol=0, atol=1e-9)
    np.testing.assert_allclose(value, [0.419274, 0.48, 0.584094, 0.602613, 0.609775], rtol=0, atol=5e-7)


def test_sigmoid_is_half_way_at_its_middle():
    assert sigmoid(2542.0, **SCALERL) == pytest.approx((0.61 + 0.35) / 2, abs=1e-9)


def test_sigmoid_slope_at_its_middle():
    with jax.enable_x64(True):
        slope = jax.grad(lambda log_C: sigmoid(jnp.exp(log_C), **SCALERL))(jnp.log(2542.0))
        assert float(slope) == pytest.approx((0.61 - 0.35) * 1.92 / 4, abs=1e-9)


def test_sigmoid_limits():
    assert sigmoid(0.0, **SCALERL) == 0.35
    assert sigmoid(1e300, **SCALERL) == pytest.approx(0.61, abs=1e-9)
    assert sigmoid(np.array([1.0, 1e25]), 0.61, 50.0, 1e15, 0.35).tolist() == [0.35, 0.61]


def test_sigmoid_is_the_same_in_jax():
    compute = np.geomspace(1.0, 1e6, 7)
    with jax.enable_x64(True):
        traced = jax.jit(lambda c: sigmoid(c, **SCALERL))(jnp.asarray(compute))
        np.testing.assert_allclose(np.asarray(traced), sigmoid(compute, **SCALERL), rtol=0, atol=1e-12)


def test_straight_line():
    compute = np.geomspace(50.0, 2e5, 9)
    reward = sigmoid(compute, **SCALERL)
    np.testing.assert_allclose(straighten(reward, **SCALERL), compute**1.92, rtol=1e-9)
    np.testing.assert_allclose(log_odds(reward, 0.61, 0.35), 1.92 * np.log(compute / 2542.0), rtol=0, atol=1e-9)


def test_straight_line_does_not_exist_outside_the_levels():
    assert np.isnan(straighten(np.array([0.35, 0.30, 0.61, 0.7]), **SCALERL)).all()


def test_power_law_worked_example():
    # .9 - 4 * 16^-.5 = -.1 and .9 - 4 * 64^-.5 = .4
    np.testing.assert_allclose(power_law(np.array([16.0, 64.0]), 0.9, 0.5, 4.0), [-0.1, 0.4], rtol=0, atol=1e-12)


def test_sigmoid_tends_to_its_power_law():
    compute = np.array([2542.0e4, 2542.0e6])
    tail = power_law(compute, 0.61, 1.92, (0.61 - 0.35) * 2542.0**1.92)
    np.testing.assert_allclose(sigmoid(compute, **SCALERL), tail, rtol=0, atol=1e-12)


def test_inverses():
    compute = np.geomspace(50.0, 2e5, 9)
    np.testing.assert_allclose(sigmoid_inverse(sigmoid(compute, **SCALERL), **SCALERL), compute, rtol=1e-9)
    assert np.isnan(sigmoid_inverse(0.62, **SCALERL))
    constants = {"A": 0.8, "B": 0.4, "D": 3.0}
    np.testing.assert_allclose(power_law_inverse(power_law(compute, **constants), **constants), compute, rtol=1e-9)
    assert np.isnan(power_law_inverse(0.8, **constants))
