"""The front door: bounds, fixed values, batching, and every doubt and refusal."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from scipy.optimize import curve_fit

from jaxrl_llm.scaling.bootstrap import bootstrap
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.data import batch_of, prepare
from jaxrl_llm.scaling.engine import solve
from jaxrl_llm.scaling.fit import fit, fit_many, fits_of
from jaxrl_llm.scaling.laws import power_law, sigmoid
from jaxrl_llm.scaling.table import LAWS
from jaxrl_llm.types import UserError

# 30 points everywhere: one compiled width.
COMPUTE = np.geomspace(300.0, 20000.0, 30)
SCALERL = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.35}


def noisy(seed: int, scale: float = 0.01, compute=COMPUTE, **law) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=len(compute)) * scale
    return sigmoid(compute, **(SCALERL | law)) + noise


def curve(reward: np.ndarray, compute: np.ndarray = COMPUTE) -> dict[str, np.ndarray]:
    return {"compute": compute, "reward": np.asarray(reward, np.float64)}


def codes(found) -> set[str]:
    return {flag.code for flag in found.flags}


@pytest.mark.parametrize(
    "planted",
    [
        {"A": 0.645, "B": 1.89, "C_mid": 11272.0, "R0": 0.2},
        {"A": 0.615, "B": 1.09, "C_mid": 1675.0, "R0": 0.05},
        {"A": 0.95, "B": 6.0, "C_mid": 900.0, "R0": 0.4},
    ],
)
@pytest.mark.parametrize("unit", [1.0, 3.6e18])
def test_planted_parameters_come_back_in_any_unit(planted, unit):
    found = fit("sigmoid", Curve(COMPUTE * unit, sigmoid(COMPUTE, **planted)))
    assert found.converged
    assert found.params["C_mid"] / unit == pytest.approx(planted["C_mid"], rel=1e-6)
    np.testing.assert_allclose(
        [found.params[name] for name in ("A", "B", "R0")], [planted[name] for name in ("A", "B", "R0")], rtol=1e-6
    )
    np.testing.assert_allclose(found.predict(COMPUTE * unit), sigmoid(COMPUTE, **planted), rtol=0, atol=1e-9)


def test_zero_compute_point_is_R0():
    reward = noisy(0)
    with_zero = fit("sigmoid", curve(np.r_[0.33, reward], np.r_[0.0, COMPUTE]))
    given = fit("sigmoid", curve(reward), fixed={"R0": 0.33})
    assert (with_zero.params["R0"], with_zero.r0_source, with_zero.points) == (0.33, "zero", 30)
    assert [with_zero.params[name] for name in ("A", "B", "C_mid")] == [
        given.params[name] for name in ("A", "B", "C_mid")
    ]
    # A measured R0 is uncertain, a given one is not, and what it is uncertain about reaches the others.
    assert set(with_zero.intervals) == {"A", "B", "C_mid", "R0"}
    assert set(given.intervals) == {"A", "B", "C_mid"}
    assert np.diff(with_zero.intervals["B"]) > np.diff(given.intervals["B"])
    assert with_zero.text("R0") == "R0 = 0.33 (measured)"


def test_free_R0_uses_the_zero_compute_point_as_a_measurement():
    found = fit("sigmoid", curve(np.r_[0.35, sigmoid(COMPUTE, **SCALERL)], np.r_[0.0, COMPUTE]), free=["R0"])
    assert (found.r0_source, found.points) == ("free", 31)
    np.testing.assert_allclose([found.params[name] for name in SCALERL], list(SCALERL.values()), rtol=1e-6)


def test_fixed_A():
    reward = noisy(1)
    free = fit("sigmoid", curve(reward), fixed={"R0": 0.35})
    fixed = fit("sigmoid", curve(reward), fixed={"R0": 0.35, "A": 0.65})
    assert fixed.params["A"] == 0.65
    assert fixed.fixed == ("A", "R0")
    assert fixed.text("A") == "A = 0.65 (fixed)"
    assert fixed.objective > free.objective


def never_worse_than_scipy(count: int, seed: int) -> float:
    """The share of random noisy curves where our best of two starts is no higher than curve_fit's best of the same."""
    generator = np.random.default_rng(seed)
    starts, sets, bounds = [], [], ((0, 0.05, 1, 0), (1, 50, 1e7, 1))
    for _ in range(count):
        A, R0 = generator.uniform(0.4, 0.95), generator.uniform(0.02, 0.3)
        B, C_mid = generator.uniform(0.5, 4.0), np.exp(generator.uniform(*np.log([500.0, 20000.0])))
        reward = sigmoid(COMPUTE, A, B, C_mid, R0) + generator.normal(size=30) * generator.choice([0.005, 0.01, 0.03])
        limits = {"A": (0.0, 1.0), "R0": (0.0, 1.0), "B": bounds_of("B"), "C_mid": (1.0, 1e7)}
        sets.append(prepare(LAWS["sigmoid"], curve(np.clip(reward, 0, 1)), bounds=limits))
        starts.append([[0.6, 1.0, 1500.0, 0.3], [0.6, 3.0, 8000.0, 0.3]])
    low, high = (np.stack([getattr(data, end) for data in sets]) for end in ("low", "high"))
    starts = np.array(starts)
    ours = solve(LAWS["sigmoid"], batch_of(sets), starts, low, high)
    good = 0
    for k, data in enumerate(sets):
        theirs = np.inf
        for p0 in starts[k]:
            found, _ = curve_fit(
                sigmoid, COMPUTE, data.response, p0=p0, bounds=bounds, max_nfev=5000, x_scale=(1, 1, 1e3, 1)
            )
            theirs = min(theirs, np.sum((sigmoid(COMPUTE, *found) - data.response) ** 2))
        good += ours.objective[k] <= theirs * (1 + 1e-8)
    return good / count


