"""Residual bootstrap of the sigmoid fit: refit resampled curves, all in the batched fitter's compiled call."""

from dataclasses import dataclass

import numpy as np
import scipy.stats

from jaxrl_llm.scaling import laws
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fit import FitInput, Fits, SigmoidFit, fit_batch, prepare_sigmoid

RESAMPLES = 1000
LEVEL = 0.95

# Starts of every refit, relative to the original fit: B times the first, ln C_mid plus the second times the span of
# ln C. The first is the original fit itself.
_AROUND = ((1.0, 0.0), (1.7, -0.15), (0.6, 0.4), (3.0, 0.0))


@dataclass(frozen=True)
class Bootstrap:
    """R refits of resampled curves. A, B, C_mid, R0 are float64 [R]; `residuals` [N] are the original fit's, centred
    and scaled up for the degrees of freedom that the fit used and for Student's tails at the 95 % level."""

    A: np.ndarray
    B: np.ndarray
    C_mid: np.ndarray
    R0: np.ndarray
    residuals: np.ndarray
    converged: float  # share of the R refits
    seed: int

    def interval(self, level: float = LEVEL) -> dict[str, tuple[float, float]]:
        """Percentile intervals of A, B and C_mid at `level`."""
        tails = [(1 - level) / 2, (1 + level) / 2]
        ends = {name: np.quantile(getattr(self, name), tails) for name in ("A", "B", "C_mid")}
        return {name: (float(low), float(high)) for name, (low, high) in ends.items()}

    def band(self, compute: np.ndarray, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
        """Prediction band at `compute` [M]: where a new evaluation would fall, curve and noise together. Two [M]."""
        compute = np.asarray(compute, np.float64)
        refits = laws.sigmoid(compute[None], self.A[:, None], self.B[:, None], self.C_mid[:, None], self.R0[:, None])
        noise = np.random.default_rng(self.seed + 1).choice(self.residuals, size=refits.shape)
        low, high = np.quantile(refits + noise, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return low, high


def bootstrap_sigmoid(curve: Curve, fit: SigmoidFit, *, resamples: int = RESAMPLES, seed: int = 0) -> Bootstrap:
    """Residual bootstrap of `fit`, which `fit_sigmoid` made of `curve`; the same seed gives the same draws.

    Where R0 was measured at zero compute it is a measurement like the others, so it is resampled too.
    """
    given = prepare_sigmoid(
        curve,
        A=fit.A if fit.A_fixed else None,
        R0=fit.R0 if fit.r0_source == "given" else "free" if fit.r0_source == "free" else "auto",
        lower=fit.lower,
        upper=fit.upper,
    )
    levels = Fits(*(np.array([getattr(fit, name)]) for name in Fits.__annotations__))
    return bootstrap_batch([given], levels, resamples=resamples, seed=seed)[0]


def bootstrap_batch(
    inputs: list[FitInput], fits: Fits, *, resamples: int = RESAMPLES, seed: int = 0
) -> list[Bootstrap]:
    """`bootstrap_sigmoid` of K equally long curves in one batched fit; `fits` holds their K fits."""
    generator = np.random.default_rng(seed)
    drawn = [_resample(given, fits, k, resamples, generator) for k, given in enumerate(inputs)]
    first = inputs[0]
    compute = np.repeat(np.stack([given.curve.compute for given in inputs]), resamples, axis=0)
    starts = np.stack([_starts(given, fits, k) for k, given in enumerate(inputs)])
    refits = fit_batch(
        compute,
        np.concatenate([rewards for rewards, _, _ in drawn]),
        A=None if first.A is None else np.repeat(fits.A, resamples),
        R0=None if first.R0 is None else np.concatenate([R0 for _, R0, _ in drawn]),
        lower=first.lower,
        upper=first.upper,
        starts=np.repeat(starts, resamples, axis=0),
        shortlist=1,
    )
    result = []
    for k, (_, _, residuals) in enumerate(drawn):
        rows = slice(k * resamples, (k + 1) * resamples)
        result.append(
            Bootstrap(
                A=refits.A[rows],
                B=refits.B[rows],
                C_mid=refits.C_mid[rows],
                R0=refits.R0[rows],
                residuals=residuals,
                converged=float(np.mean(refits.converged[rows])),
                seed=seed,
            )
        )
    return result


def _resample(
    given: FitInput, fits: Fits, k: int, resamples: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Resampled rewards [R, N], the R0 [R] of each, and the residuals [N] they were drawn from."""
    curve = given.curve
    fitted = laws.sigmoid(curve.compute, fits.A[k], fits.B[k], fits.C_mid[k], fits.R0[k])
    residuals = curve.reward - fitted
    points = len(curve)
    # A fit swallows part of the noise: n residuals carry only n - k degrees of freedom. And their scale is itself an
    # estimate: with few of them the tails are Student's, which matters below some 30 points.
    freedom = points - given.free_parameters
    tails = scipy.stats.t.ppf((1 + LEVEL) / 2, freedom) / scipy.stats.norm.ppf((1 + LEVEL) / 2)
    residuals = (residuals - residuals.mean()) * np.sqrt(points / freedom) * tails
    noise = generator.choice(residuals, size=(resamples, points))
    R0 = np.full(resamples, fits.R0[k])
    if given.r0_source == "zero":
        ceiling = fits.A[k] if given.A is not None else given.upper
        R0 = np.clip(R0 + generator.choice(residuals, size=resamples), given.lower, ceiling - 1e-9)
    return fitted + noise, R0, residuals


def _starts(given: FitInput, fits: Fits, k: int) -> np.ndarray:
    positive = given.curve.compute[given.curve.compute > 0]
    span = np.log(positive[-1] / positive[0])
    factor, shift = np.array(_AROUND).T
    return np.stack([fits.B[k] * factor, fits.C_mid[k] * np.exp(shift * span)], axis=1)
