"""Compute-performance curves: laws, a batched fitter, intervals and forecasts.

Usable without the rest of the package: a CSV with a compute and a reward column suffices.

    curve = read_curve("curve.csv")
    print(forecast_curve(curve).describe())
    print(fit("sigmoid", curve).text("A"))
"""

from jaxrl_llm.scaling.bootstrap import Bootstrap, bootstrap, bootstrap_many
from jaxrl_llm.scaling.curves import Curve, curve_of_points
from jaxrl_llm.scaling.data import Data, prepare
from jaxrl_llm.scaling.fit import Fit, fit, fit_many
from jaxrl_llm.scaling.forecast import Forecast, forecast, forecast_curve
from jaxrl_llm.scaling.sources import NamedCurve, read_curve, read_curves
from jaxrl_llm.scaling.table import LAWS, law_named

__all__ = [
    "LAWS",
    "Bootstrap",
    "Curve",
    "Data",
    "Fit",
    "Forecast",
    "NamedCurve",
    "bootstrap",
    "bootstrap_many",
    "curve_of_points",
    "fit",
    "fit_many",
    "forecast",
    "forecast_curve",
    "law_named",
    "prepare",
    "read_curve",
    "read_curves",
]