def bounds_of(name: str) -> tuple[float, float]:
    (parameter,) = (parameter for parameter in LAWS["sigmoid"].parameters if parameter.name == name)
    return parameter.low, parameter.high


def test_never_worse_than_scipy_from_the_same_starts():
    assert never_worse_than_scipy(12, seed=0) == 1.0


@pytest.mark.slow
def test_never_worse_than_scipy_from_the_same_starts_on_1000_curves():
    assert never_worse_than_scipy(1000, seed=1) == 1.0


@pytest.mark.parametrize(
    ("R0", "lower", "upper"), [(None, 0.4, 0.58), (None, 0.0, 0.58), (None, 0.4, 1.0), (0.4, 0.4, 0.58)]
)
def test_bounds_hold_at_the_least_squares_optimum_under_them(R0, lower, upper):
    """Levels of .35 and .61 fitted within bounds that cut off one or both of them."""
    rewards = np.stack([noisy(seed, scale=0.02) for seed in range(4)])
    wide = prepare(LAWS["sigmoid"], curve(rewards[0]))
    low, high = np.tile(wide.low, (4, 1)), np.tile(wide.high, (4, 1))
    low[:, 0], high[:, 0], low[:, 3], high[:, 3] = lower, upper, lower, upper
    if R0 is not None:
        low[:, 3] = high[:, 3] = R0
    batch = batch_of([prepare(LAWS["sigmoid"], curve(reward)) for reward in rewards])
    ours = solve(LAWS["sigmoid"], batch, np.tile(wide.starts(), (4, 1, 1)), low, high)
    assert ours.converged.all()
    if upper == 0.58:
        np.testing.assert_allclose(ours.parameters[:, 0], upper, rtol=0, atol=1e-12)
    if lower == 0.4:
        np.testing.assert_allclose(ours.parameters[:, 3], lower, rtol=0, atol=1e-12)
    for k, reward in enumerate(rewards):
        if R0 is None:
            law, p0, least, most = sigmoid, (0.57, 2, 2500, 0.41), (0.5, 0.05, 1, lower), (upper, 50, 1e7, 0.5)
        else:
            law, p0, least, most = (
                lambda c, A, B, m: sigmoid(c, A, B, m, 0.4),
                (0.57, 2, 2500),
                (0.5, 0.05, 1),
                (upper, 50, 1e7),
            )
        theirs, _ = curve_fit(law, COMPUTE, reward, p0=p0, bounds=(least, most), max_nfev=5000)
        assert ours.objective[k] <= np.sum((law(COMPUTE, *theirs) - reward) ** 2) * (1 + 1e-8)
    found = np.stack([sigmoid(COMPUTE, *row) for row in ours.parameters])
    np.testing.assert_allclose(np.sum((found - rewards) ** 2, axis=1), ours.objective, rtol=1e-9)


