"""Scaling laws as plain functions of compute.

Each accepts numpy arrays or floats (computed in float64 on the host) as well as JAX arrays (traceable, in their own
dtype), so that one definition serves the fitter, the plots and the tests.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special


def namespace(*values: Any) -> ModuleType:
    """jax.numpy where any of the values is a JAX array, else numpy."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def _log(value: Any, xp: ModuleType) -> Any:
    # log(0) = -inf is meant: zero compute is the start of every curve.
    with np.errstate(divide="ignore"):
        return xp.log(value)


def _expit(value: Any, xp: ModuleType) -> Any:
    return jax.nn.sigmoid(value) if xp is jnp else scipy.special.expit(value)


def sigmoid(C: Any, A: Any, B: Any, C_mid: Any, R0: Any) -> Any:
    """Reward after compute C: R0 + (A - R0) / (1 + (C_mid / C)^B) (ScaleRL).

    A is the asymptote, B > 0 the efficiency, C_mid > 0 the compute at which half of the gain A - R0 is made (in the
    unit of C), R0 the reward at C = 0. At C_mid the value is (A + R0)/2 and the slope dR/dlnC is (A - R0) B/4.
    """
    xp = namespace(C, A, B, C_mid, R0)
    return R0 + (A - R0) * _expit(B * (_log(C, xp) - _log(C_mid, xp)), xp)


def power_law(C: Any, A: Any, B: Any, D: Any) -> Any:
    """Reward after compute C > 0: A - D C^-B, the power law with an asymptote that ScaleRL contrasts its sigmoid with.

    The sigmoid tends to it for C >> C_mid, with D = (A - R0) C_mid^B.
    """
    xp = namespace(C, A, B, D)
    return A - D * xp.exp(-B * xp.log(C))


def sigmoid_inverse(R: Any, A: Any, B: Any, C_mid: Any, R0: Any) -> Any:
    """The compute at which the sigmoid is R; nan where R lies outside (R0, A)."""
    xp = namespace(R, A, B, C_mid, R0)
    return xp.exp(xp.log(C_mid) + log_odds(R, A, R0) / B)


def power_law_inverse(R: Any, A: Any, B: Any, D: Any) -> Any:
    """The compute at which the power law is R; nan for R >= A."""
    xp = namespace(R, A, B, D)
    below = R < A
    gap = xp.where(below, A - R, 1.0)
    return xp.where(below, xp.exp((xp.log(D) - xp.log(gap)) / B), xp.nan)


def log_odds(R: Any, A: Any, R0: Any) -> Any:
    """ln((R - R0)/(A - R)): on the sigmoid it is B (ln C - ln C_mid), a straight line in ln C.

    nan where R lies outside (R0, A), for there the line does not exist.
    """
    xp = namespace(R, A, R0)
    inside = (R > R0) & (R < A)
    middle = (A + R0) / 2
    R = xp.where(inside, R, middle)
    return xp.where(inside, xp.log(R - R0) - xp.log(A - R), xp.nan)


def straighten(R: Any, A: Any, B: Any, C_mid: Any, R0: Any) -> Any:
    """F(R) = C_mid^B / ((A - R0)/(R - R0) - 1), which equals C^B on the sigmoid (ScaleRL's straight-line transform).

    nan where R lies outside (R0, A). For large B ln C_mid use `log_odds`, which does not overflow.
    """
    xp = namespace(R, A, B, C_mid, R0)
    return xp.exp(B * xp.log(C_mid) + log_odds(R, A, R0))
