"""The host's copy of what each slot has produced so far."""

import numpy as np

from jaxrl_llm.sampler.results import Columns
from jaxrl_llm.types import Alternatives, Completion, FinishReason


class Recorder:
    """Tokens with their log-probabilities, versions, forced marks and alternatives, a row per slot."""

    def __init__(self, slots: int, room: int, alternatives: int):
        self._tokens = np.zeros((slots, room), np.int32)
        self._logprobs = np.zeros((slots, room), np.float32)
        self._versions = np.zeros((slots, room), np.int32)
        self._forced = np.zeros((slots, room), bool)
        self._likeliest = np.zeros((slots, room, alternatives), np.int32)
        self._likeliest_logprobs = np.zeros((slots, room, alternatives), np.float32)
        self.counts = np.zeros(slots, np.int64)

    def record(self, columns: Columns, slots_S: np.ndarray) -> None:
        """Append a dispatch's tokens of the slots that `slots_S` (bool) marks."""
        for column in range(columns.tokens.shape[1]):
            slots = np.flatnonzero(columns.valid[:, column] & slots_S)
            at = (slots, self.counts[slots])
            self._tokens[at] = columns.tokens[slots, column]
            self._logprobs[at] = columns.logprobs[slots, column]
            self._versions[at] = columns.versions[slots, column]
            self._forced[at] = columns.forced[slots, column]
            self._likeliest[at] = columns.likeliest[slots, column]
            self._likeliest_logprobs[at] = columns.likeliest_logprobs[slots, column]
            self.counts[slots] += 1

    def tokens(self, slot: int) -> np.ndarray:
        """A view, int32 [T]."""
        return self._tokens[slot, : self.counts[slot]]

    def completion(self, slot: int, finish: FinishReason, *, since: int = 0, alternatives: int = 0) -> Completion:
        """What the slot has made beyond its first `since` tokens."""
        made = slice(since, self.counts[slot])
        known = None
        if alternatives:
            likeliest, logprobs = self._likeliest[slot, made], self._likeliest_logprobs[slot, made]
            known = Alternatives(likeliest[:, :alternatives].copy(), logprobs[:, :alternatives].copy())
        return Completion(
            self._tokens[slot, made].copy(),
            self._logprobs[slot, made].copy(),
            self._versions[slot, made].copy(),
            self._forced[slot, made].copy(),
            finish,
            known,
        )