def test_general_fitter_finds_what_projection_finds():
    data = prepare(LAWS["sigmoid"], curve(noisy(2)))
    every = np.stack([data.starts()])
    fits = [
        solve(LAWS["sigmoid"], batch_of([data]), every, data.low[None], data.high[None], project=project)
        for project in (True, False)
    ]
    np.testing.assert_allclose(fits[0].parameters, fits[1].parameters, rtol=1e-6)
    assert fits[0].objective[0] == pytest.approx(fits[1].objective[0], rel=1e-9)


def test_padding_and_batching_change_nothing():
    sets = [curve(noisy(2)[:20], COMPUTE[:20]), curve(noisy(3))]
    together = fit_many("sigmoid", [prepare(LAWS["sigmoid"], each) for each in sets])
    for both, each in zip(together, sets, strict=True):
        alone = fit("sigmoid", each)
        np.testing.assert_allclose(list(both.params.values()), list(alone.params.values()), rtol=1e-9)
        np.testing.assert_allclose(both.intervals["A"], alone.intervals["A"], rtol=1e-6)
        assert len(both.residuals) == len(each["reward"])


def test_weights_count_like_repeated_points():
    reward = noisy(4)[:20]
    times = np.where(np.arange(20) % 3 == 0, 2, 1)
    weighted = fit("sigmoid", curve(reward, COMPUTE[:20]), weights=times.astype(float))
    first, second = np.ones(20, bool), times == 2
    compute = np.concatenate([COMPUTE[:20][first], COMPUTE[:20][second]])
    repeated = fit(
        "sigmoid", curve(np.concatenate([reward, reward[second]]), compute), groups=["a"] * 20 + ["b"] * second.sum()
    )
    assert weighted.objective == pytest.approx(repeated.objective, rel=1e-9)
    assert weighted.params["A"] == pytest.approx(repeated.params["A"], rel=1e-6)


def test_float64_whatever_the_callers_configuration_and_no_trace_left():
    assert not jax.config.jax_enable_x64
    found = fit("sigmoid", curve(sigmoid(COMPUTE, **SCALERL)))
    assert found.objective < 1e-25  # float32 would leave some 1e-13
    assert not jax.config.jax_enable_x64


def test_a_good_curve_raises_no_doubt():
    found = fit("sigmoid", curve(noisy(8)), fixed={"R0": 0.35})
    assert found.warnings == ()
    assert found.undetermined == {}
    assert found.text("A").startswith("A = 0.6")
    assert json.loads(json.dumps(found.describe(), allow_nan=False))["params"] == found.params


def test_a_curve_before_its_middle_is_doubted():
    early = np.geomspace(100.0, 2000.0, 30)
    found = fit("sigmoid", curve(noisy(5, scale=0.003, compute=early, C_mid=6000.0), early))
    assert codes(found) & {"before_middle", "at_bound"}
    assert "A" in found.undetermined
    assert found.intervals["A"] is None
    assert found.text("A").startswith("A is not determined: ")
    assert str(found.params["A"])[:4] not in found.text("A").partition(":")[0]


