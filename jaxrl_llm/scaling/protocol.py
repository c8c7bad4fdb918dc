"""The fitting protocol published with ScaleRL, exactly: grids over A and C_mid, only B fitted."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import Fits, SigmoidFit, fit_batch, prepare_sigmoid, sigmoid_fit
from jaxrl_llm.types import UserError

_START_B = (0.5, 1.5, 4.0)


def published_A_grid() -> np.ndarray:
    """.450, .455, ..., .800."""
    return np.arange(450, 801, 5) / 1000


def published_C_mid_grid() -> np.ndarray:
    """100 evenly spaced values from 100 to 40,000 GPU-hours."""
    return np.linspace(100.0, 40000.0, 100)


def fit_published_protocol(
    curve: Curve,
    *,
    R0: float | None = None,
    drop_before: float = 1500.0,
    A_grid: Sequence[float] | np.ndarray | None = None,
    C_mid_grid: Sequence[float] | np.ndarray | None = None,
    lower: float = 0.0,
    upper: float = 1.0,
) -> SigmoidFit:
    """Fit the sigmoid as ScaleRL's authors did: for each (A, C_mid) of the grids fit B by least squares, keep the
    least sum of squared residuals.

    Points before `drop_before` (about one epoch: 1,500 GPU-hours) are left out. Compute is in GPU-hours unless
    `C_mid_grid` and `drop_before` say otherwise. `R0` defaults to the reward at zero compute, which the curve must
    then have. Raises UserError for a missing R0, too few points, or a grid that no curve can be drawn on.
    """
    zero = curve.zero
    R0 = zero if R0 is None else R0
    if R0 is None:
        raise UserError("the published protocol holds R0 fixed and the curve has no point at zero compute; give R0")
    A_grid = np.asarray(published_A_grid() if A_grid is None else A_grid, np.float64)
    C_mid_grid = np.asarray(published_C_mid_grid() if C_mid_grid is None else C_mid_grid, np.float64)
    A_grid = A_grid[A_grid > R0]
    if not A_grid.size:
        raise UserError(f"no A of the grid lies above R0 = {R0:g}; the published grid runs from .45 to .80")
    if not C_mid_grid.size or np.any(C_mid_grid <= 0):
        raise UserError("the C_mid grid must hold positive values")
    # A point at zero compute has told R0 by now and carries nothing about B.
    kept = curve.where((curve.compute >= drop_before) & (curve.compute > 0))
    given = prepare_sigmoid(kept, R0=R0, lower=lower, upper=upper)

    A_pairs, C_mid_pairs = (grid.ravel() for grid in np.meshgrid(A_grid, C_mid_grid, indexing="ij"))
    pairs = len(A_pairs)
    fits = fit_batch(
        np.tile(kept.compute, (pairs, 1)),
        np.tile(kept.reward, (pairs, 1)),
        shape="sigmoid_b",
        A=A_pairs,
        R0=R0,
        C_mid=C_mid_pairs,
        lower=lower,
        upper=upper,
        starts=np.tile(np.array(_START_B)[:, None], (pairs, 1, 1)),
        shortlist=1,
    )
    best = int(np.argmin(np.where(np.isfinite(fits.ssr), fits.ssr, np.inf)))
    found = sigmoid_fit(given, Fits(*(getattr(fits, name)[best : best + 1] for name in Fits.__annotations__)))
    edges = [
        f"{name} is at the edge {value:g} of its grid"
        for name, value, grid in (("A", found.A, A_grid), ("C_mid", found.C_mid, C_mid_grid))
        if value in (grid[0], grid[-1])
    ]
    return dataclasses.replace(found, warnings=(*found.warnings, *edges), protocol="published")
