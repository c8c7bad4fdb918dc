"""Chinchilla: published values, approaches 1 and 2, and what became of the averaged objective."""

import numpy as np
import pytest
from planted import CASES

from jaxrl_llm.scaling import chinchilla
from jaxrl_llm.scaling.bootstrap import bootstrap
from jaxrl_llm.scaling.chinchilla_protocol import fit_published_chinchilla, objective
from jaxrl_llm.scaling.fit import fit
from jaxrl_llm.scaling.profile import profile
from jaxrl_llm.types import UserError

REPLICATION = chinchilla.REPLICATION
CASE = CASES["chinchilla"]
# A few of the published grid's 4,500: the best of the grid starts from near here as well.
STARTS = np.array(
    [[np.exp(e), np.exp(a), np.exp(b), 0.5, 0.5] for e in (0.0, 0.5) for a in (5.0, 10.0) for b in (5.0, 10.0)]
)


def points(seed: int) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(seed).normal(size=len(CASE.columns["N"])) * CASE.noise
    return {**CASE.columns, "loss": np.exp(CASE.values() + noise)}


def test_published_values():
    assert chinchilla.PUBLISHED == (1.69, 406.4, 410.7, 0.34, 0.28)
    N, D = 70e9, 1.4e12
    by_hand = 1.8172 + 482.01 / N**0.3478 + 2085.43 / D**0.3658
    assert chinchilla.loss(N, D, *REPLICATION) == pytest.approx(by_hand, abs=1e-9)
    assert chinchilla.log_loss(N, D, *REPLICATION) == pytest.approx(np.log(by_hand), abs=1e-9)


def test_huber():
    # inside: r^2/2; outside: delta (|r| - delta/2)
    np.testing.assert_allclose(
        chinchilla.huber(np.array([0.0, 5e-4, -1e-3, 2e-3, -1.0])), [0, 1.25e-7, 5e-7, 1.5e-6, 9.995e-4], atol=1e-15
    )


def test_optimal_split_is_the_minimum_on_its_budget():
    C = np.array([1e20, 5.76e23])
    split = chinchilla.optimal_split(C, *REPLICATION)
    np.testing.assert_allclose(6 * split.N * split.D, C, rtol=1e-12)
    a = REPLICATION.beta / (REPLICATION.alpha + REPLICATION.beta)
    G = (REPLICATION.alpha * REPLICATION.A / (REPLICATION.beta * REPLICATION.B)) ** (
        1 / (REPLICATION.alpha + REPLICATION.beta)
    )
    np.testing.assert_allclose(split.N, G * (C / 6) ** a, rtol=1e-9)
    for factor in (0.99, 1.01):
        assert np.all(chinchilla.loss(split.N * factor, split.D / factor, *REPLICATION) > split.loss)


def test_summed_objective_recovers_the_replication():
    exact = fit("chinchilla", {**CASE.columns, "loss": np.exp(CASE.values())})
    np.testing.assert_allclose(list(exact.params.values()), REPLICATION, rtol=1e-6)
    noisy = fit("chinchilla", points(0))
    for name, value in REPLICATION._asdict().items():
        low, high = noisy.intervals[name]
        assert low <= value <= high, name


def test_batched_fitter_is_not_above_lbfgs():
    data = points(1)
    published = fit_published_chinchilla(data, starts=STARTS)
    assert published.protocol == "published"
    assert published.warnings == ()
    ours = fit("chinchilla", data)
    assert ours.objective <= published.objective * (1 + 1e-9)
    value, _ = objective(
        np.array([*np.log(list(ours.params.values())[:3]), *list(ours.params.values())[3:]]),
        np.log(data["N"]), np.log(data["D"]), np.log(data["loss"]),
    )  # fmt: skip
    assert ours.objective == pytest.approx(value, rel=1e-9)


def test_gradient_of_the_published_objective():
    data = points(2)
    columns = np.log(data["N"]), np.log(data["D"]), np.log(data["loss"])
    p = np.array([0.5, 6.0, 7.0, 0.33, 0.35])
    _, gradient = objective(p, *columns)
    for index in range(5):
        step = np.zeros(5)
        step[index] = 1e-6
        slope = (objective(p + step, *columns)[0] - objective(p - step, *columns)[0]) / 2e-6
        assert gradient[index] == pytest.approx(slope, rel=1e-4)


