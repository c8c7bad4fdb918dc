"""The stream of training prompts: a Grain dataset shuffled anew every epoch, resumable from one integer."""

import hashlib
from collections.abc import Sequence

import grain

from jaxrl_llm.types import PromptTask, UserError


class PromptStream:
    """An endless, seekable stream of prompts.

    Element `i` depends on (tasks, seed, i) alone, so its whole state is the next index.
    """

    def __init__(self, tasks: Sequence[PromptTask], *, seed: int):
        if not tasks:
            raise UserError("the training set is empty: nothing to make prompts from")
        self._epoch_size = len(tasks)
        # repeat() after shuffle() reshuffles each epoch with a seed of its own.
        self._dataset = grain.MapDataset.source(tasks).seed(seed).shuffle().repeat()
        self.next_index = 0

    def __getitem__(self, index: int) -> PromptTask:
        task = self._dataset[index]
        assert task is not None  # only a filtering dataset has holes
        return task

    @property
    def epoch_size(self) -> int:
        return self._epoch_size


def fingerprint(tasks: Sequence[PromptTask]) -> str:
    """sha256 over ids, tokens and answers: a checkpoint's data position means nothing on other data."""
    digest = hashlib.sha256()
    for task in tasks:
        for part in (task.task_id.encode(), task.tokens_T.tobytes(), task.answer.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
