"""Figures of fitted curves. Matplotlib's object interface only: no pyplot, no global state, no display."""

from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxrl_llm.scaling.forecast import Forecast

AXIS_LABELS = {
    "flops": "training and sampling compute (FLOPs)",
    "tokens": "tokens",
    "device_seconds": "device-seconds",
    "compute": "compute",
}

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
FITTED, HELD_OUT, CURVE = "#1f4e79", "#d9822b", "#3b7dd8"


def new_axes(width: float = 6.2, height: float = 3.4) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` inches with one plain set of axes, laid out when it is drawn."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(which="both", colors=MUTED, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return figure, axes


def forecast_figure(
    forecast: Forecast, *, x_scale: Literal["linear", "log"] = "linear", y_label: str = "reward", width: float = 6.2
) -> Figure:
    """Fitted points, the fit with its prediction band, and the held-out points that came after.

    Where the first part could not be fitted, the points alone. On the log axis a point at zero compute is left out.
    Raises ValueError for a curve without points.
    """
    curve = forecast.curve
    if not len(curve):
        raise ValueError("a curve without points has no figure")
    figure, axes = new_axes(width)
    shown = curve.compute > 0 if x_scale == "log" else np.ones(len(curve), bool)
    held_out = curve.compute > forecast.split
    fitted_part = forecast.fit
    if fitted_part is not None:
        label = "95 % prediction band"
        grid = fitted_part.grid
        axes.fill_between(grid, fitted_part.band_low, fitted_part.band_high, color=CURVE, alpha=0.16, lw=0, label=label)
        # Drawn on its own dense grid: on a linear axis the band's geometric grid is coarse at the right.
        start = grid[0] if x_scale == "log" else 0.0
        dense = np.geomspace(grid[0], grid[-1], 400) if x_scale == "log" else np.linspace(start, grid[-1], 400)
        line = fitted_part.fit.predict(dense)
        before = dense <= forecast.split
        axes.plot(dense[before], line[before], color=CURVE, lw=2, label="sigmoid, fitted")
        axes.plot(dense[~before], line[~before], color=CURVE, lw=2, ls=(0, (4, 2)), label="sigmoid, forecast")
        axes.axvline(forecast.split, color=MUTED, lw=1, ls=":")
    first, second = shown & ~held_out, shown & held_out
    seen = "evaluation" if fitted_part is None else "evaluation, used by the fit"
    axes.plot(curve.compute[first], curve.reward[first], "o", color=FITTED, ms=5, label=seen)
    unseen = "evaluation, second half" if fitted_part is None else "evaluation, held out"
    if second.any():
        axes.plot(
            curve.compute[second], curve.reward[second], "o", mfc="white", mec=HELD_OUT, mew=1.6, ms=5.5, label=unseen
        )
    axes.set_xscale(x_scale)
    axes.set_xlabel(AXIS_LABELS.get(forecast.axis, forecast.axis))
    axes.set_ylabel(y_label)
    _limit_levels(axes, forecast)
    axes.legend(loc="best", fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")
    return figure


def _limit_levels(axes: Axes, forecast: Forecast) -> None:
    """Keep the points readable where a poorly determined band would dwarf them."""
    low, high = float(forecast.curve.reward.min()), float(forecast.curve.reward.max())
    if forecast.fit is not None:
        span = max(high - low, 1e-3)
        low = max(min(low, float(forecast.fit.band_low.min())), low - 0.5 * span)
        high = min(max(high, float(forecast.fit.band_high.max())), high + 0.5 * span)
    margin = 0.06 * max(high - low, 1e-2)
    axes.set_ylim(low - margin, high + margin)
