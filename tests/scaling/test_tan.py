"""Tan et al.: published values, identities, and both kinds of prediction."""

import numpy as np
import pytest
from planted import CASES, MODELS, PHI

from jaxrl_llm.scaling import tan
from jaxrl_llm.scaling.bootstrap import bootstrap
from jaxrl_llm.scaling.fit import fit
from jaxrl_llm.types import UserError


def test_published_slopes():
    K_max, N_0 = tan.PUBLISHED["base", "C", "inter"]
    assert (K_max, N_0) == (0.1518, 17.37)
    # .1518/(1 + 17.37/N) worked by hand.
    worked = [0.1518 / 35.74, 0.1518 * 7 / 24.37, 0.1518 * 72 / 89.37]
    np.testing.assert_allclose([tan.slope(N, K_max, N_0) for N in (0.5, 7, 72)], worked, rtol=0, atol=1e-9)
    np.testing.assert_allclose(worked, [0.004247, 0.043603, 0.122296], rtol=0, atol=5e-7)
    assert tan.slope(N_0, K_max, N_0) == pytest.approx(K_max / 2, abs=1e-12)


def test_law_in_ln_and_in_loss():
    # k(7) ln 1e4 with k = .1518*7/24.37; e^(1 - that)
    k = 0.1518 * 7 / 24.37
    assert tan.log_loss(7.0, 1e4, 0.1518, 17.37, 1.0) == pytest.approx(1 - k * np.log(1e4), abs=1e-9)
    assert tan.loss(7.0, 1e4, 0.1518, 17.37, 1.0) == pytest.approx(np.e * 1e4**-k, abs=1e-9)


def test_loss_is_one_minus_the_share_of_the_best_reward():
    assert tan.loss_of_reward(0.3, 1.2) == pytest.approx(0.75, abs=1e-12)
    assert tan.reward_of_loss(0.75, 1.2) == pytest.approx(0.3, abs=1e-12)


def test_compute_and_data_share_one_slope():
    """C = N D phi: the law over C is the law over D with E_C = E_D + k ln(N phi)."""
    N, D, E_D = 7.0, np.geomspace(1e3, 1e5, 5), 0.4
    k = tan.slope(N, 0.16, 17.0)
    over_D = tan.log_loss(N, D, 0.16, 17.0, E_D)
    over_C = tan.log_loss(N, N * D * PHI, 0.16, 17.0, tan.compute_intercept(E_D, k, N, PHI))
    np.testing.assert_allclose(over_C, over_D, rtol=0, atol=1e-9)
    both = tan.both_axes_log_loss(N, N * D * PHI, 1.0, 0.16, 17.0, PHI, E_D)
    np.testing.assert_allclose(both, over_D, rtol=0, atol=1e-9)


def test_with_and_without_the_constraint():
    """Fitted apart, C and D give slopes of their own; fitted together, one."""
    case = CASES["tan_both"]
    data = case.data(case.draw(np.random.default_rng(0)))
    on = data.columns[2] > 0.5
    labels = np.array([data.labels[index] for index in data.groups])
    apart = [
        fit("tan", {"N": data.columns[0, r], "X": data.columns[1, r], "loss": data.response[r]}, groups=labels[r])
        for r in (on, ~on)
    ]
    together = fit(
        "tan_both",
        {"N": data.columns[0], "X": data.columns[1], "compute_axis": data.columns[2], "loss": data.response},
        groups=labels,
        **case.options,
    )
    assert apart[0].params["K_max"] != pytest.approx(apart[1].params["K_max"], rel=1e-4)
    low, high = sorted(each.params["K_max"] for each in apart)
    assert low <= together.params["K_max"] <= high
    assert together.params["phi"] == pytest.approx(PHI, rel=0.05)
    assert together.freedom == 96 - 9
    with pytest.raises(UserError, match="draw points"):
        bootstrap(together, resamples=2)


def test_a_larger_model_is_predicted_from_smaller_ones():
    case = CASES["tan, C"]
    found = fit(
        "tan",
        {**case.columns, "loss": np.exp(case.values() + 0.003 * case.draw(np.random.default_rng(3)))},
        groups=case.groups,
    )
    X = np.geomspace(1e18, 1e21, 12)
    truth = tan.loss(72.0, X, 0.1518, 17.37, 4.0)
    K_max, N_0 = found.params["K_max"], found.params["N_0"]
    E = tan.intercept(72.0, X[:3], truth[:3], K_max, N_0)
    predicted = tan.loss(72.0, X, K_max, N_0, E)
    np.testing.assert_allclose(predicted[-1], truth[-1], rtol=0.05)
    exact = tan.loss(72.0, X, 0.1518, 17.37, tan.intercept(72.0, X[:1], truth[:1], 0.1518, 17.37))
    np.testing.assert_allclose(exact, truth, rtol=1e-9)


def test_the_rest_of_a_run_is_predicted_from_its_first_part():
    case = CASES["tan, D"]
    first = case.columns["X"] <= 1e4
    loss = np.exp(case.values())
    found = fit(
        "tan",
        {"N": case.columns["N"][first], "X": case.columns["X"][first], "loss": loss[first]},
        groups=np.array(case.groups)[first],
    )
    for label in MODELS:
        rows = ~first & (np.array(case.groups) == label)
        predicted = found.predict(case.columns["N"][rows], case.columns["X"][rows], group=label)
        np.testing.assert_allclose(predicted, loss[rows], rtol=1e-6)
    with pytest.raises(UserError, match="no group '72B'"):
        found.predict(72.0, 1e4, group="72B")


def test_one_size_cannot_tell_the_slope_of_others():
    X = np.geomspace(1e3, 1e5, 12)
    with pytest.raises(UserError, match="N is 7 at every point"):
        fit("tan", {"N": np.full(12, 7.0), "X": X, "loss": tan.loss(7.0, X, 0.16, 17.0, 0.5)}, groups=["7B"] * 12)


def test_one_line():
    X = np.geomspace(1e18, 1e21, 6)
    assert tan.line_loss(1e18, 0.05, 1.9) == pytest.approx(np.exp(1.9) * 1e18**-0.05, abs=1e-9)
    np.testing.assert_allclose(tan.line_inverse(tan.line_loss(X, 0.05, 1.9), 0.05, 1.9), X, rtol=1e-9)
