"""The worked batch: four completions of two prompts, laid out one per row and packed two per row."""

from types import SimpleNamespace

import numpy as np
import pytest

LENGTHS = np.array([2, 4, 1, 3])
GROUPS = np.array([0, 0, 1, 1])
REWARDS = np.array([1.0, -1.0, 1.0, -1.0])
OLD = [[-0.5, -1.0], [-0.2, -0.7, -1.5, -0.1], [-0.3], [-2.0, -0.4, -0.9]]
LOG_RATIO = [[0.1, 0.4], [-0.3, 0.05, 0.5, 2.0], [-0.6], [0.0, 0.25, -0.15]]


def _lay_out(rows: list[list[int]], width: int) -> SimpleNamespace:
    """Completions by row, each document preceded by one untrained token (its prompt), padded to `width`."""
    shape = (len(rows), width)
    batch = SimpleNamespace(
        logprobs=np.zeros(shape),
        old=np.zeros(shape),
        advantages=np.zeros(shape),
        mask=np.zeros(shape, bool),
        segment_ids=np.zeros(shape, np.int32),
        completion=np.full(shape, -1),  # which completion a token belongs to; -1 for prompt and padding
        num_segments=1 + max(map(len, rows)),
    )
    for b, completions in enumerate(rows):
        start = 0
        for segment, i in enumerate(completions, start=1):
            stop = start + 1 + LENGTHS[i]
            place = np.s_[b, start + 1 : stop]
            batch.segment_ids[b, start:stop] = segment
            batch.old[place] = OLD[i]
            batch.logprobs[place] = np.add(OLD[i], LOG_RATIO[i])
            batch.advantages[place] = REWARDS[i] - REWARDS[GROUPS[i] == GROUPS].mean()
            batch.mask[place] = True
            batch.completion[place] = i
            start = stop
    return batch


@pytest.fixture(scope="session", params=["padded", "packed"])
def worked(request):
    if request.param == "padded":
        batch = _lay_out([[0], [1], [2], [3]], 5)
        batch.structure = {"segment_ids": None, "num_segments": None}
    else:
        batch = _lay_out([[2, 1], [0, 3]], 8)
        batch.structure = {"segment_ids": batch.segment_ids, "num_segments": batch.num_segments}
    batch.lengths, batch.groups, batch.keep = LENGTHS, GROUPS, np.ones(4, bool)
    return batch
