"""One prompt, one completion, one reward."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxrl_llm.types import Completion, Episode, PromptTask, Reward

ScoreText = Callable[..., Reward]  # (completion, answer, *, finished) -> Reward
Judge = Callable[[str, Sequence[str]], Sequence[Reward]]  # (prompt, the siblings' texts) -> their rewards
Penalty = Callable[[int, bool], float]  # (tokens of the completion, whether it is correct) -> added to the reward


class SingleTurn:
    """Scores completions on their decoded text; the ids that train are the sampled ones, never re-encoded.

    With a `judge` its rewards train instead; `score` still says which completions are correct. With a `penalty` its
    value is added to the reward and shown as the part "length".
    """

    def __init__(
        self,
        *,
        decode: Callable[[Sequence[int]], str],
        score: ScoreText,
        judge: Judge | None = None,
        penalty: Penalty | None = None,
    ):
        self._decode, self._score, self._judge, self._penalty = decode, score, judge, penalty

    def judged_by(self, judge: Judge) -> "SingleTurn":
        """This environment with the rewards of `judge`."""
        return SingleTurn(decode=self._decode, score=self._score, judge=judge, penalty=self._penalty)

    def text(self, completion: Completion) -> str:
        """The completion's text without the token that ended it."""
        ids = completion.tokens_T[:-1] if completion.finish == "stop" else completion.tokens_T
        return self._decode(ids.tolist())

    def episodes(self, task: PromptTask, completions: Sequence[Completion]) -> list[Episode]:
        """The episodes of one prompt's completions, in their order."""
        texts = [self.text(completion) for completion in completions]
        rewards = [
            self._score(text, task.answer, finished=completion.finish == "stop")
            for text, completion in zip(texts, completions, strict=True)
        ]
        if self._judge is not None:
            judged = self._judge(task.prompt, texts)
            rewards = [replace(j, parts={**r.parts, **j.parts}) for r, j in zip(rewards, judged, strict=True)]
        if self._penalty is not None:
            rewards = [self._penalised(r, len(c.tokens_T)) for r, c in zip(rewards, completions, strict=True)]
        return [Episode(c, ~c.forced_T, r) for c, r in zip(completions, rewards, strict=True)]

    def _penalised(self, reward: Reward, tokens: int) -> Reward:
        if self._penalty is None or reward.failed is not None:
            return reward
        added = self._penalty(tokens, reward.parts["correct"] > 0)
        return replace(reward, value=reward.value + added, parts={**reward.parts, "length": added})
