"""One prompt, one completion, one reward."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxrl_llm.rewards.protocol import RewardFunction
from jaxrl_llm.types import Completion, Episode, PromptTask, Reward

Penalty = Callable[[int, bool], float]  # (tokens of the completion, whether it is correct) -> added to the reward


class SingleTurn:
    """Scores completions on their decoded text; the ids that train are the sampled ones, never re-encoded.

    With a `penalty` its value is added to the reward and shown as the part "length".
    """

    def __init__(
        self, *, decode: Callable[[Sequence[int]], str], score: RewardFunction, penalty: Penalty | None = None
    ):
        self._decode, self.score, self._penalty = decode, score, penalty

    def scored_by(self, score: RewardFunction) -> "SingleTurn":
        """This environment with other rewards."""
        return SingleTurn(decode=self._decode, score=score, penalty=self._penalty)

    def text(self, completion: Completion) -> str:
        """What is scored: the completion's text without the token that ended it."""
        return self._decoded(completion)

    def transcript(self, completion: Completion) -> str:
        """All of the completion's text without the token that ended it."""
        return self._decoded(completion)

    def _decoded(self, completion: Completion, start: int = 0) -> str:
        end = -1 if completion.finish == "stop" else None
        return self._decode(completion.tokens_T[start:end].tolist())

    def episodes(self, task: PromptTask, completions: Sequence[Completion]) -> list[Episode]:
        """The episodes of one prompt's completions, in their order."""
        texts = [self.text(completion) for completion in completions]
        rewards = self.score(texts, task, finished=[completion.finish == "stop" for completion in completions])
        if self._penalty is not None:
            rewards = [self._penalised(r, len(c.tokens_T)) for r, c in zip(rewards, completions, strict=True)]
        return [Episode(c, ~c.forced_T, r) for c, r in zip(completions, rewards, strict=True)]

    def _penalised(self, reward: Reward, tokens: int) -> Reward:
        if self._penalty is None or reward.failed is not None:
            return reward
        added = self._penalty(tokens, reward.parts["correct"] > 0)
        return replace(reward, value=reward.value + added, parts={**reward.parts, "length": added})
