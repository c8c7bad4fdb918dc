"""Rows whose documents share prompts: what goes where, and that nothing is lost or seen by the wrong one."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.data.packing import rows_needed, shared_fit
from jaxrl_llm.models.attention import document_mask
from jaxrl_llm.rollout.rows import Document, RowShape, pack
from jaxrl_llm.types import Reach


def document(prompt, completion):
    ones = np.ones(len(completion))
    logprobs = -np.asarray(completion) / 10
    return Document(np.asarray(prompt), np.asarray(completion), ones, 2 * ones, logprobs)


def test_siblings_share_a_prompt_worked_by_hand():
    documents = [document([7, 8, 9], [1, 2]), document([7, 8, 9], [3]), document([5], [4, 6])]
    batch = pack(documents, RowShape(1, 2, 8, share_prompts=True))
    # 7 8 once, then 9 1 (targets 1 2) and 9 (target 3); a prompt of one token has nothing to share
    np.testing.assert_array_equal(batch.tokens[0, 0], [7, 8, 9, 1, 9, 5, 4, 0])
    np.testing.assert_array_equal(batch.targets[0, 0], [0, 0, 1, 2, 3, 4, 6, 0])
    np.testing.assert_array_equal(batch.positions[0, 0], [0, 1, 2, 3, 2, 0, 1, 0])
    np.testing.assert_array_equal(batch.segment_ids[0, 0], [1, 1, 2, 2, 3, 4, 4, 0])
    np.testing.assert_array_equal(batch.prefix_ids[0, 0], [0, 0, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(batch.token_weights[0, 0], [0, 0, 1, 1, 1, 1, 1, 0])
    np.testing.assert_allclose(batch.behavior_logprobs[0, 0], [0, 0, -0.1, -0.2, -0.3, -0.4, -0.6, 0], rtol=1e-6)


def test_a_group_that_fills_a_row_takes_its_prompt_along():
    documents = [document([7, 8, 9, 2], [i, i]) for i in range(5)]  # 3 + 2 each; a row of 8 has room for one or two
    batch = pack(documents, RowShape(2, 2, 8, share_prompts=True))
    rows = batch.tokens.reshape(-1, 8)
    np.testing.assert_array_equal(rows[:3, :3], [[7, 8, 9]] * 3)
    np.testing.assert_array_equal(batch.prefix_ids.reshape(-1, 8)[2], [0, 0, 0, 1, 1, 0, 0, 0])
    assert int(batch.microbatches) == 2


groups = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=6)), min_size=1, max_size=8
)


@given(groups, st.integers(10, 30))
def test_shared_fit_overlaps_nothing_and_keeps_the_bound_of_first_fit(made, row_length):
    prefixes = [i for i, (_, completions) in enumerate(made) for _ in completions]
    shared = [prompt - 1 for prompt, completions in made for _ in completions]
    own = [length for _, completions in made for length in completions]
    taken = np.zeros((len(own), row_length), int)
    standing, end = set(), {}
    for prefix, before, length, (row, start, at) in zip(
        prefixes, shared, own, shared_fit(prefixes, shared, own, row_length), strict=True
    ):
        assert start + length <= row_length
        taken[row, start : start + length] += 1
        assert (at < 0) == (before == 0)
        if before and (row, prefix) not in standing:
            standing.add((row, prefix))
            taken[row, at : at + before] += 1
            assert at + before == start  # a family lies in one piece: nothing between prompt and completions
        elif before:
            assert end[row] == (prefix, start)
        end[row] = prefix, start + length
    assert taken.max() == 1
    assert taken.any(axis=1).sum() <= rows_needed(len(own), 10, row_length)


@pytest.mark.parametrize(("share", "own", "shared"), [(False, 7, 0), (True, 3, 4), (True, 2, 5)])
def test_a_document_that_reaches_further_than_its_rows_were_made_for_is_refused(share, own, shared):
    documents = [document(range(6), range(3))]
    assert pack(documents, RowShape(1, 1, 16, share_prompts=share, reach=Reach(own + 1, shared + 1)))
    with pytest.raises(ValueError, match=r"rows were made for Reach\(own="):
        pack(documents, RowShape(1, 1, 16, share_prompts=share, reach=Reach(own, shared)))


@given(groups)
def test_every_token_sees_what_it_sees_alone(made):
    rng = np.random.default_rng(len(made))
    documents = [
        document([100 * i + j for j in range(prompt)], rng.integers(0, 9, length))
        for i, (prompt, completions) in enumerate(made)
        for length in completions
    ]

    def seen(share):
        """For every trained target: (what is seen, in order of position), sorted over documents."""
        batch = pack(documents, RowShape(len(documents), 1, 16, share_prompts=share))
        tokens, positions, segments, targets, weights = (
            x.reshape(len(documents), 16)
            for x in (batch.tokens, batch.positions, batch.segment_ids, batch.targets, batch.token_weights)
        )
        prefixes = batch.prefix_ids.reshape(len(documents), 16) if share else None
        with jax.disable_jit():
            mask = np.asarray(document_mask(segments, prefixes))
        views = []
        for row, t in np.argwhere(weights > 0):
            keys = np.flatnonzero(mask[row, t])
            views.append((*(positions[row, keys] * 10_000 + tokens[row, keys]).tolist(), -1, int(targets[row, t])))
        return sorted(views)

    assert seen(True) == seen(False)
