"""Comparison of recipes: A first, then B at a common A, and when a run is not worth going on with."""

import json

import numpy as np
import pytest

from jaxrl_llm.scaling.compare import Estimate, _confidence, compare, stop_early
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.laws import sigmoid
from jaxrl_llm.types import UserError

COMPUTE = np.linspace(500.0, 15000.0, 30)


def curve(A, B=1.9, *, seed, noise=0.004, compute=COMPUTE, R0=0.3, C_mid=2500.0):
    return Curve(
        compute, sigmoid(compute, A, B, C_mid, R0) + noise * np.random.default_rng(seed).normal(size=len(compute))
    )


def recipe(A, B=1.9, *, first, shift=0.004, count=3, **options):
    """Seeds whose own A differ by `shift`, as those of a recipe do."""
    offsets = shift * np.array([-1.0, 0.0, 1.0, 0.5])[:count]
    return {str(k): curve(A + offset, B, seed=first + k, **options) for k, offset in enumerate(offsets)}


@pytest.fixture(scope="module")
def compared():
    return compare(
        {
            "base": recipe(0.61, first=0),
            "high": recipe(0.70, first=10),
            "slow": recipe(0.605, 1.3, first=20),
            "same": recipe(0.612, first=30),
            "short": {"0": curve(0.61, seed=40, compute=np.linspace(50.0, 1200.0, 30))},
        }
    )


def verdict(comparison, second):
    return next(v for v in comparison.verdicts if v.second == second)


def test_a_higher_ceiling_decides_before_efficiency(compared):
    found = verdict(compared, "high")
    assert (found.by, found.better) == ("A", "high")
    assert found.difference == pytest.approx(-0.09, abs=0.02)
    assert found.confidence > 0.99
    assert (found.holds, found.left_out) == (6, 6)
    assert "over 99 %" in found.text  # never 100 %


def test_equal_ceilings_are_compared_by_B_at_the_common_A(compared):
    found = verdict(compared, "slow")
    assert (found.by, found.better) == ("B", "base")
    assert np.exp(found.difference) == pytest.approx(1.9 / 1.3, rel=0.1)
    assert compared.common_A == pytest.approx(0.609, abs=0.006)
    rows = {r.name: r for r in compared.recipes}
    assert rows["high"].log_B is None
    for name in ("base", "slow", "same"):
        assert {one.params["A"] for one in rows[name].common.values()} == {compared.common_A}


def test_equal_recipes_are_not_decided(compared):
    found = verdict(compared, "same")
    assert (found.by, found.better) == ("B", None)
    assert "not decided" in found.text
    assert found.confidence < 0.95


def test_an_asymptote_that_is_not_determined_is_not_compared(compared):
    found = verdict(compared, "short")
    assert (found.by, found.better, found.confidence) == ("none", None, None)
    assert "cannot tell: A of short is not determined" in found.text
    assert any(text.startswith("short: 0 is left out") for text in compared.warnings)


def test_the_leave_one_out_table_is_strict_json(compared):
    found = json.loads(json.dumps(compared.describe(), allow_nan=False))
    rows = {row["recipe"]: row for row in found["leave_one_out"]}
    assert rows["base"]["A_minus_reference"] == 0
    assert rows["high"]["A_minus_reference"] == pytest.approx(0.09, abs=0.02)
    low, high = rows["base"]["A_interval"]
    assert low < 0.61 < high
    assert rows["slow"]["B_at_common_A"] == pytest.approx(1.3, rel=0.1)
    assert rows["short"]["A"] is None


def test_seeds_that_differ_widen_the_error_beyond_what_one_run_knows():
    near = compare({"a": recipe(0.61, first=0, shift=0.0), "b": recipe(0.64, first=10, shift=0.0)})
    far = compare({"a": recipe(0.61, first=0, shift=0.03), "b": recipe(0.64, first=10, shift=0.03)})
    assert near.verdicts[0].better == "b"
    assert far.verdicts[0].better is None
    assert far.recipes[0].A.freedom == 4  # six seeds, two means


def test_a_seed_whose_B_is_not_determined_at_the_common_A_is_named():
    # A step between two evaluations: its A is plain, its B is anything steep.
    step = Curve(COMPUTE, np.where(COMPUTE < 4000.0, 0.3, 0.61) + 0.01 * np.random.default_rng(7).normal(size=30))
    found = compare({"a": recipe(0.61, first=0), "b": {"0": curve(0.61, seed=9), "step": step}})
    rows = {one.name: one for one in found.recipes}
    assert set(rows["b"].fits) == {"0", "step"}
    assert set(rows["b"].common) == {"0"}
    assert any(
        text.startswith("b: step is left out of B at the common A (B is at its bound") for text in found.warnings
    )


def test_confidence_by_hand():
    # A difference of two standard errors: Phi(2) = .97725; with 4 degrees of freedom of both Welch's t has 8.
    one, two = Estimate(0.62, 0.003, np.inf), Estimate(0.61, 0.004, np.inf)
    assert _confidence(one, two) == pytest.approx(0.977250, abs=1e-5)
    one, two = Estimate(0.62, 0.005 / np.sqrt(2), 4.0), Estimate(0.61, 0.005 / np.sqrt(2), 4.0)
    assert _confidence(one, two) == pytest.approx(0.959742, abs=1e-5)  # Student's t, 8 degrees of freedom, at 2


def test_single_seeds_are_compared_with_a_warning():
    found = compare({"a": {"0": curve(0.61, seed=0)}, "b": {"0": curve(0.70, seed=1)}})
    assert found.verdicts[0].better == "b"
    assert found.verdicts[0].left_out == 0
    assert any("at most one seed of each recipe" in text for text in found.warnings)


def test_what_is_no_comparison_is_refused():
    with pytest.raises(UserError, match="at least two recipes, got 1"):
        compare({"a": {"0": curve(0.6, seed=0)}})
    with pytest.raises(UserError, match="level 95 between"):
        compare({"a": {"0": curve(0.6, seed=0)}, "b": {"0": curve(0.6, seed=1)}}, level=95)


def test_advice_to_stop():
    half = COMPUTE[:18]
    curves = {"good": curve(0.7, seed=1), "poor": curve(0.5, seed=2, compute=half)}
    found = stop_early("poor", curves, resamples=100)
    assert (found.action, found.best, found.at) == ("stop", "good", 15000.0)
    assert found.below > 0.99
    assert stop_early("good", curves, resamples=100).action == "continue"
    # Nearly the same recipe: the forecasts cannot tell which will be ahead.
    near = {"good": curve(0.7, seed=1), "poor": curve(0.7, seed=5, compute=half)}
    assert stop_early("poor", near, resamples=100).action != "stop"
    # So early that A is not determined.
    early = {"good": curve(0.7, seed=1), "poor": curve(0.5, seed=2, compute=np.linspace(30.0, 900.0, 30))}
    found = stop_early("poor", early, resamples=100)
    assert (found.action, found.below) == ("cannot tell", None)
    flat = {"good": curve(0.7, seed=1), "poor": Curve(half, np.full(18, 0.3))}
    assert "has no fit" in stop_early("poor", flat, resamples=100).text
    with pytest.raises(UserError, match="at least one other"):
        stop_early("poor", {"poor": curves["poor"]})
