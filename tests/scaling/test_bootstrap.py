"""The residual bootstrap: coverage, reproducibility, and intervals that widen where they should."""

import numpy as np

from jaxrl_llm.scaling.bootstrap import bootstrap_batch, bootstrap_sigmoid
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import fit_batch, fit_sigmoid, prepare_sigmoid
from jaxrl_llm.scaling.laws import sigmoid

COMPUTE = np.linspace(400.0, 12000.0, 30)
PLANTED = {"A": 0.61, "B": 1.92, "C_mid": 2542.0}


def noisy(generator: np.random.Generator) -> np.ndarray:
    return sigmoid(COMPUTE, **PLANTED, R0=0.35) + generator.normal(size=30) * 0.01


def test_interval_covers_the_planted_values():
    generator, curves = np.random.default_rng(1), 60
    rewards = np.stack([noisy(generator) for _ in range(curves)])
    R0 = 0.35 + generator.normal(size=curves) * 0.01
    inputs = [prepare_sigmoid(Curve(np.r_[0.0, COMPUTE], np.r_[R0[k], rewards[k]])) for k in range(curves)]
    fits = fit_batch(np.tile(COMPUTE, (curves, 1)), rewards, R0=R0)
    drawn = bootstrap_batch(inputs, fits, resamples=120)
    for name, planted in PLANTED.items():
        intervals = np.array([bootstrap.interval()[name] for bootstrap in drawn])
        covered = np.mean((intervals[:, 0] <= planted) & (planted <= intervals[:, 1]))
        # A true coverage of .95 falls below .87 of 60 about once in 100 draws; the seed is fixed.
        assert covered >= 0.87, (name, covered)
        wide = np.mean(intervals[:, 1] - intervals[:, 0])
        assert wide < {"A": 0.06, "B": 1.2, "C_mid": 900.0}[name]


def test_band_covers_new_points():
    generator = np.random.default_rng(2)
    curve = Curve(COMPUTE, noisy(generator))
    low, high = bootstrap_sigmoid(curve, fit_sigmoid(curve), resamples=200).band(COMPUTE)
    fresh = np.stack([noisy(generator) for _ in range(50)])
    inside = np.mean((low <= fresh) & (fresh <= high))
    assert 0.88 <= inside <= 0.999


def test_same_seed_same_draws():
    curve = Curve(COMPUTE, noisy(np.random.default_rng(3)))
    fit = fit_sigmoid(curve)
    first, again, other = (bootstrap_sigmoid(curve, fit, resamples=50, seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first.A, again.A)
    assert (first.A != other.A).any()


def test_fixed_A_stays_fixed_and_narrows_the_rest():
    curve = Curve(COMPUTE, noisy(np.random.default_rng(4)))
    free = bootstrap_sigmoid(curve, fit_sigmoid(curve, R0=0.35), resamples=100)
    fixed = bootstrap_sigmoid(curve, fit_sigmoid(curve, R0=0.35, A=0.61), resamples=100)
    assert fixed.interval()["A"] == (0.61, 0.61)
    (a, b), (c, d) = free.interval()["C_mid"], fixed.interval()["C_mid"]
    assert d - c < b - a


def test_noiseless_curve_has_a_point_interval():
    curve = Curve(COMPUTE, sigmoid(COMPUTE, **PLANTED, R0=0.35))
    low, high = bootstrap_sigmoid(curve, fit_sigmoid(curve), resamples=20).interval()["A"]
    assert high - low < 1e-9
