"""Procedural tasks as numbered problems, split so that train and held-out cannot meet.

A task is a few cells. The problems of a cell are numbered, and different numbers make different prompts; a split draws
different numbers and deals them out, so no draw, however long, puts a prompt on both sides. Nothing depends on global
random state or on hashing: equal arguments give equal splits in every process.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from jaxrl_llm.data.problem import Problem, Split
from jaxrl_llm.types import UserError

_MOST_LISTED = 2**20  # numbers of a cell that are shuffled as a list; of a larger one, so many are drawn as are needed


@dataclass(frozen=True)
class Cell:
    """Problems `make(0)` ... `make(size - 1)`, no two with the same prompt, in this or another cell of the task."""

    size: int
    make: Callable[[int], Problem]


def split_cells(cells: Sequence[Cell], *, heldout: int, train: int | None, seed: int) -> Split:
    """`heldout` and `train` different problems (None: all that are left), cells mixed as evenly as their sizes allow.

    Where there are several cells, at most half of each is held out. What is held out does not depend on `train`.
    Raises UserError if there are too few problems, or too many to list them all.
    """
    total = sum(cell.size for cell in cells)
    most = [cell.size // 2 if len(cells) > 1 else max(0, cell.size - 1) for cell in cells]
    held = _shares(heldout, most)
    if held is None:
        raise UserError(
            f"heldout = {heldout} of the {total} problems that there are leaves nothing to train on"
            + ("" if len(cells) == 1 else " in some lengths (at most half of each is held out)")
            + "; hold out fewer"
        )
    left = [cell.size - h for cell, h in zip(cells, held, strict=True)]
    if train is None and total > _MOST_LISTED:
        raise UserError(f"the task has {total} problems, too many to list; say with `train` how many to train on")
    wanted = _shares(sum(left) if train is None else train, left)
    if wanted is None:
        raise UserError(f"train = {train} is more than the {sum(left)} problems that are not held out; ask for fewer")
    drawn = [_draw(cell.size, h + w, seed) for cell, h, w in zip(cells, held, wanted, strict=True)]
    return Split(
        train=_in_turn([[c.make(n) for n in d[h:]] for c, d, h in zip(cells, drawn, held, strict=True)]),
        heldout=_in_turn([[c.make(n) for n in d[:h]] for c, d, h in zip(cells, drawn, held, strict=True)]),
    )


def _shares(total: int, most: Sequence[int]) -> list[int] | None:
    """`total` dealt out as evenly as the limits `most` allow; None if it is more than they allow together."""
    shares, open_ = [0] * len(most), list(range(len(most)))
    while total and open_:
        each, rest = divmod(total, len(open_))
        for place, i in enumerate(open_):
            more = min(most[i] - shares[i], each + (place < rest))
            shares[i] += more
            total -= more
        open_ = [i for i in open_ if shares[i] < most[i]]
    return None if total else shares


def _draw(size: int, count: int, seed: int) -> list[int]:
    """`count` different numbers below `size`; the first ones are the same for every count."""
    if size <= _MOST_LISTED:
        return np.random.default_rng([seed, size]).permutation(size)[:count].tolist()
    generator = random.Random(f"{seed} {size}")  # seeded through SHA-512, not hash()
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        drawn.setdefault(generator.randrange(size))
    return list(drawn)


def _in_turn(columns: Sequence[Sequence[Problem]]) -> list[Problem]:
    """One of each column in turn, so that any first part of the result is as mixed as the whole."""
    return [problem for row in zip_longest(*columns) for problem in row if problem is not None]
