"""Kaplan et al.: test loss (nats per token) of a language model in its parameters N, tokens D or compute C.

Compute here is in FLOPs; the paper's PF-days are 8.64e19 FLOPs, and C = 6 N D.
"""

from typing import Any

import numpy as np

from jaxrl_llm.scaling.laws import namespace

PF_DAY = 8.64e19  # FLOPs
N_C, ALPHA_N = 8.8e13, 0.076
D_C, ALPHA_D = 5.4e13, 0.095
C_C_PF_DAYS, ALPHA_C = 3.1e8, 0.050
# L(N, D) has constants of its own: N_c, alpha_N, D_c, alpha_D.
BOTH = (6.4e13, 0.076, 1.8e13, 0.103)
N_OPT_EXPONENT = 0.73


def log_power(X: Any, X_c: Any, alpha: Any) -> Any:
    """ln L of L = (X_c / X)^alpha."""
    xp = namespace(X, X_c, alpha)
    return alpha * (xp.log(X_c) - xp.log(X))


def power(X: Any, X_c: Any, alpha: Any) -> Any:
    """L = (X_c / X)^alpha: L(N), L(D) and L(C_min) alike."""
    return namespace(X, X_c, alpha).exp(log_power(X, X_c, alpha))


def power_inverse(L: Any, X_c: Any, alpha: Any) -> Any:
    """The X at which the loss is L: X_c L^(-1/alpha)."""
    xp = namespace(L, X_c, alpha)
    return xp.exp(xp.log(X_c) - xp.log(L) / alpha)


def log_loss(N: Any, D: Any, N_c: Any, alpha_N: Any, D_c: Any, alpha_D: Any) -> Any:
    """ln L of L(N, D) = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D."""
    xp = namespace(N, D, N_c, alpha_N, D_c, alpha_D)
    model = alpha_N / alpha_D * (xp.log(N_c) - xp.log(N))
    return alpha_D * xp.logaddexp(model, xp.log(D_c) - xp.log(D))


def loss(N: Any, D: Any, N_c: Any, alpha_N: Any, D_c: Any, alpha_D: Any) -> Any:
    """L(N, D) = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D."""
    return namespace(N, D, N_c, alpha_N, D_c, alpha_D).exp(log_loss(N, D, N_c, alpha_N, D_c, alpha_D))


def power_starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The straight line through ln L over ln X."""
    x = np.log(columns[0])
    alpha = max(-np.polyfit(x - x.mean(), y, 1)[0], 1e-3)
    return np.array([[np.exp(min(y.mean() / a + x.mean(), 600.0)), a] for a in (alpha, 2 * alpha)])


def starts(columns: tuple[np.ndarray, ...], y: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Exponents over a grid, constants so that each of the two terms alone would give a middling loss."""
    N, D = (np.exp(np.log(column).mean()) for column in columns)
    level = y.mean()
    found = []
    for alpha_N in (0.04, 0.08, 0.16):
        for alpha_D in (0.05, 0.1, 0.2):
            for share in (0.2, 0.5, 0.8):
                total = level / alpha_D  # ln of the bracket
                N_c = np.exp(np.log(N) + (total + np.log(share)) * alpha_D / alpha_N)
                D_c = np.exp(np.log(D) + total + np.log(1 - share))
                found.append([N_c, alpha_N, D_c, alpha_D])
    return np.array(found)
