"""Bootstrap of a fit: refit resampled data sets, all of them in the batched fitter's compiled call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import scipy.stats

from jaxrl_llm.scaling.data import Data, batch_of
from jaxrl_llm.scaling.engine import linearise, solve
from jaxrl_llm.scaling.fit import LEVEL, Fit
from jaxrl_llm.scaling.table import law_named
from jaxrl_llm.types import UserError

RESAMPLES = 1000
Kind = Literal["residual", "block", "points", "seeds"]

# Starts of every refit of a sigmoid, relative to the original fit: B times the first, ln C_mid plus the second times
# the span of ln C. The first is the original fit itself.
_AROUND = ((1.0, 0.0), (1.7, -0.15), (0.6, 0.4), (3.0, 0.0))


@dataclass(frozen=True)
class Bootstrap:
    """R refits of resampled data: `draws` [R, P], the parameters in the order of `fit.params`; `residuals` [N] are the
    original fit's, centred and scaled up for the degrees of freedom that the fit used and for Student's tails at the
    95 % level; `converged` is the share of the refits that did."""

    fit: Fit
    draws: np.ndarray
    residuals: np.ndarray
    converged: float
    kind: Kind
    seed: int

    def of(self, name: str) -> np.ndarray:
        """The R values of one parameter."""
        return self.draws[:, list(self.fit.params).index(name)]

    def interval(self, level: float = LEVEL) -> dict[str, tuple[float, float]]:
        """Percentile intervals at `level` of all parameters that were free or measured."""
        tails = [(1 - level) / 2, (1 + level) / 2]
        ends = np.quantile(self.draws, tails, axis=0)
        names = list(self.fit.params)
        low, high = ends[:, [names.index(name) for name in self.fit.intervals]]
        return {name: (float(low[k]), float(high[k])) for k, name in enumerate(self.fit.intervals)}

    def curves(self, *columns: np.ndarray, group: str | None = None) -> np.ndarray:
        """The R refitted laws at `columns` (each [M]), [R, M], in the response's unit."""
        law = law_named(self.fit.law)
        names = list(self.fit.params)
        wanted = [f"{p.name}[{group}]" if p.per_group else p.name for p in law.parameters]
        values = [self.draws[:, names.index(name), None] for name in wanted]
        return law.function(*(np.asarray(column, np.float64)[None] for column in columns), *values)

    def band(
        self, *columns: np.ndarray, level: float = LEVEL, group: str | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Prediction band at `columns` (each [M]): where a new measurement would fall, law and noise. Two [M]."""
        refits = self.curves(*columns, group=group)
        noise = np.random.default_rng(self.seed + 1).choice(self.residuals, size=refits.shape)
        in_ln = law_named(self.fit.law).log_function is not None
        drawn = refits * np.exp(noise) if in_ln else refits + noise
        low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return low, high


def bootstrap(
    fit: Fit, *, kind: Kind = "residual", block: int | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> Bootstrap:
    """Refit `resamples` resampled data sets; the same seed gives the same draws.

    "residual": residuals drawn one by one. "block": drawn in blocks of `block` neighbours (default: the cube root of
    the number of points), for noise that is correlated along a run. "points": the points themselves are drawn (what the
    Chinchilla replication does). "seeds": whole groups are drawn, for what differs from seed to seed.
    Where R0 was measured at zero compute it is a measurement like the others, so it is resampled too.
    """
    return bootstrap_many([fit], kind=kind, block=block, resamples=resamples, seed=seed)[0]


def bootstrap_many(
    fits: Sequence[Fit],
    *,
    kind: Kind = "residual",
    block: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Bootstrap]:
    """`bootstrap` of K equally long data sets of one law in one batched fit."""
    if resamples < 1:
        raise UserError(f"{resamples} resamples give no interval; a thousand are usual")
    if kind not in get_args(Kind):
        raise UserError(f"unknown kind of bootstrap {kind!r}; choose one of {', '.join(get_args(Kind))}")
    generator = np.random.default_rng(seed)
    law, sets = fits[0].data.law, [fit.data for fit in fits]
    batch = batch_of(sets)
    parameters = np.array([list(fit.params.values()) for fit in fits])
    values, _ = linearise(law, batch, parameters)
    pools, drawn = [], []
    for k, fit in enumerate(fits):
        pools.append(_pool(fit, values[k]))
        drawn.append(_resample(fit, values[k], pools[k], kind, block, resamples, generator))
    lanes = batch.repeat(resamples)
    lanes.y[:] = np.concatenate([y for y, _, _ in drawn])
    lanes.weights[:] = np.concatenate([weights for _, weights, _ in drawn])
    low, high = (
        np.repeat(np.stack([getattr(data, end) for data in sets]), resamples, axis=0) for end in ("low", "high")
    )
    if law.name == "sigmoid":
        R0 = np.concatenate([R0 for _, _, R0 in drawn])
        measured = np.repeat([data.r0_source == "zero" for data in sets], resamples)
        low[:, 3], high[:, 3] = np.where(measured, R0, low[:, 3]), np.where(measured, R0, high[:, 3])
    starts = np.repeat(np.stack([_starts(fit) for fit in fits]), resamples, axis=0)
    found = solve(law, lanes, starts, low, high, shortlist=1)
    result = []
    for k, fit in enumerate(fits):
        rows = slice(k * resamples, (k + 1) * resamples)
        share = float(np.mean(found.converged[rows]))
        result.append(Bootstrap(fit, found.parameters[rows], pools[k], share, kind, seed))
    return result


def _pool(fit: Fit, values: np.ndarray) -> np.ndarray:
    """The residuals [N] that resamples draw from.

    A fit swallows part of the noise: n residuals carry only n - k degrees of freedom. And their scale is itself an
    estimate: with few of them the tails are Student's, which matters below some 30 points.
    """
    residuals = fit.data.link - values
    tails = scipy.stats.t.ppf((1 + LEVEL) / 2, fit.freedom) / scipy.stats.norm.ppf((1 + LEVEL) / 2)
    return (residuals - residuals.mean()) * np.sqrt(len(residuals) / fit.freedom) * tails


def _resample(
    fit: Fit,
    values: np.ndarray,
    pool: np.ndarray,
    kind: Kind,
    block: int | None,
    resamples: int,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Resampled y [R, N], weights [R, N], and the R0 [R] measured at zero compute."""
    data = fit.data
    N = len(data)
    y = np.broadcast_to(data.link, (resamples, N))
    weights = np.broadcast_to(data.weights, (resamples, N))
    R0 = np.full(resamples, fit.params.get("R0", 0.0))
    measured = data.r0_source == "zero"
    if kind in ("residual", "block"):
        if data.measurements is not None:
            raise UserError("several rows come from one measurement, so residuals cannot be drawn alone; draw points")
        length = 1 if kind == "residual" else round(N ** (1 / 3)) if block is None else block
        if not 1 <= length <= N:
            raise UserError(f"a block of {length} does not fit {N} points; choose 1 to {N}")
        y = values + _blocks(pool, data, length, resamples, generator)
        if measured:
            noise = generator.choice(pool, size=(resamples, len(data.zeros))).mean(axis=1)
            R0 = _clipped(data, R0 + noise)
    elif kind == "points":
        source = np.arange(N) if data.measurements is None else data.measurements
        count = int(source.max()) + 1
        weights = data.weights * generator.multinomial(count, np.full(count, 1 / count), size=resamples)[:, source]
        if measured:
            R0 = generator.choice(data.zeros, size=(resamples, len(data.zeros))).mean(axis=1)
    else:
        seeds = len(data.labels)
        if seeds < 2 or any(parameter.per_group for parameter in data.law.parameters):
            raise UserError(
                f"a bootstrap of seeds needs at least 2 groups that share all parameters, this fit has {seeds}"
            )
        if measured and len(data.zeros) != seeds:
            raise UserError(f"{len(data.zeros)} of {seeds} seeds were measured at zero compute; measure all or none")
        counts = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples)
        weights = data.weights * counts[:, data.groups]
        if measured:
            R0 = counts @ data.zeros / seeds
    return y, weights, R0


