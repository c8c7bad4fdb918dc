"""The batched fitter: planted parameters, fixed values, bounds, warnings and refusals."""

import jax
import numpy as np
import pytest
from scipy.optimize import curve_fit

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import fit_batch, fit_power_law, fit_sigmoid
from jaxrl_llm.scaling.laws import power_law, sigmoid
from jaxrl_llm.types import UserError

# 30 points everywhere: one compiled width.
COMPUTE = np.geomspace(300.0, 20000.0, 30)
SCALERL = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.35}


def noisy(seed: int, scale: float = 0.01, compute=COMPUTE, **law) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=len(compute)) * scale
    return sigmoid(compute, **(SCALERL | law)) + noise


@pytest.mark.parametrize(
    "planted",
    [
        SCALERL,
        {"A": 0.645, "B": 1.89, "C_mid": 11272.0, "R0": 0.2},
        {"A": 0.615, "B": 1.09, "C_mid": 1675.0, "R0": 0.05},
        {"A": 0.95, "B": 6.0, "C_mid": 900.0, "R0": 0.4},
    ],
)
@pytest.mark.parametrize("unit", [1.0, 3.6e18])
def test_planted_parameters_come_back(planted, unit):
    curve = Curve(COMPUTE * unit, sigmoid(COMPUTE, **planted))
    fit = fit_sigmoid(curve)
    assert fit.converged
    found = [fit.A, fit.B, fit.C_mid / unit, fit.R0]
    np.testing.assert_allclose(found, [planted["A"], planted["B"], planted["C_mid"], planted["R0"]], rtol=1e-6)
    np.testing.assert_allclose(fit.predict(curve.compute), curve.reward, rtol=0, atol=1e-9)


def test_zero_compute_point_is_R0():
    reward = noisy(0)
    with_zero = fit_sigmoid(Curve(np.r_[0.0, COMPUTE], np.r_[0.33, reward]))
    given = fit_sigmoid(Curve(COMPUTE, reward), R0=0.33)
    assert (with_zero.R0, with_zero.r0_source, with_zero.points) == (0.33, "zero", 30)
    assert (with_zero.A, with_zero.B, with_zero.C_mid) == (given.A, given.B, given.C_mid)


def test_free_R0_uses_the_zero_compute_point_as_a_measurement():
    reward = sigmoid(COMPUTE, **SCALERL)
    fit = fit_sigmoid(Curve(np.r_[0.0, COMPUTE], np.r_[0.35, reward]), R0="free")
    assert (fit.r0_source, fit.points) == ("free", 31)
    np.testing.assert_allclose([fit.A, fit.B, fit.C_mid, fit.R0], [0.61, 1.92, 2542.0, 0.35], rtol=1e-6)


def test_fixed_A():
    curve = Curve(COMPUTE, noisy(1))
    free = fit_sigmoid(curve, R0=0.35)
    fixed = fit_sigmoid(curve, R0=0.35, A=0.65)
    assert fixed.A == 0.65
    assert fixed.A_fixed
    assert fixed.ssr > free.ssr
    again = fit_sigmoid(Curve(COMPUTE, sigmoid(COMPUTE, 0.65, 1.3, 4000.0, 0.35)), R0=0.35, A=0.65)
    np.testing.assert_allclose([again.B, again.C_mid], [1.3, 4000.0], rtol=1e-6)


def test_never_worse_than_scipy_from_the_same_starts():
    rewards = np.stack([noisy(seed, scale=0.02) for seed in range(25)])
    starts = np.array([[1.0, 1500.0], [3.0, 8000.0]])
    ours = fit_batch(np.tile(COMPUTE, (25, 1)), rewards, starts=np.tile(starts, (25, 1, 1)))
    assert ours.converged.all()
    for k, reward in enumerate(rewards):
        for B, C_mid in starts:
            theirs, _ = curve_fit(
                lambda c, *p: sigmoid(c, *p),
                COMPUTE,
                reward,
                p0=(0.6, B, C_mid, 0.3),
                bounds=((0, 0.05, 1, 0), (1, 50, 1e7, 1)),
                max_nfev=5000,
            )
            assert ours.ssr[k] <= np.sum((sigmoid(COMPUTE, *theirs) - reward) ** 2) * (1 + 1e-8)


