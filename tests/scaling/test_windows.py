"""Out-of-sample errors by rolling windows, and seeds of one recipe."""

import numpy as np
import pytest

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import fit
from jaxrl_llm.scaling.laws import sigmoid
from jaxrl_llm.scaling.seeds import fit_seeds
from jaxrl_llm.scaling.windows import describe_windows, rolling_windows
from jaxrl_llm.types import UserError

COMPUTE = np.linspace(400.0, 16000.0, 40)


def noisy(seed: int, scale: float, A: float = 0.61) -> Curve:
    noise = np.random.default_rng(seed).normal(size=40) * scale
    return Curve(COMPUTE, sigmoid(COMPUTE, A, 1.92, 2542.0, 0.35) + noise)


def test_windows_of_a_noiseless_curve_predict_exactly():
    eighth, quarter, half = rolling_windows(noisy(0, 0.0), fixed={"R0": 0.35})
    assert [window.fraction for window in (eighth, quarter, half)] == [1 / 8, 1 / 4, 1 / 2]
    assert [window.held_out for window in (eighth, quarter, half)] == [35, 30, 20]
    assert eighth.fit.points == 5
    for window in (eighth, quarter, half):
        assert window.error == pytest.approx(0.0, abs=1e-6)


def test_error_and_bias_are_those_of_the_held_out_points():
    curve = noisy(1, 0.02)
    (window,) = rolling_windows(curve, fractions=[0.5])
    by_hand = fit("sigmoid", Curve(COMPUTE[:20], curve.reward[:20]))
    off = by_hand.predict(COMPUTE[20:]) - curve.reward[20:]
    assert window.error == pytest.approx(np.abs(off).mean(), rel=1e-9)
    assert window.bias == pytest.approx(off.mean(), rel=1e-9)
    assert window.last_error == pytest.approx(off[-1], rel=1e-9)


def test_a_window_that_cannot_be_fitted_says_why():
    early, _ = described = describe_windows(rolling_windows(noisy(2, 0.01), fractions=[1 / 20, 1 / 2]))
    assert early["error"] is None
    assert "2 points are too few" in early["reason"]
    assert described[1]["reason"] is None
    with pytest.raises(UserError, match="a window of 1 of the curve"):
        rolling_windows(noisy(2, 0.01), fractions=[1.0])


def test_seeds_spread_and_their_interval():
    levels = {"a": 0.60, "b": 0.61, "c": 0.62}
    found = fit_seeds({name: noisy(0, 0.0, A) for name, A in levels.items()}, fixed={"R0": 0.35})
    assert found.mean["A"] == pytest.approx(0.61, abs=1e-6)
    assert found.spread["A"] == pytest.approx(0.02, abs=1e-6)
    # t with 2 degrees of freedom at 97.5 % is 4.302653; the standard error .01/sqrt(3).
    assert found.intervals["A"][1] - 0.61 == pytest.approx(4.302653 * 0.01 / np.sqrt(3), rel=1e-5)
    assert found.mean["C_mid"] == pytest.approx(2542.0, rel=1e-5)
    assert found.pooled.points == 120
    assert 0.60 < found.pooled.params["A"] < 0.62
    with pytest.raises(UserError, match="1 seed tells nothing about others"):
        fit_seeds({"a": noisy(0, 0.01)})