def _blocks(pool: np.ndarray, data: Data, length: int, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Noise [R, N] drawn from the pool [N] in blocks of `length` neighbours; a block does not cross two runs."""
    noise = np.empty((resamples, len(pool)))
    for index in range(max(len(data.labels), 1)):
        rows = np.flatnonzero(data.groups == index)
        rows = rows[np.argsort(data.columns[0, rows], kind="stable")]
        size = min(length, len(rows))
        count = -(-len(rows) // size)
        first = generator.integers(0, len(rows) - size + 1, size=(resamples, count))
        chosen = (first[:, :, None] + np.arange(size)).reshape(resamples, -1)[:, : len(rows)]
        noise[:, rows] = pool[rows[chosen]]
    return noise


def _clipped(data: Data, R0: np.ndarray) -> np.ndarray:
    """R0 kept below A's bound, above which no sigmoid exists."""
    return np.minimum(R0, data.high[data.names.index("A")] - 1e-9)


def _starts(fit: Fit) -> np.ndarray:
    """[S, P]: the fit itself, for the sigmoid with some around it."""
    found = np.array(list(fit.params.values()))
    if fit.law != "sigmoid":
        return found[None]
    positive = fit.data.columns[0][fit.data.columns[0] > 0]
    span = np.log(positive.max() / positive.min())
    rows = np.tile(found, (len(_AROUND), 1))
    for row, (factor, shift) in zip(rows, _AROUND, strict=True):
        row[1] *= factor
        row[2] *= np.exp(shift * span)
    return rows
