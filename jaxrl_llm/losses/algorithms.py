"""The one table from names to functions, and the combinations that mean nothing.

An algorithm = baseline + normalisation + token objective + importance corrections + aggregation (+ KL, + entropy).
`bind` picks functions by name once; a training step calls what it got and never asks for a name:

    objective = bind("ppo", clip_high=0.28)
    weight = bind_importance("tis", cap=2.0)
    arrays = (logprobs, behavior_logprobs, old_logprobs, advantages, mask, segment_ids, num_segments)
    loss = -sum(token_weights * (objective(*arrays) * weight(*arrays) - beta * kl + alpha * entropy))
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses import advantages, importance, kl, metrics, objectives
from jaxrl_llm.losses.aggregate import Aggregation
from jaxrl_llm.losses.sequence import sequence_mean
from jaxrl_llm.types import UserError

Anchor = Literal["sampler", "old"]
"""What a ratio is taken against: the sampler's log-probabilities, or the trainer's at the start of the step."""

BoundObjective = Callable[..., Float[Array, "*b T"]]
"""(logprobs, behavior_logprobs, old_logprobs | None, advantages, mask, segment_ids | None, num_segments | None)."""


@dataclass(frozen=True)
class TokenObjective:
    function: Callable[..., Array]
    anchor: Anchor
    ratio: Literal["none", "token", "sequence"]
    clips: Callable[..., Mapping[str, Any]] | None  # its clip fractions, from (log_rho, advantages, mask)


@dataclass(frozen=True)
class Correction:
    function: Callable[..., Array]
    level: Literal["token", "sequence"]
    rejects_only: bool = False  # weights are 0 or 1: it drops tokens and corrects nothing
    reads_policy: bool = False  # compares the current policy with an anchor, instead of trainer with sampler


def _cap_metrics(log_rho, advantages, mask, **constants):
    return metrics.cap_metrics(log_rho, mask, **constants)


OBJECTIVES: Mapping[str, TokenObjective] = {
    "reinforce": TokenObjective(objectives.reinforce, "sampler", "none", None),
    "ppo": TokenObjective(objectives.ppo, "old", "token", metrics.clip_metrics),
    "gspo": TokenObjective(objectives.gspo, "old", "sequence", metrics.clip_metrics),
    "gspo_token": TokenObjective(objectives.gspo_token, "old", "sequence", metrics.clip_metrics),
    "cispo": TokenObjective(objectives.cispo, "sampler", "token", _cap_metrics),
}

CORRECTIONS: Mapping[str, Correction] = {
    "tis": Correction(importance.tis, "token"),
    "tis_sequence": Correction(importance.tis_sequence, "sequence"),
    "mis": Correction(importance.mis, "token"),
    "seq_mis": Correction(importance.seq_mis, "sequence"),
    "icepop": Correction(importance.icepop, "token"),
    "geometric": Correction(importance.geometric_rejection, "sequence", rejects_only=True),
    "off_policy_mask": Correction(
        importance.off_policy_sequence_mask, "sequence", rejects_only=True, reads_policy=True
    ),
}

KL_ESTIMATORS: Mapping[str, Callable[..., Array]] = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}

BASELINES: Mapping[str, Callable[..., Any]] = {
    "none": advantages.uncentred,
    "group_mean": advantages.centre,
    "leave_one_out": advantages.leave_one_out,
}

NORMALISATIONS: tuple[str, ...] = get_args(advantages.Normalisation)
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

_STRUCTURE = ("segment_ids", "num_segments")


def _look_up(table: Mapping[str, Any], what: str, name: str) -> Any:
    if name not in table:
        raise UserError(f"{what} {name!r} is unknown; choose one of {', '.join(table)}")
    return table[name]


def _check_constants(what: str, name: str, function: Callable, constants: Mapping[str, Any]) -> None:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    known = {p.name for p in parameters if p.name not in _STRUCTURE}
    if unknown := sorted(constants.keys() - known):
        raise UserError(f"{what} {name} has no constant {unknown[0]!r}; it has {', '.join(sorted(known)) or 'none'}")
    required = {p.name for p in parameters if p.default is p.empty}
    if missing := sorted(required - constants.keys()):
        raise UserError(f"{what} {name} needs the constant {missing[0]!r}; the field has no agreed default")
    # MiniMax-M1 writes its cap as 1 + eps; an eps given as the cap would shrink every gradient, on policy too.
    if constants.get("ratio_cap", 1.0) < 1.0:
        raise UserError(
            f"ratio_cap {constants['ratio_cap']} of {name} is below 1; it bounds the ratio itself, so write "
            f"{1 + constants['ratio_cap']:g} if 1 + eps was meant"
        )
    if not 0.0 <= constants.get("clip_low", 0.0) <= 1.0 or constants.get("clip_high", 0.0) < 0.0:
        raise UserError(
            f"{name} clips the ratio to [1 - clip_low, 1 + clip_high]; with clip_low {constants.get('clip_low')} and "
            f"clip_high {constants.get('clip_high')} that is no interval around 1"
        )
    dual_clip = constants.get("dual_clip")
    if dual_clip is not None and dual_clip <= 1.0 + constants.get("clip_high", 0.2):
        raise UserError(f"dual_clip {dual_clip} of {name} must exceed 1 + clip_high; 3 is usual")


def _anchor_logprobs(anchor: Anchor, logprobs: Array, behavior_logprobs: Array, old_logprobs: Array | None) -> Array:
    if anchor == "sampler":
        return behavior_logprobs
    # One update per batch: the weights at the start of the step are the present ones.
    return lax.stop_gradient(logprobs) if old_logprobs is None else old_logprobs


def _structured(function: Callable, constants: Mapping[str, Any]) -> Callable:
    """The function with its constants, taking segment_ids and num_segments whether it reads them or not."""
    reads = "segment_ids" in inspect.signature(function).parameters

    def call(*arrays, segment_ids, num_segments):
        structure = {"segment_ids": segment_ids, "num_segments": num_segments} if reads else {}
        return function(*arrays, **structure, **constants)

    return call


def _entry(name: str, anchor: Anchor | None, constants: Mapping[str, Any]) -> tuple[TokenObjective, Anchor]:
    """The objective and what it is anchored on, everything checked."""
    entry = _look_up(OBJECTIVES, "objective", name)
    _check_constants("objective", name, entry.function, constants)
    if anchor not in (None, *get_args(Anchor)):
        raise UserError(f"anchor {anchor!r} is unknown; choose sampler or old")
    return entry, anchor or entry.anchor


def bind(name: str, *, anchor: Anchor | None = None, **constants: float | None) -> BoundObjective:
    """The named objective with its constants and its anchor, under the one calling convention of `BoundObjective`.

    `anchor` None is the objective's own (`OBJECTIVES`). Anchored on "old", `old_logprobs` None says that each batch is
    used for one update, so that the ratio is 1 and the gradient REINFORCE's.
    Raises UserError on an unknown name or constant, a missing constant, or a constant that means nothing.
    """
    entry, anchor = _entry(name, anchor, constants)
    call = _structured(entry.function, constants)

    def objective(
        logprobs: Float[Array, "*b T"],
        behavior_logprobs: Float[Array, "*b T"],
        old_logprobs: Float[Array, "*b T"] | None,
        advantages: Float[Array, "*b T"],
        mask: Bool[Array, "*b T"],
        segment_ids: Int[Array, "*b T"] | None = None,
        num_segments: int | None = None,
    ) -> Float[Array, "*b T"]:
        against = _anchor_logprobs(anchor, logprobs, behavior_logprobs, old_logprobs)
        return call(logprobs, against, advantages, mask, segment_ids=segment_ids, num_segments=num_segments)

    return objective


def bind_metrics(name: str, *, anchor: Anchor | None = None, **constants: float | None) -> Callable[..., dict]:
    """The named objective's metrics, called like the objective: ratio mean, ESS, maximum and clip fractions."""
    entry, anchor = _entry(name, anchor, constants)
    defaults = {
        p.name: p.default
        for p in inspect.signature(entry.function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name not in _STRUCTURE and p.default is not p.empty
    }

    def objective_metrics(
        logprobs, behavior_logprobs, old_logprobs, advantages, mask, segment_ids=None, num_segments=None
    ):
        against = _anchor_logprobs(anchor, logprobs, behavior_logprobs, old_logprobs)
        found = dict(metrics.ratio_metrics(logprobs, against, mask))
        if entry.clips is not None:
            log_rho = lax.stop_gradient(objectives.log_ratio(logprobs, against, mask))
            if entry.ratio == "sequence":
                log_rho = sequence_mean(log_rho, mask, segment_ids, num_segments)
            found |= entry.clips(log_rho, advantages, mask, **{**defaults, **constants})
        return found

    return objective_metrics


def bind_importance(name: str, *, anchor: Anchor | None = None, **constants: float | None) -> BoundObjective:
    """The named correction as a weight that multiplies J, called like the objective.

    `anchor` applies to off_policy_mask only: its drift is measured from the sampler unless "old" is asked for.
    Raises UserError as `bind` does.
    """
    entry = _look_up(CORRECTIONS, "importance correction", name)
    _check_constants("importance correction", name, entry.function, constants)
    if anchor not in (None, *get_args(Anchor)) or (anchor and not entry.reads_policy):
        raise UserError(f"importance correction {name} takes no anchor {anchor!r}")
    call = _structured(entry.function, constants)

    def weight(logprobs, behavior_logprobs, old_logprobs, advantages, mask, segment_ids=None, num_segments=None):
        if entry.reads_policy:
            against = _anchor_logprobs(anchor or "sampler", logprobs, behavior_logprobs, old_logprobs)
            arrays = (logprobs, against, advantages, mask)
        else:
            arrays = (_anchor_logprobs("old", logprobs, behavior_logprobs, old_logprobs), behavior_logprobs, mask)
        return call(*arrays, segment_ids=segment_ids, num_segments=num_segments)

    return weight


def bind_corrections(corrections: Mapping[str, Mapping[str, Any]]) -> BoundObjective:
    """The product of several corrections, {name: constants}: tis with geometric, for example; of none it is 1.

    Called like the objective; 0 at masked places.
    """
    weights = [bind_importance(name, **constants) for name, constants in corrections.items()]

    def product(logprobs, behavior_logprobs, old_logprobs, advantages, mask, segment_ids=None, num_segments=None):
        arrays = (logprobs, behavior_logprobs, old_logprobs, advantages, mask, segment_ids, num_segments)
        return functools.reduce(jnp.multiply, (w(*arrays) for w in weights), mask.astype(logprobs.dtype))

    return product


def check_composition(
    *,
    objective: str,
    aggregation: str,
    baseline: str,
    normalisations: Sequence[str] = ("none",),
    importance: Sequence[str] = (),
    anchor: Anchor | None = None,
    kl_in_loss: str | None = None,
    kl_in_reward: str | None = None,
    group_size: int = 2,
    critic: bool = False,
    zero_variance_filter: bool = False,
    renormalised_logprobs: bool = False,
    max_tokens: int | None = None,
) -> None:
    """Refuse a combination of parts that means nothing. Raises UserError with the reason and the way out.

    `normalisations` lists everything advantages are scaled by, in order; `critic` says that they come from GAE, not
    from the group; `renormalised_logprobs` says that the sampler's log-probabilities are those of a top-p or top-k
    truncated distribution.
    """
    entry = _look_up(OBJECTIVES, "objective", objective)
    corrections = {name: _look_up(CORRECTIONS, "importance correction", name) for name in importance}
    _look_up(dict.fromkeys(AGGREGATIONS), "aggregation", aggregation)
    _look_up(BASELINES, "baseline", baseline)
    for estimator in (kl_in_loss, kl_in_reward):
        if estimator is not None:
            _look_up(KL_ESTIMATORS, "KL estimator", estimator)
    scales = [name for name in normalisations if name != "none"]
    for name in scales:
        _look_up(dict.fromkeys(NORMALISATIONS), "advantage normalisation", name)
    anchor = anchor or entry.anchor
    reweighting = [name for name, c in corrections.items() if not c.rejects_only]

    if len(scales) > 1:
        raise UserError(
            f"advantages are normalised by {' and then '.join(scales)}; the second undoes the first, so keep one"
        )
    if len(corrections) < len(importance) or len(reweighting) > 1:
        raise UserError(
            f"importance corrections {' and '.join(importance)} both multiply by the ratio of trainer to sampler, "
            "which squares it; keep one"
        )
    if entry.ratio == "sequence" and (token := [n for n in reweighting if corrections[n].level == "token"]):
        raise UserError(
            f"{objective} has one ratio per sequence and {token[0]} one per token, so tokens of a sequence would be "
            "weighted after all; use tis_sequence or seq_mis"
        )
    if entry.ratio != "none" and anchor == "sampler" and reweighting:
        raise UserError(
            f"{objective} anchored on the sampler's log-probabilities (old log-probabilities bypassed) already holds "
            f"the ratio of trainer to sampler; {reweighting[0]} would apply it twice. Anchor it on old, or drop "
            f"{reweighting[0]}"
        )
    reads_sampler = [objective] if entry.ratio != "none" and anchor == "sampler" else []
    reads_sampler += [n for n, c in corrections.items() if not c.reads_policy or anchor == "sampler"]
    if renormalised_logprobs and reads_sampler:
        raise UserError(
            f"{reads_sampler[0]} compares the trainer's full-vocabulary log-probabilities with ones the sampler "
            "renormalised after top-p or top-k, so the ratio is wrong even at equal weights; sample with top_p 1 and "
            "no top_k, or have the sampler return full-vocabulary log-probabilities"
        )
    if objective == "gspo" and aggregation != "sample":
        raise UserError(
            f"gspo is one term per sequence, and aggregation {aggregation} would weight it by length; use aggregation "
            "sample, or objective gspo_token"
        )
    if (aggregation == "constant") != (max_tokens is not None):
        raise UserError(
            f"aggregation {aggregation} with max_tokens {max_tokens}: constant, and only it, needs the divisor"
        )
    if critic and (baseline != "none" or "prompt_std" in scales):
        raise UserError(
            f"advantages come from a critic, and baseline {baseline} with normalisation {scales or ['none']} would "
            "subtract or divide by the group's too; use baseline none and normalisation none or global"
        )
    if baseline == "none" and (scale := next((s for s in scales if s != "global"), None)):
        raise UserError(
            f"normalisation {scale} divides by a standard deviation and subtracts nothing, and with baseline none "
            "neither did anything before it: equal rewards, whose deviation is 0, would become enormous advantages. "
            "Use normalisation global or none, or a baseline"
        )
    compares = baseline != "none" or "prompt_std" in scales or zero_variance_filter
    if group_size < 2 and compares:
        raise UserError(
            f"group size {group_size} leaves nothing to compare a completion with: baseline {baseline}, normalisation "
            f"{scales or ['none']} and zero_variance_filter {zero_variance_filter} need at least 2 per prompt"
        )
    if kl_in_loss is not None and kl_in_reward is not None:
        raise UserError("the KL penalty is in the loss and in the reward, so it counts twice; keep one")
