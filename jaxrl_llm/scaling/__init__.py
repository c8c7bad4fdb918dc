"""Compute-performance curves: laws, a batched fitter, intervals and forecasts.

Usable without the rest of the package: a CSV with a compute and a reward column suffices.

    curve = read_curve("curve.csv")
    print(forecast_curve(curve).describe())
"""

from jaxrl_llm.scaling.bootstrap import Bootstrap, bootstrap_sigmoid
from jaxrl_llm.scaling.curves import Curve, curve_of_points
from jaxrl_llm.scaling.fit import PowerLawFit, SigmoidFit, fit_power_law, fit_sigmoid
from jaxrl_llm.scaling.forecast import Forecast, forecast, forecast_curve
from jaxrl_llm.scaling.laws import power_law, sigmoid, straighten
from jaxrl_llm.scaling.protocol import fit_published_protocol
from jaxrl_llm.scaling.sources import NamedCurve, read_curve, read_curves

__all__ = [
    "Bootstrap",
    "Curve",
    "Forecast",
    "NamedCurve",
    "PowerLawFit",
    "SigmoidFit",
    "bootstrap_sigmoid",
    "curve_of_points",
    "fit_power_law",
    "fit_published_protocol",
    "fit_sigmoid",
    "forecast",
    "forecast_curve",
    "power_law",
    "read_curve",
    "read_curves",
    "sigmoid",
    "straighten",
]
