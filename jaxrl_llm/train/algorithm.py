"""An algorithm as the train step sees it: bound functions, no names. `cli/algorithm.py` makes it from a config."""

from collections.abc import Callable
from dataclasses import dataclass

import optax
from jaxtyping import Array, Float

from jaxrl_llm.losses.algorithms import BoundObjective

Estimator = Callable[..., Float[Array, "*s"]]
"""(logprobs, reference_logprobs, mask) -> KL per token."""

Credit = Callable[..., tuple[Float[Array, "*b T"], Float[Array, "*b T"] | None]]
"""losses.credit.Given -> (advantages, returns or None)."""


@dataclass(frozen=True)
class Penalty:
    """coefficient * estimator(logprobs, reference): taken from the objective, or (`in_reward`) by `Algorithm.credit`.

    With `in_reward` the coefficient is bound into the credit.
    """

    estimator: Estimator
    coefficient: float
    in_reward: bool = False


@dataclass(frozen=True)
class AdaptiveEntropy:
    """The entropy coefficient follows a target, in nats; see losses/entropy.py."""

    target: float
    step: float
    highest: float


@dataclass(frozen=True)
class Critic:
    """A value head on the hidden states, with an optimizer of its own."""

    optimizer: optax.GradientTransformation
    coefficient: float
    clip: float | None


@dataclass(frozen=True)
class Router:
    """Coefficients of the losses of a mixture of experts' router, means over all tokens of an update."""

    balance: float
    z: float


@dataclass(frozen=True)
class Algorithm:
    """loss = -sum(token_weights * (objective * weight - kl + entropy)) + value and router losses; None is left out.

    `objective`, `weight` and `metrics` share the calling convention of losses/algorithms.py. `num_segments` bounds the
    segment ids of a row, padding's included, for what sums over sequences. With `reads_old` the log-probabilities at
    the weights that began the step are computed before its first update; without, old is the present policy without
    gradient. `credit` replaces the batch's advantages by ones that need these, a reference or a critic. With
    `token_level` what a token adds to objective * weight - kl + entropy depends on its own numbers alone: the head's
    gradient is then worked out with its log-probabilities (losses/token_loss.py).
    """

    objective: BoundObjective
    weight: BoundObjective | None = None
    metrics: Callable[..., dict] | None = None
    num_segments: int | None = None
    token_level: bool = False
    updates: int = 1
    reads_old: bool = False
    penalty: Penalty | None = None
    entropy: float | AdaptiveEntropy = 0.0
    credit: Credit | None = None
    critic: Critic | None = None
    router: Router | None = None

    @property
    def looks_back(self) -> bool:
        """Whether the policy is scored before the step's first update."""
        return self.reads_old or self.critic is not None
