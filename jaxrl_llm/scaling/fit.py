"""The front door: fit a law of the table to data, with intervals, residuals and every doubt about the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.stats

from jaxrl_llm.scaling.covariance import search_covariance, unidentified
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.data import Data, R0Source, batch_of, prepare
from jaxrl_llm.scaling.doubts import Flag, flags_of, reaches
from jaxrl_llm.scaling.engine import Solutions, linearise, logs, solve, to_search
from jaxrl_llm.scaling.law import Law
from jaxrl_llm.scaling.table import law_named
from jaxrl_llm.types import UserError

LEVEL = 0.95
SHORTLIST = 8


@dataclass(frozen=True)
class Fit:
    """One fitted law.

    `params` holds every parameter, fixed ones included; per-group ones are named NAME[label]. `intervals` has for each
    free or measured parameter its interval at `level`, or None where the data does not determine it; `covariance`
    [F, F] is that of the `free` parameters in search coordinates (ln where the law says so). `residuals` [N] are in the
    law's link (the response or its ln), `fitted` [N] in the response's unit. `objective` is the weighted sum of squared
    residuals, or the summed Huber loss; `noise` the residuals' standard deviation, degrees of freedom allowed for.
    `flags` carry every doubt; read a number with `text(name)`, which does not print one that the data does not tell.
    """

    law: str
    params: dict[str, float]
    free: tuple[str, ...]
    covariance: np.ndarray
    intervals: dict[str, tuple[float, float] | None]
    level: float
    objective: float
    noise: float
    points: int
    freedom: int
    converged: bool
    fitted: np.ndarray
    residuals: np.ndarray
    flags: tuple[Flag, ...]
    r0_source: R0Source
    protocol: str
    data: Data = field(repr=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The doubts in words."""
        return tuple(flag.text for flag in self.flags)

    @property
    def undetermined(self) -> dict[str, str]:
        """Parameters that the data does not tell, each with the first reason."""
        found: dict[str, str] = {}
        for flag in self.flags:
            for name in flag.undetermined:
                found.setdefault(name, flag.text)
        return found

    @property
    def fixed(self) -> tuple[str, ...]:
        """Parameters that were held."""
        return tuple(name for name in self.params if name not in self.free)

    def text(self, name: str) -> str:
        """One parameter in words: its value with its interval, or why there is none."""
        value = self.params[name]
        if name not in self.free:
            return f"{name} = {value:.4g} ({'measured' if self.r0_source == 'zero' and name == 'R0' else 'fixed'})"
        if name in self.undetermined:
            return f"{name} is not determined: {self.undetermined[name]}"
        interval = self.intervals[name]
        if interval is None:
            return f"{name} about {value:.4g}, interval unknown"
        return f"{name} = {value:.4g} ({self.level:.0%}: {interval[0]:.4g} to {interval[1]:.4g})"

    def predict(self, *columns: np.ndarray | float, group: str | None = None) -> np.ndarray:
        """The fitted response at the law's columns, in their order (any shapes that broadcast). `group` is needed where
        the law has a parameter for each group."""
        law = self.data.law
        for column, given in zip(law.columns, columns, strict=True):
            least = np.min(given, initial=np.inf)
            if column.positive and (least < 0 or (least == 0 and not column.zero)):
                raise UserError(f"{column.name} {least:g} lies outside the law's domain: it must be positive")
        values = []
        for parameter in law.parameters:
            name = f"{parameter.name}[{group}]" if parameter.per_group else parameter.name
            if name not in self.params:
                raise UserError(f"the fit has no group {group!r}; it has {', '.join(self.data.labels)}")
            values.append(self.params[name])
        return law.function(*(np.asarray(column, np.float64) for column in columns), *values)

    def describe(self) -> dict[str, Any]:
        """Plain numbers for JSON, without nan."""
        return {
            "law": self.law,
            "protocol": self.protocol,
            "params": dict(self.params),
            "fixed": list(self.fixed),
            "r0_source": self.r0_source,
            "interval": {name: None if ends is None else list(ends) for name, ends in self.intervals.items()},
            "level": self.level,
            "undetermined": self.undetermined,
            "noise": self.noise,
            "objective": self.objective,
            "points": self.points,
            "converged": self.converged,
            "warnings": list(self.warnings),
        }