def test_a_curve_before_its_middle_with_A_in_the_open():
    early = np.geomspace(100.0, 4000.0, 30)
    found = fit("sigmoid", curve(sigmoid(early, 0.61, 1.92, 6000.0, 0.35), early))
    assert "before_middle" in codes(found)
    assert {"A", "C_mid"} <= set(found.undetermined)


def test_A_at_its_bound_is_doubted():
    low = np.minimum(noisy(6, scale=0.001), 0.6)
    found = fit("sigmoid", curve(low), bounds={"A": (0.0, 0.6)})
    np.testing.assert_allclose(found.params["A"], 0.6, rtol=0, atol=1e-9)
    assert any("A is at its bound 0.6" in text for text in found.warnings)
    assert set(found.undetermined) == {"A", "B", "C_mid"}
    assert not fit("sigmoid", curve(noisy(6, scale=0.001)), bounds={"A": (0.0, 0.63)}).warnings


def test_collapse_is_doubted():
    reward = noisy(7)
    reward[-6:] = 0.4
    found = fit("sigmoid", curve(reward))
    assert "not_monotone" in codes(found)
    assert "A" in found.undetermined


def test_few_points_are_doubted():
    found = fit("sigmoid", curve(noisy(8)[::4], COMPUTE[::4]), fixed={"R0": 0.35})
    assert any("only 8 points" in text for text in found.warnings)


def test_noise_without_a_rise_is_doubted():
    flat = 0.5 + np.random.default_rng(9).normal(size=30) * 0.01
    try:
        warnings = fit("sigmoid", curve(flat)).warnings
    except UserError as error:
        warnings = (str(error),)
    assert any("no clear rise" in text or "does not rise" in text for text in warnings)


def test_a_wide_interval_is_no_number():
    compute = np.geomspace(300.0, 3200.0, 12)
    found = fit("sigmoid", curve(noisy(1, scale=0.02, compute=compute), compute))
    assert codes(found) == {"wide_interval"}
    assert "wider than the fitted gain" in found.undetermined["A"]


def test_what_can_change_together_is_named():
    # All points at one N: D's term is seen, N's cannot be told from the constant.
    D = np.geomspace(1e8, 1e11, 20)
    N = 1e8 * (1 + 1e-12 * np.arange(20))
    loss = 1.8 + 482.0 / N**0.35 + 2085.0 / D**0.37
    found = fit("kaplan_ND", {"N": N, "D": D, "loss": loss * (1 + 1e-3 * np.cos(np.arange(20)))})
    assert "not_identified" in codes(found)
    assert {"N_c", "alpha_N"} <= set(found.undetermined)


