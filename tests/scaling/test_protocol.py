"""The published protocol, on curves made from rows of the published table."""

import numpy as np
import pytest

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.laws import sigmoid
from jaxrl_llm.scaling.protocol import fit_published_protocol, published_A_grid, published_C_mid_grid
from jaxrl_llm.types import UserError

POINTS = np.linspace(500.0, 16000.0, 30)


def test_grids_are_the_published_ones():
    A, C_mid = published_A_grid(), published_C_mid_grid()
    assert (A[0], A[1], A[-1], len(A)) == (0.45, 0.455, 0.8, 71)
    assert (C_mid[0], C_mid[-1], len(C_mid)) == (100.0, 40000.0, 100)
    np.testing.assert_allclose(np.diff(C_mid), 39900 / 99)


@pytest.mark.parametrize(("C_mid", "B", "A"), [(2542.0, 1.92, 0.610), (4242.0, 1.65, 0.710), (1675.0, 1.09, 0.615)])
def test_published_rows_come_back(C_mid, B, A):
    noise = np.random.default_rng(0).normal(size=30) * 0.001
    fit = fit_published_protocol(Curve(POINTS, sigmoid(POINTS, A, B, C_mid, 0.35) + noise), R0=0.35)
    assert fit.protocol == "published"
    assert fit.A in published_A_grid()
    assert fit.C_mid in published_C_mid_grid()
    assert abs(fit.A - A) <= 0.0151
    assert abs(fit.C_mid - C_mid) <= 403.04  # the grid's step
    assert fit.points == np.sum(POINTS >= 1500.0)


def test_a_planted_grid_point_comes_back_exactly():
    grid = np.array([2000.0, 3000.0, 4000.0])
    curve = Curve(np.r_[0.0, POINTS], np.r_[0.3, sigmoid(POINTS, 0.6, 1.7, 3000.0, 0.3)])
    fit = fit_published_protocol(curve, A_grid=[0.55, 0.6, 0.65], C_mid_grid=grid)
    assert (fit.A, fit.C_mid, fit.R0) == (0.6, 3000.0, 0.3)
    np.testing.assert_allclose(fit.B, 1.7, rtol=1e-6)
    assert fit.warnings == ()


def test_edge_of_a_grid_is_doubted():
    curve = Curve(POINTS, sigmoid(POINTS, 0.6, 1.7, 3000.0, 0.3))
    fit = fit_published_protocol(curve, R0=0.3, A_grid=[0.5, 0.55], C_mid_grid=[2500.0, 3000.0, 3500.0])
    assert any("A is at the edge 0.55" in text for text in fit.warnings)


def test_missing_R0_and_empty_grids_are_refused():
    curve = Curve(POINTS, sigmoid(POINTS, 0.6, 1.7, 3000.0, 0.3))
    with pytest.raises(UserError, match="give R0"):
        fit_published_protocol(curve)
    with pytest.raises(UserError, match="no A of the grid"):
        fit_published_protocol(curve, R0=0.85)
    with pytest.raises(UserError, match="too few"):
        fit_published_protocol(curve, R0=0.3, drop_before=15000.0)
