"""The rewards that say what is right, bound from their names, and the processes some of them need."""

import importlib.util
from collections.abc import Iterable
from functools import partial

from jaxrl_llm.config import IMPORT_PATH, RolloutConfig
from jaxrl_llm.rewards.combine import by_task
from jaxrl_llm.rewards.exact import exact_match, normalised_match
from jaxrl_llm.rewards.pool import WorkerPool
from jaxrl_llm.rewards.pooled import MATH, math_answers, user_answers
from jaxrl_llm.rewards.protocol import RewardFunction
from jaxrl_llm.types import UserError

_COMPARISONS = {"exact": exact_match, "normalised": normalised_match}


def reward_workers(rollout: RolloutConfig, names: Iterable[str]) -> WorkerPool:
    """The processes for the tasks' rewards `names` and for the parts of the configuration; none is started yet."""
    paths = {name for name in (*names, *rollout.rewards) if IMPORT_PATH.fullmatch(name)}
    functions = {path: path for path in sorted(paths)} | ({MATH: MATH} if "math" in names else {})
    how = rollout.reward_workers
    return WorkerPool(
        functions, workers=how.count, timeout_s=how.timeout_s, retries=how.retries, memory_mb=how.memory_mb
    )


def bind_answers(rollout: RolloutConfig, names: Iterable[str], pool: WorkerPool) -> RewardFunction:
    """Each task scored by the reward it names, one of `names`. Raises UserError for a name without a meaning."""
    return by_task({name: _bind(name, rollout, pool) for name in names})


def _bind(name: str, rollout: RolloutConfig, pool: WorkerPool) -> RewardFunction:
    how = {"correct": rollout.reward_correct, "wrong": rollout.reward_wrong}
    if name in _COMPARISONS:
        return partial(_COMPARISONS[name], **how)
    if name == "math":
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("the reward math needs math-verify; pip install 'jaxrl_llm[math]'")
        return math_answers(pool, **how)
    if IMPORT_PATH.fullmatch(name):
        return user_answers(pool, name, **how)
    raise UserError(f"there is no reward {name!r}, only {', '.join((*_COMPARISONS, 'math'))}; see docs/rewards.md")
