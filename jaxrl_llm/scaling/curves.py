"""A curve of reward against compute, checked where it is born, and how a run's points make one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxrl_llm.types import RunPoint, UserError

Axis = Literal["flops", "tokens", "device_seconds"]
AXES: tuple[Axis, ...] = ("flops", "tokens", "device_seconds")


@dataclass(frozen=True)
class Curve:
    """`reward` after `compute`, both float64 [N]; compute starts at 0 or above and strictly increases.

    A first point at zero compute is an estimate of R0. Raises UserError for anything else, naming the point.
    """

    compute: np.ndarray
    reward: np.ndarray

    def __post_init__(self) -> None:
        compute = np.asarray(self.compute, dtype=np.float64)
        reward = np.asarray(self.reward, dtype=np.float64)
        if compute.ndim != 1 or compute.shape != reward.shape:
            raise UserError(
                f"a curve needs two equally long columns, got compute {compute.shape} and reward {reward.shape}"
            )
        for name, values in (("compute", compute), ("reward", reward)):
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                raise UserError(f"{name} is {values[bad[0]]} at point {bad[0] + 1}; drop or repair that point")
        if compute.size and compute[0] < 0:
            raise UserError(f"compute is {compute[0]:g} at point 1; it cannot be negative")
        bad = np.flatnonzero(np.diff(compute) <= 0)
        if bad.size:
            before, after = compute[bad[0]], compute[bad[0] + 1]
            what = "repeats" if before == after else f"falls from {before:g} to"
            raise UserError(
                f"compute {what} {after:g} at point {bad[0] + 2}; a curve needs strictly increasing compute: "
                "sort the points, average repeated ones, and keep different runs in different files"
            )
        object.__setattr__(self, "compute", compute)
        object.__setattr__(self, "reward", reward)

    def __len__(self) -> int:
        return len(self.compute)

    @property
    def zero(self) -> float | None:
        """The reward at zero compute, if the curve starts there."""
        return float(self.reward[0]) if len(self) and self.compute[0] == 0 else None

    def where(self, keep: np.ndarray) -> "Curve":
        """The points marked by the bool mask `keep` [N]."""
        return Curve(self.compute[keep], self.reward[keep])


def curve_of_points(points: Sequence[RunPoint], axis: Axis = "flops") -> Curve:
    """The evaluation curve of a run on one compute axis: "flops", "tokens" or "device_seconds"."""
    if axis not in AXES:
        raise UserError(f"unknown compute axis {axis!r}; choose one of {', '.join(AXES)}")
    try:
        return Curve(
            np.array([getattr(point, axis) for point in points], dtype=np.float64),
            np.array([point.metric for point in points], dtype=np.float64),
        )
    except UserError as error:
        raise UserError(f"the run's curve over {axis} has no use: {error}") from error
