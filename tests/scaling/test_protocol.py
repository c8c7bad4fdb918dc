"""The published protocol, on curves made from the rows of the published table, beside our fitter and the power law."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.data import prepare
from jaxrl_llm.scaling.fit import fit_many
from jaxrl_llm.scaling.laws import sigmoid
from jaxrl_llm.scaling.protocol import fit_grid, fit_published_protocol, published_A_grid, published_C_mid_grid
from jaxrl_llm.scaling.table import LAWS
from jaxrl_llm.types import UserError

POINTS = np.linspace(500.0, 16000.0, 30)
R0 = 0.35
# C_mid, B, A of the published fits.
ROWS = {
    "ScaleRL": (2542.0, 1.92, 0.610),
    "32k generation": (11272.0, 1.89, 0.645),
    "8 generations": (2542.0, 2.44, 0.585),
    "24 generations": (3054.0, 2.22, 0.590),
    "32 generations": (2936.0, 2.07, 0.595),
    "Scout": (4242.0, 1.65, 0.710),
    "batch 512": (2818.0, 1.77, 0.605),
    "batch 2048": (10909.0, 1.70, 0.645),
    "math": (2896.0, 2.05, 0.595),
    "code": (1675.0, 1.09, 0.615),
}


def test_grids_are_the_published_ones():
    A, C_mid = published_A_grid(), published_C_mid_grid()
    assert (A[0], A[1], A[-1], len(A)) == (0.45, 0.455, 0.8, 71)
    assert (C_mid[0], C_mid[-1], len(C_mid)) == (100.0, 40000.0, 100)
    np.testing.assert_allclose(np.diff(C_mid), 39900 / 99)


def test_every_pair_holds_its_least_squares_B():
    reward = sigmoid(POINTS, 0.61, 1.92, 2542.0, R0) + np.random.default_rng(0).normal(size=30) * 0.01
    A, C_mid = published_A_grid()[::14], published_C_mid_grid()[::11]
    found = fit_grid(POINTS, reward, R0, A, C_mid)
    assert found.settled.all()
    for i, a in enumerate(A):
        for j, m in enumerate(C_mid):
            grid = np.linspace(*np.log([0.05, 50.0]), 400)

            def ssr(u, a=a, m=m):
                return np.sum((sigmoid(POINTS, a, np.exp(u), m, R0) - reward) ** 2)

            near = grid[np.argmin([ssr(u) for u in grid])]
            step = grid[1] - grid[0]
            low, high = max(near - step, grid[0]), min(near + step, grid[-1])
            best = minimize_scalar(ssr, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
            assert found.ssr[i, j] <= best.fun * (1 + 1e-9)
            assert found.ssr[i, j] == pytest.approx(ssr(np.log(found.B[i, j])), rel=1e-9)


@pytest.mark.parametrize("row", ["ScaleRL", "Scout", "code"])
def test_published_rows_come_back(row):
    C_mid, B, A = ROWS[row]
    noise = np.random.default_rng(0).normal(size=30) * 0.001
    found = fit_published_protocol(Curve(POINTS, sigmoid(POINTS, A, B, C_mid, R0) + noise), R0=R0)
    assert found.protocol == "published"
    assert found.params["A"] in published_A_grid()
    assert found.params["C_mid"] in published_C_mid_grid()
    assert abs(found.params["A"] - A) <= 0.0151
    assert abs(found.params["C_mid"] - C_mid) <= 403.04  # the grid's step
    assert found.points == np.sum(POINTS >= 1500.0)
    np.testing.assert_allclose(found.intervals["A"], [found.params["A"] - 0.02, found.params["A"] + 0.02])
    assert found.intervals["B"] is None


def test_a_planted_grid_point_comes_back_exactly():
    grid = np.array([2000.0, 3000.0, 4000.0])
    curve = Curve(np.r_[0.0, POINTS], np.r_[0.3, sigmoid(POINTS, 0.6, 1.7, 3000.0, 0.3)])
    found = fit_published_protocol(curve, A_grid=[0.55, 0.6, 0.65], C_mid_grid=grid)
    assert (found.params["A"], found.params["C_mid"], found.params["R0"]) == (0.6, 3000.0, 0.3)
    np.testing.assert_allclose(found.params["B"], 1.7, rtol=1e-6)
    assert found.warnings == ()


def test_edge_of_a_grid_is_doubted():
    curve = Curve(POINTS, sigmoid(POINTS, 0.6, 1.7, 3000.0, 0.3))
    found = fit_published_protocol(curve, R0=0.3, A_grid=[0.5, 0.55], C_mid_grid=[2500.0, 3000.0, 3500.0])
    assert any("A is at the edge 0.55" in text for text in found.warnings)
    assert "A" in found.undetermined
    assert found.intervals["A"] is None


def test_missing_R0_and_empty_grids_are_refused():
    curve = Curve(POINTS, sigmoid(POINTS, 0.6, 1.7, 3000.0, 0.3))
    with pytest.raises(UserError, match="give R0"):
        fit_published_protocol(curve)
    with pytest.raises(UserError, match="no A of the grid"):
        fit_published_protocol(curve, R0=0.85)
    with pytest.raises(UserError, match="too few"):
        fit_published_protocol(curve, R0=0.3, drop_before=15000.0)
    with pytest.raises(UserError, match="no A of the grid"):
        fit_published_protocol(curve, R0=np.nan)


def curves_of(row: str, runs: int, points: int) -> tuple[list[Curve], float]:
    """Curves of one row: `points` from 1,500 GPU-hours to four times C_mid (16,000 at least), noise within +-.01."""
    C_mid, B, A = ROWS[row]
    generator = np.random.default_rng(0)
    compute = np.linspace(1500.0, max(16000.0, 4 * C_mid), points)
    truth = sigmoid(compute, A, B, C_mid, R0)
    return [Curve(compute, truth + generator.uniform(-0.01, 0.01, points)) for _ in range(runs)], A


def errors(row: str, runs: int, points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A found minus A planted, [runs] each: by the published protocol, by our fitter, by the power law."""
    curves, A = curves_of(row, runs, points)
    published = np.empty(runs)
    for k, curve in enumerate(curves):
        found = fit_grid(curve.compute, curve.reward, R0, published_A_grid(), published_C_mid_grid())
        published[k] = published_A_grid()[np.unravel_index(np.argmin(found.ssr), found.ssr.shape)[0]]
    ours = fit_many("sigmoid", [prepare(LAWS["sigmoid"], curve, fixed={"R0": R0}) for curve in curves])
    power = fit_many("power_law", [prepare(LAWS["power_law"], curve) for curve in curves])
    return published - A, *(np.array([found.params["A"] for found in fits]) - A for fits in (ours, power))


def test_one_row_by_protocol_fitter_and_power_law():
    published, ours, power = errors("24 generations", 20, 30)
    assert np.mean(np.abs(published) <= 0.01501) >= 0.95
    assert np.mean(np.abs(ours) <= 0.015) >= 0.95
    assert np.mean(np.abs(ours)) <= np.mean(np.abs(published))
    assert np.mean(power > 0.015) >= 0.95


@pytest.mark.slow
def test_every_row_by_protocol_fitter_and_power_law():
    """A within .015 in 95 % of 100 runs of 75 points of every row by both; over all rows our error is no larger.
    Within some rows it is: the planted A lies on the protocol's grid, which then hits it exactly."""
    pooled = []
    for row in ROWS:
        published, ours, power = errors(row, 100, 75)
        assert np.mean(np.abs(published) <= 0.01501) >= 0.95, row
        assert np.mean(np.abs(ours) <= 0.015) >= 0.95, row
        assert np.mean(power > 0.015) >= 0.9, row
        pooled.append((np.mean(np.abs(published)), np.mean(np.abs(ours))))
    published, ours = np.mean(pooled, axis=0)
    assert ours <= published
