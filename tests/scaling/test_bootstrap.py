"""The bootstrap: coverage, reproducibility, blocks and seeds, and intervals that widen where they should."""

import numpy as np
import pytest

from jaxrl_llm.scaling.bootstrap import _blocks, bootstrap, bootstrap_many
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.data import prepare
from jaxrl_llm.scaling.fit import fit, fit_many
from jaxrl_llm.scaling.laws import sigmoid
from jaxrl_llm.scaling.table import LAWS
from jaxrl_llm.types import UserError

COMPUTE = np.linspace(400.0, 12000.0, 30)
PLANTED = {"A": 0.61, "B": 1.92, "C_mid": 2542.0}


def noisy(generator: np.random.Generator) -> np.ndarray:
    return sigmoid(COMPUTE, **PLANTED, R0=0.35) + generator.normal(size=30) * 0.01


def coverage(runs: int, resamples: int) -> dict[str, float]:
    generator = np.random.default_rng(1)
    rewards = np.stack([noisy(generator) for _ in range(runs)])
    R0 = 0.35 + generator.normal(size=runs) * 0.01
    sets = [prepare(LAWS["sigmoid"], Curve(np.r_[0.0, COMPUTE], np.r_[R0[k], rewards[k]])) for k in range(runs)]
    drawn = bootstrap_many(fit_many("sigmoid", sets), resamples=resamples)
    held = {}
    for name, planted in PLANTED.items():
        intervals = np.array([each.interval()[name] for each in drawn])
        held[name] = float(np.mean((intervals[:, 0] <= planted) & (planted <= intervals[:, 1])))
        wide = np.mean(intervals[:, 1] - intervals[:, 0])
        assert wide < {"A": 0.06, "B": 1.2, "C_mid": 900.0}[name]
    return held


def test_interval_covers_the_planted_values():
    # A true coverage of .95 falls below .85 of 40 about once in 70 draws; the seed is fixed.
    assert min(coverage(40, 120).values()) >= 0.85


@pytest.mark.slow
def test_interval_covers_90_to_98_percent_of_500_runs():
    held = coverage(500, 300)
    assert min(held.values()) >= 0.90, held
    assert max(held.values()) <= 0.98, held


def test_band_covers_new_points():
    generator = np.random.default_rng(2)
    drawn = bootstrap(fit("sigmoid", Curve(COMPUTE, noisy(generator))), resamples=200)
    low, high = drawn.band(COMPUTE)
    fresh = np.stack([noisy(generator) for _ in range(50)])
    inside = np.mean((low[None] <= fresh) & (fresh <= high[None]))
    assert 0.88 <= inside <= 0.999
    curves = drawn.curves(COMPUTE)
    assert curves.shape == (200, 30)
    assert np.all(np.quantile(curves, 0.975, axis=0) < high)


def test_same_seed_same_draws():
    found = fit("sigmoid", Curve(COMPUTE, noisy(np.random.default_rng(3))))
    first, again, other = (bootstrap(found, resamples=50, seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first.draws, again.draws)
    assert (first.of("A") != other.of("A")).any()


def test_fixed_A_stays_fixed_and_narrows_the_rest():
    curve = Curve(COMPUTE, noisy(np.random.default_rng(4)))
    free = bootstrap(fit("sigmoid", curve, fixed={"R0": 0.35}), resamples=100)
    fixed = bootstrap(fit("sigmoid", curve, fixed={"R0": 0.35, "A": 0.61}), resamples=100)
    assert set(fixed.interval()) == {"B", "C_mid"}
    assert np.all(fixed.of("A") == 0.61)
    assert np.diff(fixed.interval()["C_mid"]) < np.diff(free.interval()["C_mid"])


def test_noiseless_curve_has_a_point_interval():
    found = fit("sigmoid", Curve(COMPUTE, sigmoid(COMPUTE, **PLANTED, R0=0.35)))
    low, high = bootstrap(found, resamples=20).interval()["A"]
    assert high - low < 1e-9


def test_bootstrap_agrees_with_the_linearised_interval_where_the_curve_is_well_determined():
    found = fit("sigmoid", Curve(COMPUTE, noisy(np.random.default_rng(5))), fixed={"R0": 0.35})
    drawn = bootstrap(found, resamples=400).interval()
    for name in PLANTED:
        ratio = np.diff(drawn[name]) / np.diff(found.intervals[name])
        assert 0.75 < ratio < 1.3, (name, ratio)


def test_blocks_widen_the_interval_under_correlated_noise():
    generator = np.random.default_rng(6)
    noise = np.zeros(30)
    for k in range(1, 30):
        noise[k] = 0.85 * noise[k - 1] + 0.006 * generator.normal()
    found = fit("sigmoid", Curve(COMPUTE, sigmoid(COMPUTE, **PLANTED, R0=0.35) + noise), fixed={"R0": 0.35})
    single, block = (
        bootstrap(found, kind=kind, block=size, resamples=200) for kind, size in (("residual", None), ("block", 6))
    )
    assert np.diff(block.interval()["A"]) > 1.2 * np.diff(single.interval()["A"])
    with pytest.raises(UserError, match="a block of 31 does not fit 30 points"):
        bootstrap(found, kind="block", block=31, resamples=2)


def test_blocks_do_not_cross_runs():
    """Two seeds, one without noise: the mean shift of the other's blocks never reaches it."""
    data = prepare(
        LAWS["sigmoid"],
        {"compute": np.r_[COMPUTE, COMPUTE], "reward": np.tile(sigmoid(COMPUTE, **PLANTED, R0=0.35), 2)},
        groups=["a"] * 30 + ["b"] * 30,
    )
    pool = np.r_[np.zeros(30), np.arange(1.0, 31.0)]
    noise = _blocks(pool, data, 4, 50, np.random.default_rng(0))
    assert np.all(noise[:, :30] == 0)
    assert np.all(noise[:, 30:] > 0)
    steps = np.diff(noise[:, 30:34], axis=1)
    assert np.all(steps == 1)  # neighbours stay neighbours inside a block


def test_seeds_are_drawn_whole():
    generator = np.random.default_rng(7)
    rewards = [sigmoid(COMPUTE, A, 1.92, 2542.0, 0.35) + generator.normal(size=30) * 0.003 for A in (0.59, 0.61, 0.63)]
    found = fit(
        "sigmoid",
        {"compute": np.tile(COMPUTE, 3), "reward": np.concatenate(rewards)},
        groups=np.repeat(["a", "b", "c"], 30),
        fixed={"R0": 0.35},
    )
    drawn = bootstrap(found, kind="seeds", resamples=100)
    # Ten different multisets of three seeds.
    assert len(np.unique(np.round(drawn.of("A"), 7))) <= 10
    low, high = drawn.interval()["A"]
    assert low < 0.60 < 0.62 < high
    alone = fit("sigmoid", Curve(COMPUTE, rewards[0]))
    with pytest.raises(UserError, match="at least 2 groups"):
        bootstrap(alone, kind="seeds", resamples=2)
