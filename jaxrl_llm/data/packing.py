"""First-fit packing of documents into rows of a fixed length."""

from collections.abc import Hashable, Sequence

import numpy as np


def first_fit(lengths: Sequence[int], row_length: int) -> list[tuple[int, int]]:
    """(row, offset) of each document, in order; each goes into the first row with room.

    Rows needed never exceed ceil(n / floor(row_length / longest)), see `rows_needed`.
    """
    free = np.full(len(lengths), row_length)
    places = []
    for length in lengths:
        if not 0 < length <= row_length:
            raise ValueError(f"a document of {length} tokens does not fit a row of {row_length}")
        row = int(np.argmax(free >= length))
        places.append((row, row_length - int(free[row])))
        free[row] -= length
    return places


def shared_fit(
    prefixes: Sequence[Hashable], shared: Sequence[int], own: Sequence[int], row_length: int
) -> list[tuple[int, int, int]]:
    """(row, offset of its own tokens, offset of its prefix) of each document; -1 for a document whose prefix is empty.

    Neighbours of equal `prefixes` in one row share one copy of it, `shared` tokens before all of their `own`: a family,
    with nothing else between. A document joins the first row that ends with its family and has room for the rest, else
    it goes into the first with room for both. A row that refuses a document is as full as one of `first_fit`'s, so that
    rows needed keep the bound of `rows_needed`.
    """
    free = np.full(len(own), row_length)
    last: list[tuple[Hashable, int]] = [(None, -1)] * len(own)  # of each row: the family it ends with, its offset
    places = []
    for prefix, before, length in zip(prefixes, shared, own, strict=True):
        if not 0 < before + length <= row_length:
            raise ValueError(f"a document of {before + length} tokens does not fit a row of {row_length}")
        family = (row for row, (its, at) in enumerate(last) if at >= 0 and its == prefix and free[row] >= length)
        row = next(family, None)
        if row is None:
            row = int(np.argmax(free >= before + length))
            last[row] = (prefix, row_length - int(free[row]) if before else -1)
            free[row] -= before
        places.append((row, row_length - int(free[row]), last[row][1]))
        free[row] -= length
    return places


def rows_needed(documents: int, longest: int, row_length: int) -> int:
    """Most rows that first-fit can use: a row that refused a document is filled beyond row_length - longest,
    so it holds at least floor(row_length / longest) documents."""
    return -(-documents // (row_length // longest))
