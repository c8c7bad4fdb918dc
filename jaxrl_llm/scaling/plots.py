"""Figures of fitted curves. Matplotlib's object interface only: no pyplot, no global state, no display."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxrl_llm.scaling import laws
from jaxrl_llm.scaling.fitted import FittedCurve
from jaxrl_llm.scaling.forecast import Forecast
from jaxrl_llm.types import UserError

AXIS_LABELS = {
    "flops": "training and sampling compute (FLOPs)",
    "tokens": "tokens",
    "device_seconds": "device-seconds",
    "compute": "compute",
}

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
FITTED, HELD_OUT, CURVE = "#1f4e79", "#d9822b", "#3b7dd8"
COLOURS = ("#3b7dd8", "#d9822b", "#2f9e6e", "#b0413e", "#7a5ea8", "#8a6d3b", "#c2578f", "#4d5b6a")
FORMATS = {".png", ".svg"}

Scale = Literal["linear", "log", "straight"]


class Picture(Figure):
    """A figure that a notebook shows although no pyplot is loaded."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG or SVG, by its name. Raises UserError for another ending or an unwritable place."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} ends in {path.suffix or 'nothing'}; a plot's name ends in .png or .svg")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error
    return path


def new_axes(width: float = 6.2, height: float = 3.4) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` inches with one plain set of axes, laid out when it is drawn."""
    figure = _new_figure(width, height)
    return figure, _plain(figure.add_subplot())


def _new_figure(width: float, height: float) -> Figure:
    figure = Picture(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Axes) -> Axes:
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(which="both", colors=MUTED, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return axes


def fits_figure(
    curves: Sequence[FittedCurve],
    *,
    kinds: Sequence[str] | None = None,
    scales: Sequence[Scale] | None = None,
    height: float = 3.6,
) -> Figure:
    """Fitted curves side by side on linear, log and straightened axes, one colour a curve, or one for each of `kinds`
    (the recipe of each curve).

    Full dots were fitted, hollow ones held out; the line is dashed where it is a forecast, the shade is the 95 %
    prediction band. Straightened, a sigmoid is the line ln((R - R0)/(A - R)) = B (ln C - ln C_mid): points outside
    (R0, A) have no place there, and laws other than the sigmoid have no such axes. Raises UserError without any curve.
    """
    if not curves:
        raise UserError("no curve to plot")
    if scales is None:
        straight = any(curve.fit is not None and curve.law == "sigmoid" for curve in curves)
        scales = ("linear", "log", "straight") if straight else ("linear", "log")
    kinds = [curve.source.name for curve in curves] if kinds is None else kinds
    order = list(dict.fromkeys(kinds))
    figure = _new_figure(4.6 * len(scales), height)
    for place, scale in enumerate(scales, start=1):
        axes = _plain(figure.add_subplot(1, len(scales), place))
        for index, (curve, kind) in enumerate(zip(curves, kinds, strict=True)):
            label = kind if kind not in kinds[:index] else "_"  # one entry of the legend for each kind
            _draw_fitted(axes, curve, scale, COLOURS[order.index(kind) % len(COLOURS)], label)
        axes.set_xscale("linear" if scale == "linear" else "log")
        axes.set_xlabel(", ".join(dict.fromkeys(AXIS_LABELS.get(c.source.x, c.source.x) for c in curves)))
        axes.set_ylabel(
            "ln((R - R0) / (A - R))" if scale == "straight" else ", ".join(dict.fromkeys(c.source.y for c in curves))
        )
        if place == 1:
            axes.legend(loc="best", fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")
    return figure


def _draw_fitted(axes: Axes, curve: FittedCurve, scale: Scale, colour: str, label: str) -> None:
    def shown(compute: np.ndarray, reward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if scale != "linear":
            compute, reward = compute[compute > 0], reward[compute > 0]
        if scale == "straight":
            assert curve.fit is not None
            reward = laws.log_odds(reward, curve.fit.params["A"], curve.fit.params["R0"])
        return compute, reward

    if scale == "straight" and (curve.fit is None or curve.law != "sigmoid"):
        return
    every = curve.source.curve.compute
    end = max([float(every[-1]), *(prediction.compute for prediction in curve.predictions if prediction.observed)])
    if curve.fit is not None:
        positive = every[every > 0]
        grid = np.geomspace(positive[0], end, 200) if scale != "linear" else np.linspace(positive[0], end, 200)
        last = float(curve.fitted.compute[-1])
        if curve.drawn is not None and scale != "straight":
            low, high = curve.drawn.band(grid)
            axes.fill_between(grid, low, high, color=colour, alpha=0.14, lw=0)
        x, y = shown(grid, curve.at(grid))
        axes.plot(x[x <= last], y[x <= last], color=colour, lw=1.8)
        axes.plot(x[x > last], y[x > last], color=colour, lw=1.8, ls=(0, (4, 2)))
    label += "" if curve.fit is not None or label == "_" else " (no fit)"
    axes.plot(*shown(curve.fitted.compute, curve.fitted.reward), "o", color=colour, ms=4, label=label)
    if len(curve.held_out):
        axes.plot(*shown(curve.held_out.compute, curve.held_out.reward), "o", mfc="white", mec=colour, mew=1.3, ms=4.5)


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
