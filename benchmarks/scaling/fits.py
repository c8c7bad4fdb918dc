"""How fast are the scaling fits: the published protocol beside the same written with scipy, and the bootstrap.

    python benchmarks/scaling/fits.py [--pairs 400] [--repeats 20]

Every ratio is of one process and one run. Compilation is printed apart. The scipy side is `curve_fit` without
bounds (MINPACK: its fastest method) on evenly spaced (A, C_mid) pairs of the published grid.
"""

import argparse
import json
import time
import warnings

import numpy as np
from scipy.optimize import curve_fit

from jaxrl_llm.scaling.bootstrap import RESAMPLES, bootstrap
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import fit
from jaxrl_llm.scaling.laws import sigmoid
from jaxrl_llm.scaling.protocol import fit_grid, published_A_grid, published_C_mid_grid

R0 = 0.35
POINTS = 75


def median_seconds(function, repeats: int) -> float:
    """The median wall time of a call."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def scipy_pair(curve: Curve, A: float, C_mid: float) -> float:
    """The SSR of the best B of one pair."""

    def law(C: np.ndarray, B: float) -> np.ndarray:
        return R0 + (A - R0) / (1 + (C_mid / C) ** B)

    (B,), _ = curve_fit(law, curve.compute, curve.reward, p0=(1.5,), maxfev=2000)
    return float(np.sum((law(curve.compute, B) - curve.reward) ** 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=400, help="pairs that scipy fits")
    parser.add_argument("--repeats", type=int, default=20, help="calls of ours that are timed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # curve_fit's, on pairs that no curve resembles

    compute = np.linspace(1500.0, 16000.0, POINTS)
    noise = np.random.default_rng(0).normal(size=POINTS) * 0.01
    curve = Curve(compute, sigmoid(compute, 0.61, 1.92, 2542.0, R0) + noise)
    A_grid, C_mid_grid = published_A_grid(), published_C_mid_grid()
    pairs = [(A, C_mid) for A in A_grid for C_mid in C_mid_grid]
    every = pairs[:: max(len(pairs) // options.pairs, 1)]

    begin = time.perf_counter()
    fit_grid(curve.compute, curve.reward, R0, A_grid, C_mid_grid)
    protocol_compile_s = time.perf_counter() - begin
    # The two sides take turns, so that a busy machine slows both.
    ours, theirs = [], []
    for part in np.array_split(np.arange(len(every)), options.repeats):
        ours.append(median_seconds(lambda: fit_grid(curve.compute, curve.reward, R0, A_grid, C_mid_grid), 3))
        begin = time.perf_counter()
        for k in part:
            scipy_pair(curve, *every[k])
        theirs.append((time.perf_counter() - begin) / max(len(part), 1))
    our_fits_per_s = len(pairs) / float(np.median(ours))
    scipy_fits_per_s = 1 / float(np.median(theirs))

    begin = time.perf_counter()
    found = fit("sigmoid", curve)
    fit_compile_s = time.perf_counter() - begin
    begin = time.perf_counter()
    bootstrap(found, resamples=RESAMPLES)
    first_bootstrap_s = time.perf_counter() - begin
    print(
        json.dumps(
            {
                "points": POINTS,
                "protocol_fits": len(pairs),
                "protocol_compile_s": round(protocol_compile_s, 2),
                "protocol_curve_s": round(float(np.median(ours)), 4),
                "protocol_fits_per_s": round(our_fits_per_s),
                "scipy_fits_per_s": round(scipy_fits_per_s),
                "ratio": round(our_fits_per_s / scipy_fits_per_s),
                "fit_first_call_s": round(fit_compile_s, 2),
                "fit_s": round(median_seconds(lambda: fit("sigmoid", curve), 5), 4),
                "bootstrap_resamples": RESAMPLES,
                "bootstrap_first_call_s": round(first_bootstrap_s, 2),
                "bootstrap_s": round(median_seconds(lambda: bootstrap(found, resamples=RESAMPLES), 5), 3),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