@pytest.mark.parametrize(
    ("R0", "lower", "upper"), [(None, 0.4, 0.58), (None, 0.0, 0.58), (None, 0.4, 1.0), (0.4, 0.4, 0.58)]
)
def test_bounds_hold_at_the_least_squares_optimum_under_them(R0, lower, upper):
    """Levels of .35 and .61 fitted within bounds that cut off one or both of them."""
    rewards = np.stack([noisy(seed, scale=0.02) for seed in range(8)])
    ours = fit_batch(np.tile(COMPUTE, (8, 1)), rewards, R0=R0, lower=lower, upper=upper)
    assert ours.converged.all()
    if upper == 0.58:
        np.testing.assert_allclose(ours.A, upper, rtol=0, atol=1e-12)
    if lower == 0.4:
        np.testing.assert_allclose(ours.R0, lower, rtol=0, atol=1e-12)
    for k, reward in enumerate(rewards):
        if R0 is None:
            law, p0, low, high = sigmoid, (0.57, 2, 2500, 0.41), (0.5, 0.05, 1, lower), (upper, 50, 1e7, 0.5)
        else:
            law, p0, low, high = (
                lambda c, A, B, m: sigmoid(c, A, B, m, 0.4),
                (0.57, 2, 2500),
                (0.5, 0.05, 1),
                (upper, 50, 1e7),
            )
        theirs, _ = curve_fit(law, COMPUTE, reward, p0=p0, bounds=(low, high), max_nfev=5000)
        assert ours.ssr[k] <= np.sum((law(COMPUTE, *theirs) - reward) ** 2) * (1 + 1e-8)
    found = sigmoid(COMPUTE, ours.A[:, None], ours.B[:, None], ours.C_mid[:, None], ours.R0[:, None])
    np.testing.assert_allclose(np.sum((found - rewards) ** 2, axis=1), ours.ssr, rtol=1e-9)


def test_padding_and_batching_change_nothing():
    short, long = COMPUTE[:20], COMPUTE
    a, b = noisy(2)[:20], noisy(3)
    padded = np.zeros((2, 30))
    rewards, weights = np.full((2, 30), 0.7), np.zeros((2, 30))
    padded[0, :20], padded[1] = short, long
    rewards[0, :20], rewards[1] = a, b
    weights[0, :20], weights[1] = 1.0, 1.0
    both = fit_batch(padded, rewards, weights)
    for k, (compute, reward) in enumerate([(short, a), (long, b)]):
        alone = fit_batch(compute[None], reward[None])
        assert both.A[k] == pytest.approx(alone.A[0], rel=1e-9)
        assert both.C_mid[k] == pytest.approx(alone.C_mid[0], rel=1e-9)


def test_weights_count_like_repeated_points():
    reward = noisy(4)[:20]
    weights = np.where(np.arange(20) % 3 == 0, 2.0, 1.0)
    weighted = fit_batch(COMPUTE[None, :20], reward[None], weights[None])
    times = weights.astype(int)
    repeated = fit_batch(np.repeat(COMPUTE[:20], times)[None], np.repeat(reward, times)[None])
    assert weighted.ssr[0] == pytest.approx(repeated.ssr[0], rel=1e-9)
    assert weighted.A[0] == pytest.approx(repeated.A[0], rel=1e-6)


def test_float64_whatever_the_callers_configuration_and_no_trace_left():
    assert not jax.config.jax_enable_x64
    fit = fit_sigmoid(Curve(COMPUTE, sigmoid(COMPUTE, **SCALERL)))
    assert fit.ssr < 1e-25  # float32 would leave some 1e-13
    assert not jax.config.jax_enable_x64


def test_a_curve_before_its_middle_is_doubted():
    early = np.geomspace(100.0, 2000.0, 30)
    fit = fit_sigmoid(Curve(early, noisy(5, scale=0.003, compute=early, C_mid=6000.0)))
    assert any("not past its middle" in text or "A is at its bound" in text for text in fit.warnings)


