"""Planted problems, one or more for every law: columns, parameters and the noise that a measurement would have."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.scaling import chinchilla, isocompute, kaplan, tan
from jaxrl_llm.scaling.data import Data, prepare
from jaxrl_llm.scaling.table import LAWS


@dataclass(frozen=True)
class Planted:
    law: str
    columns: dict[str, np.ndarray]
    params: dict[str, float]  # per-group ones as NAME[label]
    noise: float  # of a measurement, in the law's link
    groups: list[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    pairs: bool = False  # every measurement appears twice, at C and at D, and C is not quite N D phi

    def values(self) -> np.ndarray:
        """The noiseless response in the law's link."""
        law = LAWS[self.law]
        arguments = []
        for parameter in law.parameters:
            if parameter.per_group:
                arguments.append(np.array([self.params[f"{parameter.name}[{label}]"] for label in self.groups]))
            else:
                arguments.append(self.params[parameter.name])
        return law.link(*self.columns.values(), *arguments)

    def data(self, noise: np.ndarray | None = None) -> Data:
        """The checked data set, with noise [N] (standard normal) scaled to the case's."""
        law = LAWS[self.law]
        y = self.values() + (0.0 if noise is None else self.noise * noise)
        response = y if law.log_function is None else np.exp(y)
        columns = dict(self.columns)
        if self.pairs and noise is not None:
            # An independent draw, though not a fresh one: lengths wander by a tenth.
            columns["X"] = columns["X"] * np.exp(0.1 * np.roll(noise, 7) * columns["compute_axis"])
        return prepare(law, {**columns, law.response.name: response}, groups=self.groups, **self.options)

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        count = len(next(iter(self.columns.values())))
        return np.tile(generator.normal(size=count // 2), 2) if self.pairs else generator.normal(size=count)


SCALERL = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.35}
COMPUTE = np.geomspace(300.0, 20000.0, 30)
WITH_ZERO = np.r_[0.0, COMPUTE]

MODELS = {"0.5B": 0.5, "1.5B": 1.5, "3B": 3.0, "7B": 7.0, "14B": 14.0, "32B": 32.0}
_LABELS = [label for label in MODELS for _ in range(16)]
_SIZES = np.array([MODELS[label] for label in _LABELS])
_SAMPLES = np.tile(np.geomspace(2e3, 5e4, 16), 6)
PHI = 2.4e13  # FLOPs for each billion of parameters and sample
_FLOPS = _SIZES * _SAMPLES * PHI
_INTERCEPTS = dict(zip(MODELS, (0.2, 0.9, 1.2, 1.8, 2.2, 2.6), strict=True))
_E_D = {f"E[{label}]": value / 4 for label, value in _INTERCEPTS.items()}

_BUDGETS = np.repeat([6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21], 12)
_SPLIT = chinchilla.optimal_split(_BUDGETS, *chinchilla.REPLICATION).N * np.tile(np.geomspace(0.15, 6.0, 12), 9)
_GRID_N, _GRID_D = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e6, 1e9, 7), np.geomspace(2e7, 2e10, 7)))


CASES: dict[str, Planted] = {
    "sigmoid, R0 free": Planted("sigmoid", {"compute": COMPUTE}, SCALERL, 0.01),
    "sigmoid, R0 measured": Planted("sigmoid", {"compute": WITH_ZERO}, SCALERL, 0.01),
    "sigmoid, R0 fixed": Planted("sigmoid", {"compute": COMPUTE}, SCALERL, 0.01, options={"fixed": {"R0": 0.35}}),
    "sigmoid, A fixed": Planted("sigmoid", {"compute": COMPUTE}, SCALERL, 0.01, options={"fixed": {"A": 0.61}}),
    "sigmoid, A and R0 fixed": Planted(
        "sigmoid", {"compute": COMPUTE}, SCALERL, 0.01, options={"fixed": {"A": 0.61, "R0": 0.35}}
    ),
    "power_law": Planted("power_law", {"compute": np.geomspace(100.0, 1e5, 30)}, {"A": 0.8, "B": 0.4, "D": 3.0}, 0.005),
    "tan, C": Planted(
        "tan",
        {"N": _SIZES, "X": _FLOPS},
        {
            **tan.PUBLISHED["base", "C", "inter"]._asdict(),
            **{f"E[{label}]": value for label, value in _INTERCEPTS.items()},
        },
        0.01,
        groups=_LABELS,
    ),
    "tan, D": Planted(
        "tan",
        {"N": _SIZES, "X": _SAMPLES},
        {**tan.PUBLISHED["base", "D", "inter"]._asdict(), **_E_D},
        0.01,
        groups=_LABELS,
    ),
    "tan_both": Planted(
        "tan_both",
        {
            name: column
            for name, column in tan.both_axes(_SIZES, _FLOPS, _SAMPLES, np.ones(len(_SIZES)))[0].items()
            if name != "loss"
        },
        {**tan.PUBLISHED["base", "D", "inter"]._asdict(), "phi": PHI, **_E_D},
        0.01,
        groups=_LABELS * 2,
        options=tan.both_axes(_SIZES, _FLOPS, _SAMPLES, np.ones(len(_SIZES)))[1],
        pairs=True,
    ),
    "tan_line": Planted("tan_line", {"X": np.geomspace(1e18, 1e21, 20)}, {"k": 0.05, "E": 1.9}, 0.01),
    "isocompute": Planted(
        "isocompute",
        {"C": np.geomspace(10**4.5, 10**7, 26)},
        isocompute.PUBLISHED["rollouts"]._asdict(),
        0.15,
    ),
    "kaplan_N": Planted(
        "kaplan_N", {"N": np.geomspace(1e6, 1e10, 20)}, {"X_c": kaplan.N_C, "alpha": kaplan.ALPHA_N}, 0.01
    ),
    "kaplan_D": Planted(
        "kaplan_D", {"D": np.geomspace(1e7, 1e10, 20)}, {"X_c": kaplan.D_C, "alpha": kaplan.ALPHA_D}, 0.01
    ),
    "kaplan_C": Planted(
        "kaplan_C",
        {"C": np.geomspace(1e16, 1e21, 20)},
        {"X_c": kaplan.C_C_PF_DAYS * kaplan.PF_DAY, "alpha": kaplan.ALPHA_C},
        0.01,
    ),
    "kaplan_ND": Planted(
        "kaplan_ND",
        {"N": _GRID_N, "D": _GRID_D},
        dict(zip(("N_c", "alpha_N", "D_c", "alpha_D"), kaplan.BOTH, strict=True)),
        0.01,
    ),
    "chinchilla": Planted(
        "chinchilla", {"N": _SPLIT, "D": _BUDGETS / (6 * _SPLIT)}, chinchilla.REPLICATION._asdict(), 0.005
    ),
    "allocation": Planted("allocation", {"C": np.geomspace(6e18, 3e21, 9)}, {"G": 0.1, "a": 0.5}, 0.05),
}
