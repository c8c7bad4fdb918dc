"""Episodes of several turns: the policy writes a call in its completion, a tool answers in it, the policy goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_llm.envs.single_turn import Penalty, SingleTurn
from jaxrl_llm.envs.tools.protocol import Tool, ToolBrokenError
from jaxrl_llm.envs.turns import answered
from jaxrl_llm.rewards.protocol import RewardFunction, failed
from jaxrl_llm.types import Completion, Episode, PromptTask, Turn, UserError

_CHARS = 64  # of an answer for each token it may have: what is behind them would be cut off, and is not encoded at all


@dataclass(frozen=True)
class Calling:
    """How a tool is called: by what stands between `opening` and `closing`, which ends the turn."""

    opening: str
    closing: str
    tool: Tool


@dataclass(frozen=True)
class TurnLimits:
    """`tokens` of a whole episode, answers included; `turn_tokens` of what the policy writes in one turn;
    `answer_tokens` of an answer without its marks; `calls` that are answered."""

    tokens: int
    turn_tokens: int
    answer_tokens: int
    calls: int


class ToolUse(SingleTurn):
    """SingleTurn whose completions may call tools; what is scored is the text behind the last answer.

    `encode` makes ids of an answer's text and raises UserError for a character it has none for, which "?" then stands
    for. `marks` are the ids before and behind every answer.
    """

    def __init__(
        self,
        *,
        decode: Callable[[Sequence[int]], str],
        score: RewardFunction,
        penalty: Penalty | None = None,
        encode: Callable[[str], list[int]],
        callings: Sequence[Calling],
        marks: tuple[Sequence[int], Sequence[int]],
        limits: TurnLimits,
    ):
        super().__init__(decode=decode, score=score, penalty=penalty)
        self._encode, self._callings, self._marks, self._limits = encode, callings, marks, limits

    def scored_by(self, score: RewardFunction) -> "ToolUse":
        return ToolUse(
            decode=self._decode,
            score=score,
            penalty=self._penalty,
            encode=self._encode,
            callings=self._callings,
            marks=self._marks,
            limits=self._limits,
        )

    def text(self, completion: Completion) -> str:
        """What is scored: the last turn's text. What a tool says is never the policy's answer."""
        return self._decoded(completion, _last_turn(completion))

    def episodes(self, task: PromptTask, completions: Sequence[Completion]) -> list[Episode]:
        """The episodes of one prompt's completions, in their order; one whose tool broke has a failed reward."""
        sound = [completion for completion in completions if completion.failed is None]
        scored = iter(super().episodes(task, sound) if sound else ())
        return [next(scored) if c.failed is None else Episode(c, ~c.forced_T, failed(c.failed)) for c in completions]

    def next_turn(self, task: PromptTask, completion: Completion) -> Turn:
        """The answer to the call that ended `completion`, and what may follow; waits for the tool.

        The episode is over, cut off, where it has had its calls or where the answer and one token more do not fit in.
        """
        limits = self._limits
        cut_off = Turn(replace(completion, finish="length"))
        if len(completion.turns) >= limits.calls:
            return cut_off
        try:
            ids = self._ids(self._answer(completion))
        except ToolBrokenError as error:
            return Turn(replace(completion, failed=str(error)))
        left = limits.tokens - len(completion.tokens_T) - len(ids)
        return Turn(answered(completion, ids), min(limits.turn_tokens, left)) if left > 0 else cut_off

    def _answer(self, completion: Completion) -> str:
        text = self._decode(completion.tokens_T[_last_turn(completion) :].tolist())
        closed = [(at + len(c.closing), at, c) for c in self._callings if (at := text.find(c.closing)) >= 0]
        if not closed:  # cannot be: a closing mark ended the turn
            raise ToolBrokenError(f"no call is in {text[-80:]!r}")
        _, end, calling = min(closed, key=lambda found: found[0])
        start = text.rfind(calling.opening, 0, end)
        if start < 0:
            return f"error: {calling.closing} without {calling.opening}"
        return calling.tool(text[start + len(calling.opening) : end])

    def _ids(self, answer: str) -> np.ndarray:
        before, behind = self._marks
        said = self._encoded(answer[: _CHARS * self._limits.answer_tokens])[: self._limits.answer_tokens]
        return np.array([*before, *said, *behind], np.int32)

    def _encoded(self, text: str) -> list[int]:
        try:
            return self._encode(text)
        except UserError:
            known = {char for char in {*text, "?"} if self._has(char)}
        stand_in = "?" if "?" in known else ""
        try:
            return self._encode("".join(char if char in known else stand_in for char in text))
        except UserError as error:
            raise ToolBrokenError(f"an answer has no tokens: {error}") from None

    def _has(self, char: str) -> bool:
        try:
            self._encode(char)
        except UserError:
            return False
        return True


def _last_turn(completion: Completion) -> int:
    return completion.turns[-1] if completion.turns else 0