@pytest.mark.parametrize(
    ("compute", "reward", "options", "message"),
    [
        (COMPUTE[:3], [0.1, 0.2, 0.3], {"fixed": {"R0": 0.05}}, "3 points at positive compute are too few to fit 3"),
        (COMPUTE[:2], [0.1, 0.2], {}, "2 points are too few to fit 4 parameters; at least 5"),
        (COMPUTE[:4], [0.1, 0.2, 0.3, 0.4], {}, "4 points are too few to fit 4 parameters; at least 5"),
        ([], [], {}, "0 points are too few"),
        (COMPUTE[:6], [0.5] * 6, {}, "reward is 0.5 at every point"),
        (COMPUTE[:5], [0.1, 0.2, 0.3, 0.4, 1.2], {}, r"reward 1.2 at compute .* outside \[0, 1\]"),
        (COMPUTE[:5], [-0.5, 0.2, 0.3, 0.4, 0.5], {}, r"reward -0.5 at compute 300 lies outside"),
        (np.r_[0, COMPUTE[:5]], [-0.1, 0.1, 0.2, 0.3, 0.4, 0.5], {}, "reward -0.1 at zero compute|R0 fixed to -0.1"),
        (COMPUTE[:5], [0.1, np.nan, 0.3, 0.4, 0.5], {}, "reward is nan at point 2"),
        (COMPUTE[[0, 1, 1, 2, 3]], [0.1, 0.2, 0.3, 0.4, 0.5], {}, "compute repeats"),
        (COMPUTE[[0, 1, 3, 2, 4]], [0.1, 0.2, 0.3, 0.4, 0.5], {}, "compute falls from"),
        (-COMPUTE[:5][::-1], [0.1, 0.2, 0.3, 0.4, 0.5], {}, "compute is .* it cannot be negative"),
        (COMPUTE[:6], np.linspace(0.1, 0.6, 6), {"fixed": {"A": 0.3, "R0": 0.4}}, "R0 0.4 is not below A 0.3"),
        (COMPUTE[:6], np.linspace(0.1, 0.6, 6), {"fixed": {"A": 1.3}}, "A fixed to 1.3 lies outside"),
        (COMPUTE[:6], np.linspace(0.1, 0.6, 6), {"fixed": {"K": 1.3}}, "sigmoid has no parameter 'K'; it has A, B"),
        (COMPUTE[:6], np.linspace(0.1, 0.6, 6), {"bounds": {"A": (1, 0)}}, "bounds 1 to 0 of A mean nothing"),
        (COMPUTE[:6], np.linspace(0.1, 0.6, 6), {"weights": [1, 1, 1, 1, 1, 0]}, "weights must be 6 positive numbers"),
        (COMPUTE[:6], np.linspace(0.1, 0.6, 6), {"groups": ["a"]}, "1 group labels for 6 points"),
    ],
)
def test_degenerate_input_is_refused_with_the_reason(compute, reward, options, message):
    with pytest.raises(UserError, match=message):
        fit("sigmoid", curve(reward, np.asarray(compute, np.float64)), **options)


def test_options_that_mean_nothing_are_refused():
    with pytest.raises(UserError, match="column reward holds something that is not a number"):
        fit("sigmoid", {"compute": COMPUTE, "reward": ["high"] * 30})
    with pytest.raises(UserError, match="starts must be rows of finite numbers, one for each of A, B, C_mid, R0"):
        fit("sigmoid", curve(noisy(0)), starts=np.ones((2, 3)))
    with pytest.raises(UserError, match="level 95 is no share"):
        fit("sigmoid", curve(noisy(0)), level=95)
    with pytest.raises(UserError, match="no data set"):
        fit_many("sigmoid", [])
    found = fit("sigmoid", curve(noisy(0)))
    with pytest.raises(UserError, match="0 resamples"):
        bootstrap(found, resamples=0)
    with pytest.raises(UserError, match="unknown kind of bootstrap 'blocks'"):
        bootstrap(found, kind="blocks")
    with pytest.raises(UserError, match="compute -5 lies outside the law's domain"):
        found.predict(-5.0)
    with pytest.raises(UserError, match="R0 cannot be fixed and free at once"):
        fit("sigmoid", curve(noisy(0)), fixed={"R0": 0.3}, free=["R0"])
    with pytest.raises(UserError, match="not list"):
        fit("sigmoid", [1.0, 2.0])


def test_a_held_D_of_the_power_law_is_held():
    found = fit("power_law", curve(power_law(COMPUTE, 0.8, 0.4, 3.0)), fixed={"D": 2.0})
    assert found.params["D"] == pytest.approx(2.0, rel=1e-12)
    assert found.objective > 1e-6


def test_intervals_stay_within_bounds():
    found = fit("sigmoid", curve(np.linspace(0.1, 0.5, 30)))
    assert found.params["R0"] == 0.0
    assert found.intervals["R0"][0] == 0.0
    assert found.intervals["R0"][1] > 0.0


