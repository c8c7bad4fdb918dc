"""The table of laws, by name: everything that `fit` can fit."""

import numpy as np

from jaxrl_llm.scaling import chinchilla, isocompute, kaplan, laws, tan
from jaxrl_llm.scaling.law import Column, Law, Parameter
from jaxrl_llm.types import UserError

B_RANGE = (0.05, 50.0)
# C_mid may lie this far outside the points, as a factor of the least and of the greatest positive compute.
C_MID_REACH = (1e-2, 1e3)

_START_B = (0.3, 0.8, 1.6, 3.5, 8.0)
_START_PLACES = (-0.25, 0.05, 0.25, 0.45, 0.65, 0.85, 1.05, 1.5)  # of C_mid, in spans of ln C


def _rise(columns: tuple[np.ndarray, ...], y: np.ndarray) -> tuple[float, float, float, float]:
    C = columns[0][columns[0] > 0]
    return float(np.log(C.min())), float(np.ptp(np.log(C))), float(y.min()), float(y.max())


def _sigmoid_starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    least, span, low, high = _rise(columns, y)
    return np.array([[high, B, np.exp(least + place * span), low] for B in _START_B for place in _START_PLACES])


def _sigmoid_limits(columns: tuple[np.ndarray, ...], y: np.ndarray) -> dict[str, tuple[float, float]]:
    C = columns[0][columns[0] > 0]
    return {"C_mid": (C.min() * C_MID_REACH[0], C.max() * C_MID_REACH[1])}


def _power_starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    least, _, low, high = _rise(columns, y)
    return np.array([[high, B, max(high - low, 1e-6) * np.exp(B * least)] for B in _START_B])


_COMPUTE = Column("compute", "any unit; C_mid is in the same", zero=True)
_REWARD = Column("reward", "the reward's own", positive=False)
_LOSS = Column("loss", "nats per token")
_TAN_LOSS = Column("loss", "1 - R / R_max")
_N = Column("N", "parameters (any unit; N_0 or N_c is in the same)")
_D = Column("D", "tokens")
_FLOPS = Column("C", "FLOPs")
_TINY, _HUGE = 1e-300, 1e300


def _intercept(name: str) -> Parameter:
    return Parameter(name, "intercept of ln L, one for each model", -1e3, 1e3, log=False, per_group=True)


def _kaplan(name: str, column: Column) -> Law:
    return Law(
        name=name,
        source="Kaplan et al.: L = (X_c / X)^alpha",
        columns=(column,),
        response=_LOSS,
        parameters=(
            Parameter("X_c", "scale, in the column's unit", _TINY, _HUGE),
            Parameter("alpha", "exponent", 1e-4, 10.0),
        ),
        function=kaplan.power,
        log_function=kaplan.log_power,
        starts=kaplan.power_starts,
        inverse=kaplan.power_inverse,
    )


