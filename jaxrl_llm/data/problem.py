"""Problems in text, before any tokenizer has seen them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One question with what its reward goes by. `id` is unique and stable within its source.

    `solution` is a completion that is right, where one is known and `answer` itself is none: a program that passes the
    tests, a derivation that ends with the number.
    """

    id: str
    prompt: str
    answer: str
    solution: str | None = None


@dataclass(frozen=True)
class Split:
    """A source's problems: no prompt of one side stands on the other."""

    train: list[Problem]
    heldout: list[Problem]