def fit(
    law: str,
    data: Curve | Mapping[str, Any],
    *,
    weights: Any = None,
    groups: Sequence[Any] | None = None,
    measurements: Any = None,
    fixed: Mapping[str, float] | None = None,
    free: Sequence[str] = (),
    bounds: Mapping[str, tuple[float, float]] | None = None,
    starts: np.ndarray | None = None,
    level: float = LEVEL,
) -> Fit:
    """Fit the law of that name (`table.LAWS`) to one data set.

    `data` has the law's columns and its response by name, each [N]; a `Curve` does for the laws of reward over compute.
    `weights` [N] are relative; `groups` [N] labels the points (models of the "tan" laws; seeds of one recipe, which
    share all parameters, of the sigmoid); `measurements` [N] numbers them where one measurement makes several rows
    (`tan.both_axes`). `fixed` holds parameters by name, `bounds` replaces bounds. For the sigmoid,
    rewards at zero compute are taken as measurements of R0, unless R0 is fixed or named in `free`. `starts` [S, P]
    replaces the law's own starts. Raises UserError where the data cannot carry a fit.
    """
    checked = prepare(
        law_named(law),
        data,
        weights=weights,
        groups=groups,
        measurements=measurements,
        fixed=fixed,
        free=free,
        bounds=bounds,
    )
    return fit_many(law, [checked], starts=starts, level=level)[0]


def fit_many(law: str, sets: Sequence[Data], *, starts: np.ndarray | None = None, level: float = LEVEL) -> list[Fit]:
    """Fit K data sets (made by `data.prepare`) of one law in one batched call."""
    return fits_of(sets, solve_many(law_named(law), sets, starts=starts), level=level)


def solve_many(law: Law, sets: Sequence[Data], *, starts: np.ndarray | None = None) -> Solutions:
    """The bare solutions of K data sets with equally many parameters."""
    if not sets:
        raise UserError("there is no data set to fit; give at least one")
    sizes = {len(data.names) for data in sets}
    if len(sizes) != 1:
        raise UserError(f"data sets of one batch must have equally many groups, these have {sorted(sizes)} parameters")
    if starts is None:
        every = np.stack([data.starts() for data in sets])
    else:
        given = np.asarray(starts, np.float64)
        if given.ndim != 2 or given.shape[1] != len(sets[0].names) or not given.size or not np.all(np.isfinite(given)):
            raise UserError(f"starts must be rows of finite numbers, one for each of {', '.join(sets[0].names)}")
        every = np.stack([np.clip(given, data.low, data.high) for data in sets])
    low, high = (np.stack([getattr(data, end) for data in sets]) for end in ("low", "high"))
    return solve(law, batch_of(sets), every, low, high, shortlist=SHORTLIST)


def fits_of(
    sets: Sequence[Data], solutions: Solutions, *, level: float = LEVEL, protocol: str = "least_squares"
) -> list[Fit]:
    """`Fit`s of solved data sets, with their intervals and doubts; UserError where a curve does not rise."""
    if not 0 < level < 1:
        raise UserError(f"level {level:g} is no share; give one between 0 and 1, such as .95")
    law = sets[0].law
    values, jacobian = linearise(law, batch_of(sets), solutions.parameters)
    made = []
    for k, data in enumerate(sets):
        N = len(data)
        made.append(
            _fit_of(
                data,
                solutions.parameters[k],
                float(solutions.objective[k]),
                bool(solutions.converged[k]),
                values[k, :N],
                jacobian[k, :N],
                level,
                protocol,
            )
        )
    return made