def test_an_interval_as_wide_as_the_bounds_is_no_number():
    found = fit("tan", {"N": [1, 1, 2, 2, 3, 3, 4.0], "X": [1, 2, 1, 2, 1, 2, 3.0], "loss": [0.9, 0.8] * 3 + [0.5]})
    assert "N_0" in found.undetermined


def test_a_law_that_the_data_contradicts_is_no_number():
    found = fit("isocompute", {"C": 10.0 ** np.arange(4, 10), "log2_n": [9, 8, 6, 4, 3, 3.0]})
    assert found.undetermined
    json.dumps(found.describe(), allow_nan=False)


def test_other_laws_refuse_too():
    with pytest.raises(UserError, match="unknown law 'sigmoidal'; choose one of sigmoid, power_law"):
        fit("sigmoidal", curve(noisy(0)))
    with pytest.raises(UserError, match="kaplan_N needs a column 'N'"):
        fit("kaplan_N", curve(noisy(0)))
    with pytest.raises(UserError, match="loss is 0 at point 2; it cannot be zero or negative"):
        fit("kaplan_N", {"N": [1e6, 1e7, 1e8], "loss": [3.0, 0.0, 2.0]})
    with pytest.raises(UserError, match="2 points are too few to fit 2 parameters; at least 3"):
        fit("kaplan_N", {"N": [1e6, 1e7], "loss": [3.0, 2.0]})
    with pytest.raises(UserError, match="flat and equally long"):
        fit("kaplan_N", {"N": [1e6, 1e7, 1e8], "loss": [3.0, 2.0]})
    rising = fit("kaplan_N", {"N": np.geomspace(1e6, 1e9, 8), "loss": np.linspace(2.0, 3.0, 8)})
    assert "at_bound" in codes(rising)


def test_a_falling_curve_is_refused():
    with pytest.raises(UserError, match="does not rise"):
        fit("sigmoid", curve(sigmoid(COMPUTE, **SCALERL)[::-1]), fixed={"R0": 0.62})


def test_seeds_in_one_fit_are_checked_one_by_one():
    half = COMPUTE[::2]
    both = {"compute": np.r_[half, half], "reward": np.r_[noisy(1)[::2], noisy(2)[::2]]}
    with pytest.raises(UserError, match="compute falls from"):
        fit("sigmoid", both)
    labels = ["one"] * 15 + ["two"] * 15
    assert fit("sigmoid", both, groups=labels).points == 30
    both["compute"][21] = both["compute"][20]
    with pytest.raises(UserError, match="two: compute repeats"):
        fit("sigmoid", both, groups=labels)


def test_power_law_overshoots_where_the_sigmoid_does_not():
    """ScaleRL: on the first half of a long run the power law runs to A = 1."""
    window = np.linspace(1500.0, 5000.0, 30)
    early = curve(noisy(10, scale=0.003, compute=window, C_mid=4000.0), window)
    power, ours = fit("power_law", early), fit("sigmoid", early, fixed={"R0": 0.35})
    np.testing.assert_allclose(power.params["A"], 1.0, rtol=0, atol=1e-6)
    assert any("A is at its bound 1" in text for text in power.warnings)
    assert abs(ours.params["A"] - 0.61) < 0.1


def test_power_law_predicts():
    found = fit("power_law", curve(power_law(COMPUTE, 0.8, 0.4, 3.0)))
    np.testing.assert_allclose(found.predict(COMPUTE[3]), power_law(COMPUTE[3], 0.8, 0.4, 3.0), atol=1e-9)


def test_a_fit_that_did_not_converge_is_no_number():
    data = prepare(LAWS["sigmoid"], curve(noisy(1)))
    solved = solve(LAWS["sigmoid"], batch_of([data]), data.starts()[None], data.low[None], data.high[None])
    (found,) = fits_of([data], dataclasses.replace(solved, converged=np.array([False])))
    assert set(found.undetermined) == {"A", "B", "C_mid", "R0"}
    assert all(ends is None for ends in found.intervals.values())
