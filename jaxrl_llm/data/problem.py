"""Problems in text, before any tokenizer has seen them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One question with what its reward compares with. `id` is unique and stable within its source."""

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Split:
    """A source's problems: no prompt of one side stands on the other."""

    train: list[Problem]
    heldout: list[Problem]