def _fit_of(
    data: Data,
    parameters: np.ndarray,
    objective: float,
    converged: bool,
    values: np.ndarray,
    jacobian: np.ndarray,
    level: float,
    protocol: str,
) -> Fit:
    law = data.law
    if not np.isfinite(objective):
        raise UserError(f"no start led to a finite fit of {law.name}; check the data for outliers")
    params = {name: float(value) for name, value in zip(data.names, parameters, strict=True)}
    if law.name == "sigmoid" and params["A"] - params["R0"] <= 1e-6 * np.ptp(data.response):
        raise UserError(
            f"the reward does not rise above R0 = {params['R0']:.4g}: "
            "a falling or flat curve does not tell A, B or C_mid"
        )
    residuals = data.link - values
    flags = flags_of(data, params, residuals, converged)
    moving = ~data.fixed
    # R0 measured at zero compute is a measurement like the others: it has an uncertainty although nothing searched it.
    measured = np.array([data.r0_source == "zero" and name == "R0" for name in data.names])
    estimate = search_covariance(data, jacobian, residuals, moving, measured)
    free = tuple(name for name, counts in zip(data.names, moving, strict=True) if counts)
    flags.extend(unidentified(free, jacobian[:, moving] * np.sqrt(data.weights)[:, None]))
    spread = {name: np.sqrt(variance) for name, variance in zip(estimate.names, np.diag(estimate.matrix), strict=True)}
    tail = scipy.stats.t.ppf((1 + level) / 2, estimate.freedom)
    groups = data.ones.shape[0]
    centre, in_log = to_search(law, groups, parameters), logs(law, groups)
    reached: dict[str, tuple[float, float] | None] = {}
    for index, name in enumerate(data.names):
        if name not in spread:
            continue
        ends = np.array([-1.0, 1.0]) * tail * spread[name] + centre[index]
        if in_log[index]:
            ends = np.exp(np.clip(ends, -700.0, 700.0))
        reached[name] = (float(ends[0]), float(ends[1])) if np.all(np.isfinite(ends)) else None
    flags.extend(_interval_flags(data, params, reached, free))
    for name, least, greatest in zip(data.names, data.low, data.high, strict=True):
        ends = reached.get(name)
        if ends is None or least == greatest:
            continue
        if ends[0] <= least and ends[1] >= greatest:
            text = f"the interval of {name} covers all that its bounds allow, {least:.3g} to {greatest:.3g}"
            flags.append(Flag("wide_interval", text, (name,)))
        reached[name] = (max(ends[0], float(least)), min(ends[1], float(greatest)))
    lost = {name for flag in flags for name in flag.undetermined}
    fitted = values if law.log_function is None else np.exp(values)
    return Fit(
        law=law.name,
        params=params,
        free=free,
        covariance=estimate.matrix[: len(free), : len(free)],
        intervals={name: None if name in lost else ends for name, ends in reached.items()},
        level=level,
        objective=objective,
        noise=estimate.noise,
        points=len(data),
        freedom=estimate.freedom,
        converged=converged,
        fitted=fitted,
        residuals=residuals,
        flags=tuple(flags),
        r0_source=data.r0_source,
        protocol=protocol,
        data=data,
    )


def _interval_flags(
    data: Data, params: dict[str, float], intervals: dict[str, tuple[float, float] | None], free: tuple[str, ...]
) -> list[Flag]:
    interval = intervals.get("A")
    if data.law.name != "sigmoid" or "A" not in free or interval is None:
        return []
    low, high = interval
    upper = data.high[data.names.index("A")]
    if high - low > params["A"] - params["R0"]:
        text = f"the interval of A, {low:.3g} to {high:.3g}, is wider than the fitted gain A - R0"
        return [Flag("wide_interval", text, ("A",))]
    if reaches(high, upper) and not reaches(params["A"], upper):
        text = f"the interval of A reaches its bound {upper:g}: the data hardly limits A from above"
        return [Flag("wide_interval", text)]
    return []
