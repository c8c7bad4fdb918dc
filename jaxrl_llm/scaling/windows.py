"""Out-of-sample error by rolling windows: fit the first part of a curve, hold the rest against it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import Fit, fit
from jaxrl_llm.types import UserError

FRACTIONS = (1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True)
class Window:
    """One window: the points up to `fraction` of the last compute were fitted, `held_out` points came after.

    `error` is the mean absolute error on them, `bias` the mean of predicted minus measured, `last_error` predicted
    minus measured at the last point, all in the reward's unit and None without a fit; `reason` says why there is none.
    """

    fraction: float
    split: float
    fit: Fit | None
    reason: str | None
    held_out: int
    error: float | None
    bias: float | None
    last_error: float | None


def rolling_windows(
    curve: Curve, *, law: str = "sigmoid", fractions: Sequence[float] = FRACTIONS, **options: Any
) -> list[Window]:
    """Fit the points up to each fraction of the last compute and predict the rest; `options` are those of `fit.fit`.

    A window that cannot be fitted is no error: it carries the reason. Raises UserError for a fraction outside (0, 1).
    """
    made = []
    for fraction in fractions:
        if not 0 < fraction < 1:
            raise UserError(f"a window of {fraction:g} of the curve leaves nothing to fit or to predict; use (0, 1)")
        split = float(fraction * curve.compute[-1]) if len(curve) else 0.0
        rest = curve.where(curve.compute > split)
        try:
            found = fit(law, curve.where(curve.compute <= split), **options)
        except UserError as error:
            made.append(Window(fraction, split, None, str(error), len(rest), None, None, None))
            continue
        off = found.predict(rest.compute) - rest.reward
        made.append(
            Window(
                fraction, split, found, None, len(rest), float(np.abs(off).mean()), float(off.mean()), float(off[-1])
            )
        )
    return made


def describe_windows(windows: Sequence[Window]) -> list[Mapping[str, Any]]:
    """Plain numbers for JSON."""
    return [
        {
            "fraction": window.fraction,
            "split": window.split,
            "points": None if window.fit is None else window.fit.points,
            "held_out": window.held_out,
            "error": window.error,
            "bias": window.bias,
            "last_error": window.last_error,
            "reason": window.reason,
            "warnings": [] if window.fit is None else list(window.fit.warnings),
        }
        for window in windows
    ]