def test_A_at_its_bound_is_doubted():
    fit = fit_sigmoid(Curve(COMPUTE, noisy(6, scale=0.001)), upper=0.55 + 0.08)
    assert not fit.warnings
    low = np.minimum(noisy(6, scale=0.001), 0.6)
    fit = fit_sigmoid(Curve(COMPUTE, low), upper=0.6)
    np.testing.assert_allclose(fit.A, 0.6, rtol=0, atol=1e-9)
    assert any("A is at its bound 0.6" in text for text in fit.warnings)


def test_collapse_is_doubted():
    reward = noisy(7)
    reward[-6:] = 0.4
    assert any("not monotone" in text for text in fit_sigmoid(Curve(COMPUTE, reward)).warnings)


def test_few_points_are_doubted_and_a_good_curve_is_not():
    assert fit_sigmoid(Curve(COMPUTE, noisy(8)), R0=0.35).warnings == ()
    few = fit_sigmoid(Curve(COMPUTE[::4], noisy(8)[::4]), R0=0.35)
    assert any("only 8 points" in text for text in few.warnings)


def test_noise_without_a_rise_is_doubted():
    flat = 0.5 + np.random.default_rng(9).normal(size=30) * 0.01
    try:
        warnings = fit_sigmoid(Curve(COMPUTE, flat)).warnings
    except UserError as error:
        warnings = (str(error),)
    assert any("no clear rise" in text or "does not rise" in text for text in warnings)


@pytest.mark.parametrize(
    ("compute", "reward", "options", "message"),
    [
        (COMPUTE[:3], [0.1, 0.2, 0.3], {"R0": 0.05}, "3 points at positive compute are too few to fit 3 parameters"),
        (COMPUTE[:4], [0.1, 0.2, 0.3, 0.31], {}, "4 points are too few to fit 4 parameters; at least 5"),
        (np.r_[0.0, COMPUTE[:3]], [0.1, 0.2, 0.3, 0.4], {}, "3 points at positive compute"),
        (COMPUTE[:2], [0.1, 0.2], {"A": 0.6, "R0": 0.05}, "2 points"),
        (COMPUTE[:6], [0.4] * 6, {}, "0.4 at every point"),
        (COMPUTE[:5], [0.1, 0.2, 0.3, 0.4, 1.2], {}, r"reward 1.2 at compute .* outside \[0, 1\]"),
        (COMPUTE[:5], [-0.5, 0.2, 0.3, 0.4, 0.5], {}, r"reward -0.5 at compute 300 lies outside"),
        (COMPUTE[:6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], {"A": 0.3, "R0": 0.4}, "R0 0.4 is not below A 0.3"),
        (COMPUTE[:6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], {"A": 1.3}, "A fixed to 1.3"),
    ],
)
def test_degenerate_input_is_refused_with_the_reason(compute, reward, options, message):
    with pytest.raises(UserError, match=message):
        fit_sigmoid(Curve(compute, np.array(reward)), **options)


def test_a_falling_curve_is_refused():
    with pytest.raises(UserError, match="does not rise"):
        fit_sigmoid(Curve(COMPUTE, sigmoid(COMPUTE, **SCALERL)[::-1].copy()), R0=0.62)


def test_power_law_planted():
    fit = fit_power_law(Curve(COMPUTE, power_law(COMPUTE, 0.8, 0.4, 3.0)))
    assert fit.converged
    np.testing.assert_allclose([fit.A, fit.B, fit.D], [0.8, 0.4, 3.0], rtol=1e-6)
    np.testing.assert_allclose(fit.predict(COMPUTE[3]), power_law(COMPUTE[3], 0.8, 0.4, 3.0), atol=1e-9)


def test_power_law_overshoots_where_the_sigmoid_does_not():
    """ScaleRL: on the first half of a long run the power law runs to A = 1."""
    window = np.linspace(1500.0, 5000.0, 30)
    curve = Curve(window, noisy(10, scale=0.003, compute=window, C_mid=4000.0))
    power, ours = fit_power_law(curve), fit_sigmoid(curve, R0=0.35)
    np.testing.assert_allclose(power.A, 1.0, rtol=0, atol=1e-6)
    assert any("A is at its bound 1" in text for text in power.warnings)
    assert abs(ours.A - 0.61) < 0.1