def test_averaged_objective_stops_early_and_is_warned_about():
    averaged = fit_published_chinchilla(points(1), average=True, starts=STARTS)
    assert [flag.code for flag in averaged.flags if flag.code == "early_stop"] == ["early_stop"]
    assert not averaged.converged
    assert "the optimiser stopped early on the averaged objective" in averaged.warnings[-1]
    assert set(averaged.undetermined) == set(REPLICATION._fields)
    assert averaged.text("alpha").startswith("alpha is not determined")
    best = fit("chinchilla", points(1))
    assert averaged.objective > best.objective * 1.0001


def test_bootstrap_of_points():
    found = fit("chinchilla", points(3))
    drawn = bootstrap(found, kind="points", resamples=40)
    low, high = drawn.interval()["beta"]
    assert low < REPLICATION.beta < high
    assert drawn.converged > 0.9
    wald = found.intervals["beta"]
    assert 0.4 < (high - low) / (wald[1] - wald[0]) < 2.0
    with pytest.raises(UserError, match="Huber"):
        profile(found, "beta")


def curves() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training curves of 12 models, points along each."""
    N, C = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e7, 1e10, 12), np.geomspace(1e17, 1e22, 60)))
    return N, C, chinchilla.loss(N, C / (6 * N), *REPLICATION)


def test_approach_1_finds_the_exponent_of_the_envelope():
    optima = chinchilla.envelope_optima(*curves(), bins=300)
    found = fit("allocation", {"C": optima.C, "amount": optima.N})
    # The envelope of 12 sizes is a staircase around the optimum.
    a = REPLICATION.beta / (REPLICATION.alpha + REPLICATION.beta)
    assert found.params["a"] == pytest.approx(a, abs=0.02)
    np.testing.assert_allclose(6 * optima.N * optima.D, optima.C, rtol=1e-12)


def test_approach_2_finds_the_minimum_of_every_isoflop():
    C = np.repeat(np.geomspace(6e18, 3e21, 9), 11)
    N = chinchilla.optimal_split(C, *REPLICATION).N * np.tile(np.geomspace(0.6, 1 / 0.6, 11), 9)
    optima = chinchilla.isoflop_optima(N, C, chinchilla.loss(N, C / (6 * N), *REPLICATION))
    truth = chinchilla.optimal_split(optima.C, *REPLICATION)
    np.testing.assert_allclose(optima.N, truth.N, rtol=0.02)  # the curves are no exact parabolas
    np.testing.assert_allclose(optima.loss, truth.loss, rtol=1e-4)
    exact = chinchilla.isoflop_optima(N, C, 2.0 + 0.1 * np.log(N / (1e-3 * C**0.6)) ** 2)
    np.testing.assert_allclose(exact.N, 1e-3 * exact.C**0.6, rtol=1e-9)


@pytest.mark.parametrize(
    ("N", "C", "loss", "message"),
    [
        ([1e8, 2e8], [1e19, 1e19], [3.0, 2.9], "has 2 model sizes"),
        ([1e8, 2e8, 4e8], [1e19] * 3, [3.0, 2.9, 2.8], "no minimum between"),
        ([1e8, 2e8, 4e8], [1e19] * 3, [3.0, np.nan, 2.8], "column loss holds a value"),
        ([1e8, 2e8, 4e8], [1e19] * 2, [3.0, 2.9, 2.8], "column C has shape"),
    ],
)
def test_isoflops_without_an_optimum_are_refused(N, C, loss, message):
    with pytest.raises(UserError, match=message):
        chinchilla.isoflop_optima(N, C, loss)


def test_envelopes_without_an_optimum_are_refused():
    N, C, loss = curves()
    with pytest.raises(UserError, match="2 model sizes make no envelope"):
        chinchilla.envelope_optima(N[N < 2e7], C[N < 2e7], loss[N < 2e7])
    with pytest.raises(UserError, match="optimum lies outside the sizes"):
        chinchilla.envelope_optima(N, C, 5.0 - 0.1 * np.log(N))
    apart = np.repeat([1e8, 2e8, 4e8], 2), np.array([1.0, 2, 3, 4, 5, 6]) * 1e18, np.array([3, 2.9, 2.8, 2.7, 2.6, 2.5])
    with pytest.raises(UserError, match="at no budget is a model better"):
        chinchilla.envelope_optima(*apart)
