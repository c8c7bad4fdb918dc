"""What is reported beside a loss, as sums and weights, so that microbatches, devices and hosts add up exactly.

A metric is a `WeightedSum` (a mean kept open) or a `Maximum`; both add with `+`, and `add` adds two dicts of them.
Ratios are measured before any truncation: a capped ratio would report the cap.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxrl_llm.losses import kl
from jaxrl_llm.losses.advantages import zero_variance
from jaxrl_llm.losses.objectives import log_ratio
from jaxrl_llm.types import WeightedSum


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Maximum:
    """The largest value seen; `+` keeps the larger."""

    value: Array  # float32 []

    def __add__(self, other: "Maximum") -> "Maximum":
        return Maximum(jnp.maximum(self.value, other.value))


Metric = Any
"""A WeightedSum or a Maximum. (`+` between the two has no meaning, and a union of them would promise it.)"""


def add(left: Mapping[str, Metric], right: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics of two parts of a batch together. Raises ValueError if they do not have the same names."""
    if left.keys() != right.keys():
        raise ValueError(f"metrics differ between parts of a batch: {sorted(left.keys() ^ right.keys())}")
    return {name: left[name] + right[name] for name in left}


def summarise(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Host numbers; a mean over nothing is NaN. `NAME` and `NAME_squared` become `NAME_mean` and `NAME_ess`.

    The effective sample size is mean^2 / mean of squares: 1 if all ratios are equal, 1/n if one carries everything.
    """
    numbers = {}
    for name, metric in metrics.items():
        if isinstance(metric, Maximum):
            numbers[name] = float(metric.value)
        else:
            weight = float(metric.weight)
            numbers[name] = float(metric.total) / weight if weight else float("nan")
    for name in [n for n in numbers if f"{n}_squared" in numbers]:
        mean, squares = numbers.pop(name), numbers.pop(f"{name}_squared")
        numbers[f"{name}_mean"] = mean
        numbers[f"{name}_ess"] = mean * mean / squares if squares else float("nan")
    return numbers


def masked_mean(x: Float[Array, "*s"] | Bool[Array, "*s"], mask: Bool[Array, "*s"]) -> WeightedSum:
    """Sum of `x` over trainable tokens with their number as weight, in float32; no gradient."""
    x = jnp.where(mask, lax.stop_gradient(x).astype(jnp.float32), 0.0)
    return WeightedSum(x.sum(), mask.sum(dtype=jnp.float32))


def ratio_metrics(
    logprobs: Float[Array, "*s"], anchor: Float[Array, "*s"], mask: Bool[Array, "*s"], name: str = "ratio"
) -> dict[str, Metric]:
    """Untruncated exp(logprobs - anchor): mean, second moment (for the effective sample size) and maximum.

    The maximum over no token is 0.
    """
    ratio = jnp.exp(lax.stop_gradient(log_ratio(logprobs, anchor, mask)))
    return {
        name: masked_mean(ratio, mask),
        f"{name}_squared": masked_mean(jnp.square(ratio), mask),
        f"{name}_max": Maximum(jnp.max(jnp.where(mask, ratio, 0.0), initial=0.0).astype(jnp.float32)),
    }


def clip_metrics(
    log_rho: Float[Array, "*s"],
    advantages: Float[Array, "*s"],
    mask: Bool[Array, "*s"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> dict[str, Metric]:
    """Fractions of tokens whose gradient the clipped surrogate stops: from below (A < 0), above (A > 0), dual (A < 0).

    `log_rho` is the log-ratio that is clipped: the sequence's for GSPO.
    """
    ratio = jnp.exp(log_rho)
    dual = jnp.zeros_like(mask) if dual_clip is None else (advantages < 0) & (ratio > dual_clip)
    return {
        "clip_low": masked_mean((advantages < 0) & (ratio < 1.0 - clip_low), mask),
        "clip_high": masked_mean((advantages > 0) & (ratio > 1.0 + clip_high), mask),
        "clip_dual": masked_mean(dual, mask),
    }


def cap_metrics(
    log_rho: Float[Array, "*s"], mask: Bool[Array, "*s"], *, ratio_cap: float, ratio_floor: float = 0.0
) -> dict[str, Metric]:
    """Fractions of tokens whose CISPO weight is the floor or the cap. Their gradients are bounded, not stopped."""
    ratio = jnp.exp(log_rho)
    return {
        "clip_low": masked_mean(ratio < ratio_floor, mask),
        "clip_high": masked_mean(ratio > ratio_cap, mask),
        "clip_dual": masked_mean(jnp.zeros_like(mask), mask),
    }


def kl_metrics(
    logprobs: Float[Array, "*s"], reference: Float[Array, "*s"], mask: Bool[Array, "*s"], name: str
) -> dict[str, Metric]:
    """Mean k1 and k3 of the policy to `reference`: `NAME_k1`, `NAME_k3` (NAME such as kl_sampler, kl_reference).

    The tokens come from the sampler, so towards the sampler these say how far the two are, not which way.
    """
    return {
        f"{name}_k1": masked_mean(kl.k1(logprobs, reference, mask), mask),
        f"{name}_k3": masked_mean(kl.k3(logprobs, reference, mask), mask),
    }


def _host_sum(total: Any, weight: Any) -> WeightedSum:
    host: Any = np.float32  # numpy scalars: nothing here is worth a transfer to a device
    return WeightedSum(host(total), host(weight))


def group_metrics(
    rewards_PG: np.ndarray, truncated_PG: np.ndarray, lengths_PG: np.ndarray, keep_PG: np.ndarray | None = None
) -> dict[str, Metric]:
    """Host metrics of one batch: reward, fraction of zero-variance groups, truncation rate, length, token count.

    `lengths_PG` counts trainable tokens; `keep_PG` marks the completions that exist (before any filter). `tokens` has
    weight 1 and adds up to a count of batches' tokens per batch. A group without completions is no group.
    """
    keep_PG = np.ones(rewards_PG.shape, bool) if keep_PG is None else np.asarray(keep_PG, bool)
    exists_P = keep_PG.any(axis=1)

    def mean(x: Any, where: Any) -> WeightedSum:
        return _host_sum(np.where(where, x, 0).sum(), where.sum())

    return {
        "reward": mean(rewards_PG, keep_PG),
        "zero_variance": mean(zero_variance(rewards_PG, keep_PG), exists_P),
        "truncation_rate": mean(truncated_PG, keep_PG),
        "length": mean(lengths_PG, keep_PG),
        "tokens": _host_sum(np.where(keep_PG, lengths_PG, 0).sum(), 1),
    }
