"""The rewards that say what is right, bound from their names, and the processes some of them need."""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from jaxrl_llm.cli.tools import python_tool, sandbox_limits
from jaxrl_llm.config import IMPORT_PATH, RolloutConfig
from jaxrl_llm.envs.tools.python import PythonTool
from jaxrl_llm.rewards.code import CodeReward
from jaxrl_llm.rewards.combine import by_task
from jaxrl_llm.rewards.exact import exact_match, normalised_match
from jaxrl_llm.rewards.pool import WorkerPool
from jaxrl_llm.rewards.pooled import MATH, math_answers, user_answers
from jaxrl_llm.rewards.protocol import RewardFunction
from jaxrl_llm.sandbox.examiner import Examiner, check_tests
from jaxrl_llm.types import PromptTask, UserError

_COMPARISONS = {"exact": exact_match, "normalised": normalised_match}


@dataclass(frozen=True)
class RewardProcesses:
    """Everything outside this process that rewards and tools need: killable workers, and sandboxes if anybody asks."""

    workers: WorkerPool
    examiner: Examiner | None
    python: PythonTool | None

    def start(self) -> None:
        """Raises UserError for a function that cannot be imported, or a sandbox that does not hold."""
        self.workers.start()
        for sandboxed in (self.examiner, self.python):
            if sandboxed is not None:
                sandboxed.start()

    def close(self) -> None:
        self.workers.close()
        for sandboxed in (self.examiner, self.python):
            if sandboxed is not None:
                sandboxed.close()


def reward_processes(rollout: RolloutConfig, names: Iterable[str]) -> RewardProcesses:
    """The processes for the tasks' rewards `names` and for the parts of the configuration; none is started yet."""
    paths = {name for name in (*names, *rollout.rewards) if IMPORT_PATH.fullmatch(name)}
    functions = {path: path for path in sorted(paths)} | ({MATH: MATH} if "math" in names else {})
    how = rollout.reward_workers
    workers = WorkerPool(
        functions, workers=how.count, timeout_s=how.timeout_s, retries=how.retries, memory_mb=how.memory_mb
    )
    limits = sandbox_limits(rollout, wall_s=rollout.sandbox.wall_s)
    examiner = Examiner(limits, workers=rollout.sandbox.count) if "code" in names else None
    return RewardProcesses(workers, examiner, python_tool(rollout))


def check_answers(tasks: Iterable[PromptTask]) -> None:
    """Raises UserError naming the first task whose answer its reward could never work with."""
    for task in tasks:
        if task.reward == "code":
            try:
                check_tests(task.answer)
            except UserError as error:
                raise UserError(f"the answer of {task.task_id} is no tests of programs: {error}") from None


def bind_answers(rollout: RolloutConfig, names: Iterable[str], processes: RewardProcesses) -> RewardFunction:
    """Each task scored by the reward it names, one of `names`. Raises UserError for a name without a meaning."""
    return by_task({name: _bind(name, rollout, processes) for name in names})


def _bind(name: str, rollout: RolloutConfig, processes: RewardProcesses) -> RewardFunction:
    how = {"correct": rollout.reward_correct, "wrong": rollout.reward_wrong}
    if name in _COMPARISONS:
        return partial(_COMPARISONS[name], **how)
    if name == "math":
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("the reward math needs math-verify; pip install 'jaxrl_llm[math]'")
        return math_answers(processes.workers, **how)
    if name == "code":
        assert processes.examiner is not None
        return CodeReward(processes.examiner, **how)
    if IMPORT_PATH.fullmatch(name):
        return user_answers(processes.workers, name, **how)
    raise UserError(
        f"there is no reward {name!r}, only {', '.join((*_COMPARISONS, 'math', 'code'))}; see docs/rewards.md"
    )
