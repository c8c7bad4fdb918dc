"""What enters a fit: one checked data set of a law, with what is held fixed and within which bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.engine import Batch
from jaxrl_llm.scaling.law import Law
from jaxrl_llm.types import UserError

FEWEST_POINTS = 4
R0Source = Literal["zero", "given", "free", "none"]


@dataclass(frozen=True)
class Data:
    """One data set of one law, float64.

    `columns` [C, N], `response` and `weights` [N]. `labels` names the G groups and `groups` [N] (int) says whose each
    point is (empty where the data has none). `low` and `high` [P] bound the parameters (equal: held fixed), `names` [P]
    names them, per-group ones as NAME[label]. `zeros` holds the rewards measured at zero compute, where R0 (their mean)
    was taken from them and they are not among the points; `reward_low` is then R0's lower bound. `measurements` [N]
    numbers the measurement that each row comes from, where several rows come from one.
    """

    law: Law
    columns: np.ndarray
    response: np.ndarray
    weights: np.ndarray
    labels: tuple[str, ...]
    groups: np.ndarray
    names: tuple[str, ...]
    low: np.ndarray
    high: np.ndarray
    r0_source: R0Source
    zeros: np.ndarray
    reward_low: float
    measurements: np.ndarray | None

    def __len__(self) -> int:
        return len(self.response)

    @property
    def link(self) -> np.ndarray:
        """The response as residuals see it: itself or its ln, [N]."""
        return self.response if self.law.log_function is None else np.log(self.response)

    @property
    def fixed(self) -> np.ndarray:
        """Which of the P parameters are held, bool [P]."""
        return self.low == self.high

    @property
    def ones(self) -> np.ndarray:
        """Which points belong to which group, [G, N] ones and zeros; G is 0 for a law without per-group parameters."""
        if not any(parameter.per_group for parameter in self.law.parameters):
            return np.zeros((0, len(self)))
        return (self.groups[None] == np.arange(len(self.labels))[:, None]).astype(np.float64)

    def starts(self) -> np.ndarray:
        """The law's starting points [S, P] within the bounds."""
        return np.clip(self.law.starts(tuple(self.columns), self.link, self.ones), self.low, self.high)


def batch_of(sets: Sequence[Data]) -> Batch:
    """Data sets of one law as one batch, padded at weight 0 to the longest and to the most groups."""
    width, most = max(map(len, sets)), max(data.ones.shape[0] for data in sets)

    def wide(values: np.ndarray, fill: np.ndarray) -> np.ndarray:
        missing = width - values.shape[-1]
        return np.concatenate([values, np.repeat(fill, missing, axis=-1)], axis=-1)

    return Batch(
        columns=np.stack([wide(data.columns, data.columns[:, :1]) for data in sets]),
        y=np.stack([wide(data.link, data.link[:1]) for data in sets]),
        weights=np.stack([wide(data.weights, np.zeros(1)) for data in sets]),
        groups=np.stack(
            [np.pad(wide(data.ones, data.ones[:, :1]), ((0, most - data.ones.shape[0]), (0, 0))) for data in sets]
        ),
    )


