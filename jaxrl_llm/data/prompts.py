"""The stream of training prompts: Grain datasets ordered anew every epoch, resumable from one integer."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import grain

from jaxrl_llm.types import PromptTask, UserError


class Prompts(Protocol):
    """A seekable stream: element `i` depends on i alone, so its whole state is `next_index`.

    None stands where a source has been used up. Any `2 * epoch_size` elements in a row meet every prompt that is not.
    """

    next_index: int

    def __getitem__(self, index: int) -> PromptTask | None: ...

    @property
    def epoch_size(self) -> int: ...


class PromptStream:
    """One source's prompts, `epochs` times (None: without end), shuffled anew in each or in the order given."""

    def __init__(self, tasks: Sequence[PromptTask], *, seed: int, shuffle: bool = True, epochs: int | None = None):
        if not tasks:
            raise UserError("the training set is empty: nothing to make prompts from")
        self._epoch_size = len(tasks)
        end = None if epochs is None else epochs * len(tasks)
        dataset = grain.MapDataset.source(tasks).seed(seed)
        # repeat() after shuffle() reshuffles each epoch with a seed of its own.
        dataset = (dataset.shuffle() if shuffle else dataset).repeat()
        self.dataset: grain.MapDataset[PromptTask | None] = dataset.map_with_index(
            lambda index, task: task if end is None or index < end else None
        )
        self.next_index = 0

    def __getitem__(self, index: int) -> PromptTask | None:
        return self.dataset[index]

    @property
    def epoch_size(self) -> int:
        return self._epoch_size


class PromptMixture:
    """Several sources in fixed proportions: after n prompts each has had its share of n, but for rounding."""

    def __init__(self, streams: Sequence[PromptStream], weights: Sequence[float]):
        self._dataset = grain.MapDataset.mix([stream.dataset for stream in streams], list(weights))
        shares = [weight / sum(weights) for weight in weights]
        self._epoch_size = max(int(s.epoch_size / share) + 2 for s, share in zip(streams, shares, strict=True))
        self.next_index = 0

    def __getitem__(self, index: int) -> PromptTask | None:
        return self._dataset[index]

    @property
    def epoch_size(self) -> int:
        return self._epoch_size


def fingerprint(tasks: Sequence[PromptTask]) -> str:
    """sha256 over all that a run sees of its prompts, in order: a data position means nothing on other data."""
    digest = hashlib.sha256()
    for task in tasks:
        texts = (task.task_id, task.answer, task.source, task.reward)
        for part in (task.tokens_T.tobytes(), *(text.encode() for text in texts)):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def overlaps(sources: Mapping[str, Sequence[str]], heldout: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], int]:
    """(source, source that holds it out) -> how many training prompts of the first are held out by the second.

    Texts are compared but for white space. Pairs without any are left out.
    """
    held = {name: {plain_text(text) for text in texts} for name, texts in heldout.items()}
    counts = {
        (name, other): sum(plain_text(text) in texts for text in sources[name])
        for name in sources
        for other, texts in held.items()
    }
    return {pair: count for pair, count in counts.items() if count}


def plain_text(text: str) -> str:
    """A prompt as it is compared with others: runs of white space are one space."""
    return " ".join(text.split())
