"""Rewards that a pool of killable processes works out: mathematics, and functions of the user's."""

from collections.abc import Sequence
from functools import partial

from jaxrl_llm.rewards.pool import Job, Outcome, WorkerPool
from jaxrl_llm.rewards.protocol import RewardFunction, answered, failed
from jaxrl_llm.types import PromptTask, Reward

MATH = "jaxrl_llm.rewards.math_answer:is_right"


def math_answers(pool: WorkerPool, *, correct: float, wrong: float) -> RewardFunction:
    """`correct` where a completion ended by itself and its final answer is the task's, else `wrong`."""

    def score(texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool]) -> list[Reward]:
        # What was cut off is wrong whatever it says, and need not be read.
        jobs = {
            index: Job(MATH, {"text": text, "answer": task.answer})
            for index, (text, ended) in enumerate(zip(texts, finished, strict=True))
            if ended
        }
        outcomes = dict(zip(jobs, pool.run(list(jobs.values())), strict=True))
        cut = Outcome(0.0)
        return [_answer(outcomes.get(i, cut), "math", correct, wrong) for i in range(len(texts))]

    return score


def user_answers(pool: WorkerPool, path: str, *, correct: float, wrong: float) -> RewardFunction:
    """`correct` or `wrong` by a user's function, which says True or False; any other number has failed.

    It is called as `function(text=..., prompt=..., answer=..., finished=...)` for one completion at a time.
    """

    def score(texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool]) -> list[Reward]:
        return [_answer(o, path, correct, wrong) for o in _ask(pool, path, texts, task, finished)]

    return score


def user_part(pool: WorkerPool, path: str) -> RewardFunction:
    """The number that a user's function returns, called as in `user_answers`; a part named after the function."""

    def score(texts: Sequence[str], task: PromptTask, *, finished: Sequence[bool]) -> list[Reward]:
        return [
            failed(f"{path}: {o.failed}") if o.failed else Reward(o.value, {path.partition(":")[2]: o.value})
            for o in _ask(pool, path, texts, task, finished)
        ]

    return score


def _ask(
    pool: WorkerPool, path: str, texts: Sequence[str], task: PromptTask, finished: Sequence[bool]
) -> list[Outcome]:
    known = {"prompt": task.prompt, "answer": task.answer}
    call = partial(Job, path)
    return pool.run([call({"text": t, "finished": ended} | known) for t, ended in zip(texts, finished, strict=True)])


def _answer(outcome: Outcome, name: str, correct: float, wrong: float) -> Reward:
    if outcome.failed:
        return failed(f"{name}: {outcome.failed}")
    if outcome.value not in (0.0, 1.0):
        return failed(f"{name}: it returned {outcome.value}, and an answer is True or False")
    return answered(outcome.value == 1.0, correct=correct, wrong=wrong)
