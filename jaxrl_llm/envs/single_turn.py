"""One prompt, one completion, one reward."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxrl_llm.types import Completion, Episode, PromptTask, Reward

ScoreText = Callable[..., Reward]  # (completion, answer, *, finished) -> Reward
Penalty = Callable[[int, bool], float]  # (tokens of the completion, whether it is correct) -> added to the reward


class SingleTurn:
    """Scores completions on their decoded text; the ids that train are the sampled ones, never re-encoded.

    With a `penalty` its value is added to the reward and shown as the part "length".
    """

    def __init__(self, *, decode: Callable[[Sequence[int]], str], score: ScoreText, penalty: Penalty | None = None):
        self._decode, self._score, self._penalty = decode, score, penalty

    def text(self, completion: Completion) -> str:
        """The completion's text without the token that ended it."""
        ids = completion.tokens_T[:-1] if completion.finish == "stop" else completion.tokens_T
        return self._decode(ids.tolist())

    def episode(self, task: PromptTask, completion: Completion) -> Episode:
        reward = self._score(self.text(completion), task.answer, finished=completion.finish == "stop")
        if self._penalty is not None and reward.failed is None:
            added = self._penalty(len(completion.tokens_T), reward.parts["correct"] > 0)
            reward = replace(reward, value=reward.value + added, parts={**reward.parts, "length": added})
        return Episode(completion, ~completion.forced_T, reward)
