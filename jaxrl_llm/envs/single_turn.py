"""One prompt, one completion, one reward."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.types import Completion, Episode, PromptTask, Reward

ScoreText = Callable[..., Reward]  # (completion, answer, *, finished) -> Reward


class SingleTurn:
    """Scores completions on their decoded text; the ids that train are the sampled ones, never re-encoded."""

    def __init__(self, *, decode: Callable[[Sequence[int]], str], score: ScoreText):
        self._decode, self._score = decode, score

    def text(self, completion: Completion) -> str:
        """The completion's text without its end-of-sequence token."""
        ids = completion.tokens_T[:-1] if completion.finish == "stop" else completion.tokens_T
        return self._decode(ids.tolist())

    def episode(self, task: PromptTask, completion: Completion) -> Episode:
        reward = self._score(self.text(completion), task.answer, finished=completion.finish == "stop")
        return Episode(completion, np.ones(len(completion.tokens_T), bool), reward)