def prepare(
    law: Law,
    data: Curve | Mapping[str, Any],
    *,
    weights: Any = None,
    groups: Sequence[Any] | None = None,
    measurements: Any = None,
    fixed: Mapping[str, float] | None = None,
    free: Sequence[str] = (),
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> Data:
    """Check one data set and settle what is fixed; see `fit.fit` for the arguments. UserError with the reason."""
    columns, response = _columns(law, data)
    count = len(response)
    weights = np.ones(count) if weights is None else _numbers("weights", weights)
    if weights.shape != (count,) or not np.all(np.isfinite(weights)) or np.any(weights <= 0):
        raise UserError(f"weights must be {count} positive numbers, one for each point")
    labels, of = _grouped(law, count, groups)
    of_one = None
    if measurements is not None:
        if len(measurements) != count or law.levels is not None:
            raise UserError(
                f"measurements must number the {count} rows, and only of laws that repeat them ({law.name})"
            )
        of_one = np.unique(np.asarray(measurements), return_inverse=True)[1]
    if law.levels is not None:
        for index in range(max(len(labels), 1)):
            rows = of == index if len(labels) else np.ones(count, bool)
            try:
                Curve(columns[0, rows], response[rows])
            except UserError as error:
                raise UserError(f"{labels[index]}: {error}" if len(labels) else str(error)) from error

    fixed = dict(fixed or {})
    names = tuple(
        [p.name for p in law.parameters if not p.per_group]
        + [f"{p.name}[{label}]" for p in law.parameters if p.per_group for label in labels]
    )
    for name in (*fixed, *free, *(bounds or {})):
        if name not in names and name not in law.names:
            raise UserError(f"{law.name} has no parameter {name!r}; it has {', '.join(names)}")
    both = sorted(set(fixed) & set(free))
    if both:
        raise UserError(f"{', '.join(both)} cannot be fixed and free at once")
    source: R0Source = "none"
    zeros = np.array([])
    if law.name == "sigmoid":
        at_zero = columns[0] == 0
        source = "given" if "R0" in fixed else "free"
        if source == "free" and "R0" not in free and at_zero.any():
            zeros, source = response[at_zero], "zero"
            fixed["R0"] = float(zeros.mean())
        if source != "free":
            columns, response, weights, of = columns[:, ~at_zero], response[~at_zero], weights[~at_zero], of[~at_zero]
    least, greatest = _limits(law, names, columns, response, bounds)
    low, high = _held(names, least, greatest, fixed)
    found = Data(law, columns, response, weights, labels, of, names, low, high, source, zeros, float(least[-1]), of_one)
    _refuse(found, np.concatenate([response, zeros]), dict(zip(names, zip(least, greatest, strict=True), strict=True)))
    return found


def _columns(law: Law, data: Curve | Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(data, (Curve, Mapping)):
        raise UserError(f"data must be a Curve or columns by name, not {type(data).__name__}")
    if isinstance(data, Curve):
        data = {"compute": data.compute, "reward": data.reward}
    wanted = (*law.columns, law.response)
    for column in wanted:
        if column.name not in data:
            raise UserError(
                f"{law.name} needs a column {column.name!r} ({column.unit}); the data has {', '.join(map(str, data))}"
            )
    arrays = [_numbers(column.name, data[column.name]) for column in wanted]
    for column, array in zip(wanted, arrays, strict=True):
        if array.ndim != 1 or array.shape != arrays[-1].shape:
            raise UserError(
                f"column {column.name} has shape {array.shape} and {law.response.name} {arrays[-1].shape}; "
                "all columns must be flat and equally long"
            )
        bad = np.flatnonzero(~np.isfinite(array))
        if bad.size:
            raise UserError(f"{column.name} is {array[bad[0]]} at point {bad[0] + 1}; drop or repair that point")
        # The sigmoid's curves say themselves that compute cannot be negative.
        wrong = np.flatnonzero(array < 0 if column.zero else array <= 0) if column.positive else np.array([])
        if wrong.size:
            raise UserError(
                f"{column.name} is {array[wrong[0]]:g} at point {wrong[0] + 1}; "
                f"it cannot be {'negative' if column.zero else 'zero or negative'}"
            )
    return np.stack(arrays[:-1]), arrays[-1]


def _numbers(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"column {name} holds something that is not a number ({error})") from error


def _grouped(law: Law, count: int, groups: Sequence[Any] | None) -> tuple[tuple[str, ...], np.ndarray]:
    if groups is None:
        alone = ("all",) if any(parameter.per_group for parameter in law.parameters) else ()
        return alone, np.zeros(count, np.int64)
    if len(groups) != count:
        raise UserError(f"{len(groups)} group labels for {count} points; give one for each point")
    labels = tuple(dict.fromkeys(str(label) for label in groups))
    return labels, np.array([labels.index(str(label)) for label in groups], np.int64)


def _limits(
    law: Law,
    names: tuple[str, ...],
    columns: np.ndarray,
    response: np.ndarray,
    bounds: Mapping[str, tuple[float, float]] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The bounds [P] of every parameter: the caller's, else what the data can tell, else the law's."""
    by_name = {parameter.name: parameter for parameter in law.parameters}
    usable = response.size and (law.levels is None or np.any(columns[0] > 0))
    told = law.limits(tuple(columns), response) if law.limits is not None and usable else {}
    given = dict(bounds or {})
    low, high = np.empty(len(names)), np.empty(len(names))
    for index, name in enumerate(names):
        parameter = by_name[name.partition("[")[0]]
        plain = told.get(parameter.name, (parameter.low, parameter.high))
        least, greatest = given.get(name, given.get(parameter.name, plain))
        if not (np.isfinite(least) and np.isfinite(greatest) and least < greatest) or (parameter.log and least <= 0):
            raise UserError(
                f"bounds {least:g} to {greatest:g} of {name} mean nothing; give a lower and a higher number"
            )
        low[index], high[index] = least, greatest
    return low, high


def _held(
    names: tuple[str, ...], low: np.ndarray, high: np.ndarray, fixed: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The bounds with those of fixed parameters drawn together."""
    low, high = low.copy(), high.copy()
    for index, name in enumerate(names):
        value = fixed.get(name, fixed.get(name.partition("[")[0]))
        if value is None:
            continue
        if not np.isfinite(value) or not low[index] <= value <= high[index]:
            raise UserError(
                f"{name} fixed to {value:g} lies outside [{low[index]:g}, {high[index]:g}]; "
                "set the bounds or another value"
            )
        low[index] = high[index] = float(value)
    return low, high


def _refuse(data: Data, rewards: np.ndarray, bounds: Mapping[str, tuple[float, float]]) -> None:
    """UserError where no fit can mean anything."""
    law, free = data.law, int(np.sum(~data.fixed))
    if law.levels is not None:
        lower, upper = bounds.get("R0", bounds["A"])[0], bounds["A"][1]
        outside = np.flatnonzero((rewards < lower) | (rewards > upper))
        if outside.size:
            at = int(outside[0])
            where = f" at compute {data.columns[0, at]:g}" if at < len(data) else " at zero compute"
            raise UserError(
                f"reward {rewards[at]:g}{where} lies outside [{lower:g}, {upper:g}]; "
                "set the bounds of R0 and A to those of the reward"
            )
    needed = max(FEWEST_POINTS, free + 1) if law.levels is not None else free + 1
    if len(data) < needed:
        beyond = " at positive compute" if data.r0_source in ("zero", "given") else ""
        raise UserError(
            f"{len(data)} points{beyond} are too few to fit {free} parameters; at least {needed} are needed: "
            "measure more often or run longer"
        )
    if np.ptp(data.response) == 0:
        raise UserError(
            f"the {law.response.name} is {data.response[0]:g} at every point; constant data does not tell the "
            f"parameters of {law.name}"
        )
    for column, values in zip(law.columns, data.columns, strict=True):
        if np.ptp(values) == 0 and free:
            raise UserError(f"{column.name} is {values[0]:g} at every point; {law.name} needs it to vary")
    if law.name == "sigmoid":
        A, R0 = data.names.index("A"), data.names.index("R0")
        if data.low[R0] >= data.high[A]:
            raise UserError(f"R0 {data.low[R0]:g} is not below A {data.high[A]:g}; fix other values or bounds")