_ALL = (
    Law(
        name="sigmoid",
        source="ScaleRL: R = R0 + (A - R0) / (1 + (C_mid / C)^B)",
        columns=(_COMPUTE,),
        response=_REWARD,
        parameters=(
            Parameter("A", "asymptote", 0.0, 1.0, log=False),
            Parameter("B", "efficiency", *B_RANGE),
            Parameter("C_mid", "compute at half of the gain", _TINY, _HUGE),
            Parameter("R0", "reward at zero compute", 0.0, 1.0, log=False),
        ),
        function=laws.sigmoid,
        starts=_sigmoid_starts,
        limits=_sigmoid_limits,
        inverse=laws.sigmoid_inverse,
        levels="sigmoid",
    ),
    Law(
        name="power_law",
        source="power law with an asymptote, for contrast: R = A - D C^-B",
        columns=(Column("compute", "any unit"),),
        response=_REWARD,
        parameters=(
            Parameter("A", "asymptote", 0.0, 1.0, log=False),
            Parameter("B", "exponent", *B_RANGE),
            Parameter("D", "A minus the reward at unit compute", _TINY, _HUGE),
        ),
        function=laws.power_law,
        starts=_power_starts,
        inverse=laws.power_law_inverse,
        levels="power",
    ),
    Law(
        name="tan",
        source="Tan et al.: ln L = -K_max / (1 + N_0 / N) ln X + E(N); X is C in FLOPs or D in samples",
        columns=(_N, Column("X", "FLOPs or samples")),
        response=_TAN_LOSS,
        parameters=(
            Parameter("K_max", "slope of an infinitely large model", 1e-6, 1e3),
            Parameter("N_0", "N at which the slope is half of K_max", 1e-9, 1e15),
            _intercept("E"),
        ),
        function=tan.loss,
        log_function=tan.log_loss,
        starts=tan.starts,
    ),
    Law(
        name="tan_both",
        source="Tan et al. with k_C = k_D: C and D fitted together (columns and weights from `tan.both_axes`)",
        columns=(_N, Column("X", "FLOPs or samples"), Column("compute_axis", "1 where X is C, else 0", positive=False)),
        response=_TAN_LOSS,
        parameters=(
            Parameter("K_max", "slope of an infinitely large model", 1e-6, 1e3),
            Parameter("N_0", "N at which the slope is half of K_max", 1e-9, 1e15),
            Parameter("phi", "C / (N D)", 1e-30, 1e30),
            _intercept("E"),
        ),
        function=tan.both_axes_loss,
        log_function=tan.both_axes_log_loss,
        starts=tan.both_axes_starts,
    ),
    Law(
        name="tan_line",
        source="Tan et al., one model: ln L = -k ln X + E",
        columns=(Column("X", "FLOPs or samples"),),
        response=_TAN_LOSS,
        parameters=(
            Parameter("k", "slope", 1e-6, 1e3),
            Parameter("E", "intercept of ln L", -1e3, 1e3, log=False),
        ),
        function=tan.line_loss,
        log_function=tan.line_log_loss,
        starts=tan.line_starts,
        inverse=tan.line_inverse,
    ),
    Law(
        name="isocompute",
        source="IsoCompute: log2 n* = L / (1 + exp(-k (log10 C - c0))) + b",
        columns=(Column("C", "rollouts or tokens"),),
        response=Column("log2_n", "log2 of rollouts per prompt", positive=False),
        parameters=(
            Parameter("L", "rise of log2 n*", 1e-3, 100.0),
            Parameter("k", "steepness per decade of C", 1e-2, 1e3),
            Parameter("c0", "log10 C at half of the rise", -100.0, 100.0, log=False),
            Parameter("b", "log2 n* of small budgets", -100.0, 100.0, log=False),
        ),
        function=isocompute.log2_rollouts,
        starts=isocompute.starts,
        limits=isocompute.limits,
        inverse=isocompute.budget_of_rollouts,
    ),
    _kaplan("kaplan_N", _N),
    _kaplan("kaplan_D", _D),
    _kaplan("kaplan_C", _FLOPS),
    Law(
        name="kaplan_ND",
        source="Kaplan et al.: L = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D",
        columns=(_N, _D),
        response=_LOSS,
        parameters=(
            Parameter("N_c", "scale of N", _TINY, _HUGE),
            Parameter("alpha_N", "exponent of N", 1e-4, 10.0),
            Parameter("D_c", "scale of D", _TINY, _HUGE),
            Parameter("alpha_D", "exponent of D", 1e-4, 10.0),
        ),
        function=kaplan.loss,
        log_function=kaplan.log_loss,
        starts=kaplan.starts,
    ),
    Law(
        name="chinchilla",
        source="Chinchilla, approach 3: L = E + A / N^alpha + B / D^beta; summed Huber loss on ln L",
        columns=(Column("N", "parameters"), _D),
        response=_LOSS,
        parameters=(
            Parameter("E", "loss of unlimited N and D", 1e-6, 1e3),
            Parameter("A", "scale of the term in N", 1e-6, 1e15),
            Parameter("B", "scale of the term in D", 1e-6, 1e15),
            Parameter("alpha", "exponent of N", 1e-3, 5.0),
            Parameter("beta", "exponent of D", 1e-3, 5.0),
        ),
        function=chinchilla.loss,
        log_function=chinchilla.log_loss,
        starts=chinchilla.starts,
        huber=chinchilla.HUBER_DELTA,
    ),
    Law(
        name="allocation",
        source="Chinchilla, approaches 1 and 2: the optimal N (or D) of a budget, G C^a",
        columns=(_FLOPS,),
        response=Column("amount", "parameters or tokens"),
        parameters=(
            Parameter("G", "amount at C = 1", _TINY, _HUGE),
            Parameter("a", "exponent", 1e-4, 10.0),
        ),
        function=chinchilla.allocation,
        log_function=chinchilla.log_allocation,
        starts=chinchilla.allocation_starts,
        inverse=chinchilla.allocation_inverse,
    ),
)

LAWS: dict[str, Law] = {law.name: law for law in _ALL}


def law_named(name: str) -> Law:
    """The law of that name; UserError listing the names otherwise."""
    if name not in LAWS:
        raise UserError(f"unknown law {name!r}; choose one of {', '.join(LAWS)}")
    return LAWS[name]
