"""First-fit packing of documents into rows of a fixed length."""

from collections.abc import Sequence

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


def rows_needed(documents: int, longest: int, row_length: int) -> int:
    """Most rows that first-fit can use: a row that refused a document is filled beyond row_length - longest,
    so it holds at least floor(row_length / longest) documents."""
    return -(-documents // (row_length // longest))
