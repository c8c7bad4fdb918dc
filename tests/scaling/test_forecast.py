"""The forecast: first half against second half, and a plain ending where there is nothing to fit."""

import json

import numpy as np
import pytest

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import fit
from jaxrl_llm.scaling.forecast import forecast, forecast_curve
from jaxrl_llm.scaling.laws import sigmoid
from jaxrl_llm.scaling.plots import forecast_figure
from jaxrl_llm.types import RunPoint


def run(points: int, scale: float = 0.0, C_mid: float = 2.5e15) -> list[RunPoint]:
    noise = np.random.default_rng(0).normal(size=points) * scale
    flops = np.linspace(0.0, 9e15, points)
    reward = np.clip(sigmoid(flops, 0.9, 2.2, C_mid, 0.2) + noise, 0, 1)
    return [
        RunPoint(step=10 * k, flops=float(flops[k]), tokens=1000 * k, device_seconds=2.0 * k, metric=float(reward[k]))
        for k in range(points)
    ]


def test_first_half_by_compute_predicts_the_second():
    result = forecast(run(25), resamples=20)
    assert result.split == 4.5e15
    assert result.fit.fit.points == 12  # of 25 points 12 lie in (0, 4.5e15]; the one at 0 is R0
    assert len(result.held_out) == 12
    np.testing.assert_allclose(
        [result.fit.fit.params[name] for name in ("R0", "A", "B", "C_mid")],
        [0.2, 0.9, 2.2, 2.5e15],
        rtol=1e-6,
    )
    assert result.forecast_error == pytest.approx(0.0, abs=1e-7)
    assert result.full.fit.points == 24


def test_forecast_error_is_the_mean_absolute_error_of_the_held_out_points():
    points = run(25, scale=0.02)
    result = forecast(points, "tokens", resamples=20)
    curve = Curve(np.array([p.tokens for p in points], float), np.array([p.metric for p in points]))
    by_hand = fit("sigmoid", Curve(curve.compute[:13], curve.reward[:13]))
    errors = np.abs(by_hand.predict(curve.compute[13:]) - curve.reward[13:])
    assert result.forecast_error == pytest.approx(errors.mean(), rel=1e-9)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([], "0 points"),
        (run(1), "0 points at positive compute"),
        (run(2), "0 points at positive compute"),
        (run(7), "3 points at positive compute are too few"),
        ([RunPoint(k, 1e3 * k, k, 1.0 * k, 0.3) for k in range(20)], "0.3 at every point"),
        ([RunPoint(k, 1e3 * k, k, 1.0 * k, float("nan")) for k in range(20)], "reward is nan at point 1"),
        ([RunPoint(k, 0.0, k, 1.0 * k, 0.1) for k in range(20)], "compute repeats 0"),
    ],
)
def test_what_cannot_be_fitted_ends_with_a_reason(points, reason):
    result = forecast(points, resamples=20)
    assert result.fit is None
    assert reason in result.reason
    assert result.forecast_error is None
    json.dumps(result.describe(), allow_nan=False)


def test_full_curve_may_be_fitted_where_the_half_may_not():
    result = forecast(run(7), resamples=20)
    assert result.fit is None
    assert result.full.fit.points == 6


def test_upto_moves_the_split():
    points = run(25)
    curve = Curve(np.array([p.flops for p in points]), np.array([p.metric for p in points]))
    result = forecast_curve(curve, upto=6e15, resamples=20)
    assert result.fit.fit.points == 16
    assert len(result.held_out) == 8


def test_half_means_half_of_the_compute_not_of_the_points():
    compute = np.geomspace(3e14, 9e15, 20)
    result = forecast_curve(Curve(compute, sigmoid(compute, 0.9, 2.2, 2.5e15, 0.2)), resamples=20)
    assert result.fit.fit.points == np.sum(compute <= 4.5e15) == 16


def test_interval_that_reaches_the_bound_is_doubted():
    result = forecast(run(25, scale=0.03, C_mid=3.5e15), resamples=100)
    low, high = result.fit.interval["A"]
    assert low < high
    assert any("interval of A reaches its bound 1" in text for text in result.fit.warnings)


def test_description_is_strict_json():
    text = json.dumps(forecast(run(25, scale=0.01), resamples=20).describe(), allow_nan=False)
    fit = json.loads(text)["fit"]
    assert {"law", "A", "B", "C_mid", "R0", "interval", "warnings"} <= set(fit)
    assert fit["interval"]["A"][0] <= fit["A"] <= fit["interval"]["A"][1]


@pytest.mark.parametrize("x_scale", ["linear", "log"])
def test_figure_shows_points_line_and_band(x_scale):
    result = forecast(run(25, scale=0.01), resamples=20)
    axes = forecast_figure(result, x_scale=x_scale, y_label="mean@4").axes[0]
    shown = sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o")
    assert shown == (25 if x_scale == "linear" else 24)
    assert len(axes.collections) == 1
    low, high = axes.get_ylim()
    assert low <= 0.2
    assert high >= 0.85
    assert "held out" in " ".join(text.get_text() for text in axes.get_legend().get_texts())


def test_figure_without_a_fit_shows_the_points():
    axes = forecast_figure(forecast(run(2), resamples=20)).axes[0]
    assert sum(len(line.get_xdata()) for line in axes.lines) == 2
    with pytest.raises(ValueError, match="without points"):
        forecast_figure(forecast([], resamples=20))


def test_what_a_forecast_describes_is_json_whatever_the_curve():
    """A rise that is over before the first point puts B and C_mid on their bounds, where the Jacobian overflows."""
    curve = Curve(np.array([0, 4, 7, 11, 12, 13, 16.0]), np.array([0.087, 0.426, 0.397, 0.202, 0.938, 0.095, 0.005]))
    described = forecast_curve(curve, axis="flops", resamples=20, seed=0).describe()
    assert json.loads(json.dumps(described, allow_nan=False))["full"]["noise"] > 0.1
