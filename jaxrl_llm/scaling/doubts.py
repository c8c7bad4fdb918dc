"""What makes a fit doubtful, and which parameters it then does not determine."""

from dataclasses import dataclass

import numpy as np

from jaxrl_llm.scaling.data import Data

COMFORTABLE_POINTS = 10
EDGE = 1e-6


@dataclass(frozen=True)
class Flag:
    """One doubt: a stable `code` for programs, a sentence for people, and the parameters that it leaves undetermined.

    Codes: not_converged, few_points, before_middle, at_bound, not_monotone, no_rise, not_identified, wide_interval,
    early_stop, at_edge_of_grid.
    """

    code: str
    text: str
    undetermined: tuple[str, ...] = ()


def reaches(level: float, bound: float) -> bool:
    """Whether a level sits on its upper bound."""
    return bound - level <= EDGE


def flags_of(data: Data, params: dict[str, float], residuals: np.ndarray, converged: bool) -> list[Flag]:
    """The doubts that parameters, points and residuals [N] (in the law's link) raise."""
    found = []
    everything = tuple(name for name, held in zip(data.names, data.fixed, strict=True) if not held)
    if not converged:
        found.append(Flag("not_converged", "the fit did not converge", everything))
    comfortable = COMFORTABLE_POINTS if data.law.levels is not None else len(everything) + 3
    if len(data) < comfortable:
        found.append(
            Flag(
                "few_points",
                f"only {len(data)} points for {len(everything)} parameters; {comfortable} are wanted",
            )
        )
    if data.law.levels is not None:
        found.extend(_curve_flags(data, params, residuals))
    else:
        found.extend(
            Flag("at_bound", f"{name} is at its bound {params[name]:.3g}: the data does not tell it", (name,))
            for name, low, high in zip(data.names, data.low, data.high, strict=True)
            if low < high and _on_edge(data, name, params[name], low, high)
        )
    return found


def _on_edge(data: Data, name: str, value: float, low: float, high: float) -> bool:
    logs = {parameter.name: parameter.log for parameter in data.law.parameters}
    if logs[name.partition("[")[0]]:
        return value <= low * 1.001 or value >= high * 0.999
    margin = EDGE * (high - low)
    return value <= low + margin or value >= high - margin


def _curve_flags(data: Data, params: dict[str, float], residuals: np.ndarray) -> list[Flag]:
    found = []
    compute, reward = data.columns[0], data.response
    bounds = dict(zip(data.names, zip(data.low, data.high, strict=True), strict=True))
    free = {name for name in data.names if bounds[name][0] < bounds[name][1]}
    A, last = params["A"], compute.max()
    C_mid = params.get("C_mid")
    if C_mid is not None and C_mid > last and "C_mid" in free:
        text = f"the curve is not past its middle (C_mid {C_mid:.3g} > last compute {last:.3g}): A is a guess"
        found.append(Flag("before_middle", text, tuple(sorted(free & {"A", "C_mid"}))))
    if "A" in free and reaches(A, bounds["A"][1]):
        text = f"A is at its bound {bounds['A'][1]:g}: the data does not tell the asymptote"
        found.append(Flag("at_bound", text, tuple(sorted(free - {"R0"}))))
    if "B" in free and _on_edge(data, "B", params["B"], *bounds["B"]):
        text = f"B is at its bound {params['B']:.3g}: the points do not resolve the rise"
        found.append(Flag("at_bound", text, ("B",)))
    if C_mid is not None and "C_mid" in free and _on_edge(data, "C_mid", C_mid, *bounds["C_mid"]):
        text = f"C_mid is at its bound {C_mid:.3g}: the rise lies outside the points"
        found.append(Flag("at_bound", text, tuple(sorted(free & {"A", "C_mid"}))))
    found.extend(monotone_flags(data))
    spread = reward - np.average(reward, weights=data.weights)
    if np.sum(data.weights * residuals**2) > 0.5 * float(np.sum(data.weights * spread**2)):
        text = f"the {data.law.name} explains less than half of the reward's variance: no clear rise in these points"
        found.append(Flag("no_rise", text, tuple(sorted(free))))
    return found


def monotone_flags(data: Data) -> list[Flag]:
    """A doubt for every run of the data whose reward falls by over a fifth of its range."""
    found = []
    for index in range(max(len(data.labels), 1)):
        rows = data.groups == index if data.labels else np.ones(len(data), bool)
        compute, reward = data.columns[0, rows], data.response[rows]
        if not len(reward):
            continue
        drop = np.maximum.accumulate(reward) - reward
        worst = int(np.argmax(drop))
        if drop[worst] > 0.2 * np.ptp(reward):
            whose = f" of {data.labels[index]}" if data.labels else ""
            text = (
                f"the reward{whose} is not monotone: at compute {compute[worst]:.3g} it is {drop[worst]:.3g} below an "
                f"earlier point, which a {data.law.name} cannot follow"
            )
            found.append(Flag("not_monotone", text, ("A",)))
    return found
