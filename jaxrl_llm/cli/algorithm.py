"""From the algorithm's names and constants to bound functions, once, and the combinations that are refused."""

from functools import partial

import optax

from jaxrl_llm.config import AlgorithmConfig, RunConfig
from jaxrl_llm.losses.advantages import normalise
from jaxrl_llm.losses.aggregate import completion_weights
from jaxrl_llm.losses.algorithms import (
    BASELINES,
    CORRECTIONS,
    KL_ESTIMATORS,
    OBJECTIVES,
    bind,
    bind_corrections,
    bind_metrics,
    check_composition,
)
from jaxrl_llm.losses.credit import credit_to_go, group_credit
from jaxrl_llm.rollout.batching import Selection
from jaxrl_llm.train.algorithm import AdaptiveEntropy, Algorithm, Credit, Critic, Penalty, Router
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.types import UserError


def check_algorithm(config: RunConfig) -> None:
    """Raises UserError with the reason if the parts of `config.algorithm` mean nothing together."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    check_composition(
        objective=algorithm.objective,
        aggregation=algorithm.aggregation,
        baseline=algorithm.baseline,
        normalisations=[algorithm.normalisation],
        importance=list(algorithm.importance),
        anchor=algorithm.anchor,
        kl_in_loss=kl.estimator if kl.place == "loss" else None,
        kl_in_reward=kl.estimator if kl.place == "reward" else None,
        group_size=config.rollout.group_size,
        critic=algorithm.critic.enabled,
        zero_variance_filter=algorithm.zero_variance_filter,
        max_tokens=_max_tokens(config),
    )
    bind_corrections(algorithm.importance)
    bind(algorithm.objective, anchor=algorithm.anchor, **algorithm.constants)


def bind_algorithm(config: RunConfig, *, num_segments: int) -> Algorithm:
    """The train step's algorithm. `num_segments` bounds the segment ids of a row, the padding's included."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    in_reward = kl.place == "reward"
    return Algorithm(
        objective=bind(algorithm.objective, anchor=algorithm.anchor, **algorithm.constants),
        weight=bind_corrections(algorithm.importance) if algorithm.importance else None,
        metrics=bind_metrics(algorithm.objective, anchor=algorithm.anchor, **algorithm.constants),
        num_segments=num_segments,
        token_level=OBJECTIVES[algorithm.objective].ratio != "sequence"
        and all(CORRECTIONS[name].level == "token" for name in algorithm.importance),
        updates=algorithm.updates_per_batch,
        reads_old=in_reward or (algorithm.updates_per_batch > 1 and _reads_old(algorithm)),
        penalty=Penalty(KL_ESTIMATORS[kl.estimator], kl.coefficient, in_reward) if kl.place != "none" else None,
        entropy=_entropy(algorithm),
        credit=_credit(config, num_segments),
        critic=_critic(config),
        router=_router(config),
    )


def _router(config: RunConfig) -> Router | None:
    how = config.algorithm.router
    return Router(how.balance, how.z) if how.balance or how.z else None


def check_router(config: RunConfig) -> None:
    """Raises UserError if losses of a router are asked for that the model, whose shape is known now, does not have."""
    if (how := _router(config)) is not None and config.model.experts is None:
        raise UserError(
            f"algorithm.router has balance {how.balance} and z {how.z}, but this model has no experts; set both to 0"
        )


def bind_selection(config: RunConfig) -> Selection:
    """How groups become documents; advantages stay rewards where the device works them out."""
    algorithm, rollout = config.algorithm, config.rollout
    baseline = BASELINES["none" if _on_device(algorithm) else algorithm.baseline]
    normalisation = "none" if _on_device(algorithm) else algorithm.normalisation

    def advantages(rewards_PG, keep_PG):
        return normalise(baseline(rewards_PG, keep_PG), keep_PG, kind=normalisation)

    return Selection(
        advantages=advantages,
        token_weights=partial(completion_weights, kind=algorithm.aggregation, max_tokens=_max_tokens(config)),
        zero_variance_filter=algorithm.zero_variance_filter,
        overlong_filter=algorithm.overlong_filter,
        smallest_group=2 if algorithm.compares else 1,
        siblings=rollout.group_size,
        prompts_per_update=rollout.prompts_per_step // algorithm.updates_per_batch,
    )


def critic_optimizer(config: RunConfig) -> optax.GradientTransformation | None:
    """The value head's AdamW: its own rate, no weight decay; None without a critic."""
    if not config.algorithm.critic.enabled:
        return None
    rates = config.optimizer.model_copy(
        update={"lr": config.algorithm.critic.lr, "weight_decay": 0.0, "lr_batch": None}
    )
    return make_optimizer(rates, total_steps=config.train.steps)


def adapts_entropy(config: RunConfig) -> bool:
    return config.algorithm.entropy.target is not None


def _max_tokens(config: RunConfig) -> int | None:
    if config.algorithm.aggregation == "constant":
        return config.algorithm.max_tokens or config.rollout.max_new_tokens
    return config.algorithm.max_tokens


def _reads_old(algorithm: AlgorithmConfig) -> bool:
    """Whether the objective or a correction compares with the weights that began the step."""
    objective = OBJECTIVES[algorithm.objective]
    reads = objective.ratio != "none" and (algorithm.anchor or objective.anchor) == "old"
    for name, constants in algorithm.importance.items():
        reads |= not CORRECTIONS[name].reads_policy or constants.get("anchor") == "old"
    return reads


def _on_device(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages need the device: a KL penalty inside the reward, or a critic."""
    return algorithm.kl.place == "reward" or algorithm.critic.enabled


def _credit(config: RunConfig, num_segments: int) -> Credit | None:
    algorithm, critic = config.algorithm, config.algorithm.critic
    if not _on_device(algorithm):
        return None
    beta = algorithm.kl.coefficient if algorithm.kl.place == "reward" else 0.0
    if algorithm.baseline != "none":
        return partial(
            group_credit,
            num_segments=num_segments,
            beta=beta,
            groups=config.rollout.prompts_per_step // algorithm.updates_per_batch,
            siblings=config.rollout.group_size,
            baseline=BASELINES[algorithm.baseline],
            normalisation=algorithm.normalisation,
        )
    return partial(
        credit_to_go,
        num_segments=num_segments,
        beta=beta,
        gamma=critic.gamma if critic.enabled else 1.0,
        lam=critic.lam if critic.enabled else 1.0,
        normalisation=algorithm.normalisation,
    )


def _entropy(algorithm: AlgorithmConfig) -> float | AdaptiveEntropy:
    entropy = algorithm.entropy
    if entropy.target is None:
        return entropy.coefficient
    return AdaptiveEntropy(entropy.target, entropy.step, entropy.highest)


def _critic(config: RunConfig) -> Critic | None:
    optimizer, critic = critic_optimizer(config), config.algorithm.critic
    return Critic(optimizer, critic.coefficient, critic.clip) if optimizer is not None else None
