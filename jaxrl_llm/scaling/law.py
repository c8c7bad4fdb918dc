"""What a law is to the fitter: a function, its columns, its parameters with their bounds, and where to start."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np


class Program(NamedTuple):
    """What a compiled descent depends on: laws that share it share the compiled program."""

    link: Callable[..., Any]
    logs: tuple[bool, ...]
    per_group: tuple[bool, ...]
    huber: float | None


@dataclass(frozen=True)
class Column:
    """One column of the data: its unit, and its domain (> 0; >= 0 where `zero`; any number where not `positive`)."""

    name: str
    unit: str
    positive: bool = True
    zero: bool = False


@dataclass(frozen=True)
class Parameter:
    """One parameter, within [low, high]. With `log` it is searched in ln, which keeps it positive; `per_group`: one
    value for each group of the data."""

    name: str
    meaning: str
    low: float
    high: float
    log: bool = True
    per_group: bool = False


@dataclass(frozen=True)
class Law:
    """One law.

    `function(*columns, *parameters)` gives the response; with numpy arrays or floats in float64 on the host, with JAX
    arrays traceable. Where `log_function` is given (the ln of the response, same arguments), residuals are taken in ln.
    `starts(columns, y, groups)` gives starting points, float64 [S, P] with the per-group parameters last: `columns` is
    a tuple of [N], `y` [N] the response (its ln where `log_function` is given), `groups` [G, N] ones and zeros.
    `limits(columns, y)` narrows the bounds of some parameters to what the data can tell: name -> (low, high).
    `inverse(y, *parameters)` is the single column at which the response is y, for laws of one column.
    `levels` names the shape of laws that are linear in two levels (see `projection`). `huber` is the delta of the
    summed Huber loss on the residuals; None means least squares.
    """

    name: str
    source: str
    columns: tuple[Column, ...]
    response: Column
    parameters: tuple[Parameter, ...]
    function: Callable[..., Any]
    starts: Callable[[tuple[np.ndarray, ...], np.ndarray, np.ndarray], np.ndarray]
    log_function: Callable[..., Any] | None = None
    limits: Callable[[tuple[np.ndarray, ...], np.ndarray], dict[str, tuple[float, float]]] | None = None
    inverse: Callable[..., Any] | None = None
    levels: Literal["sigmoid", "power"] | None = None
    huber: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in the order of the function's arguments."""
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def link(self) -> Callable[..., Any]:
        """The quantity that residuals are taken in: the response or its ln."""
        return self.function if self.log_function is None else self.log_function

    @property
    def program(self) -> Program:
        """The part of the law that is compiled."""
        return Program(
            self.link, tuple(p.log for p in self.parameters), tuple(p.per_group for p in self.parameters), self.huber
        )
