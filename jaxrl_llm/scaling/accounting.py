"""Compute in FLOPs: pretraining, an RL step with its sampling, and the device-hours that they take.

N is the number of parameters that multiply a token (all matrices and the head, not the embedding lookup); attention
scores are left out, so long contexts cost more than stated here. The same rule as the runs' own `flops`.
"""

from dataclasses import dataclass

from jaxrl_llm.types import UserError

TRAIN, FORWARD = 6.0, 2.0  # FLOPs per parameter and token


def pretraining_flops(N: float, D: float) -> float:
    """C = 6 N D: forward and backward of D tokens through N parameters (Kaplan et al., arXiv:2001.08361)."""
    return TRAIN * N * D


@dataclass(frozen=True)
class StepCost:
    """FLOPs of one RL step by what they are for, and its tokens (generated ones)."""

    training: float
    sampling: float
    scoring: float
    tokens: float

    @property
    def total(self) -> float:
        return self.training + self.sampling + self.scoring


def rl_step(
    N: float,
    *,
    prompts: float,
    rollouts: float,
    prompt_tokens: float,
    completion_tokens: float,
    scoring_passes: int = 0,
    share_prompts: bool = False,
) -> StepCost:
    """One optimizer batch of `prompts` (B_p) with `rollouts` (n) completions each, of mean lengths in tokens.

    Sampling: 2 N for every prompt (read once for its n completions) and for every generated token. Training: 6 N for
    every token of every row, a prompt once for each completion or, with `share_prompts`, once in all. `scoring_passes`
    counts further forward passes over the rows: a reference policy, old log-probabilities. Raises UserError for
    a size that is not positive.
    """
    given = {"N": N, "prompts": prompts, "rollouts": rollouts, "completion_tokens": completion_tokens}
    for name, value in given.items():
        if not value > 0:
            raise UserError(f"{name} is {value:g}; it must be above 0")
    if prompt_tokens < 0 or scoring_passes < 0:
        raise UserError("prompt_tokens and scoring_passes cannot be negative")
    generated = prompts * rollouts * completion_tokens
    rows = generated + prompts * prompt_tokens * (1 if share_prompts else rollouts)
    return StepCost(
        training=TRAIN * N * rows,
        sampling=FORWARD * N * (generated + prompts * prompt_tokens),
        scoring=FORWARD * N * rows * scoring_passes,
        tokens=generated,
    )


def device_hours(flops: float, *, peak: float, utilisation: float) -> float:
    """Device-hours of `flops` on devices of `peak` FLOP/s that reach the share `utilisation` of it, in (0, 1]."""
    if not peak > 0:
        raise UserError(f"a peak of {peak:g} FLOP/s does no work; give the device's peak")
    if not 0 < utilisation <= 1:
        raise UserError(f"utilisation is {utilisation:g}; it is a share of the peak, above 0 and at most 1")
    return flops / (peak * utilisation) / 3600.0
