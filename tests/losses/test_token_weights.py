"""Aggregation weights against the definitions, term by term, and the completions that must leave them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.losses.aggregate import completion_weights

LENGTHS, PROMPTS, ALL = np.array([2, 4, 1, 3]), np.array([7, 7, 3, 3]), np.ones(4, bool)


@pytest.mark.parametrize(
    ("kind", "denominators"),
    [
        ("token", [10, 10, 10, 10]),
        ("sample", [8, 16, 4, 12]),
        ("prompt", [12, 12, 8, 8]),
        ("constant", [64, 64, 64, 64]),
        ("sequence_sum", [4, 4, 4, 4]),
    ],
)
def test_weights_by_hand(kind, denominators):
    max_tokens = 16 if kind == "constant" else None
    found = completion_weights(LENGTHS, PROMPTS, ALL, kind=kind, max_tokens=max_tokens)
    np.testing.assert_allclose(found, 1 / np.array(denominators), rtol=1e-15)


batches = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=8)
kinds = st.sampled_from(["token", "sample", "prompt", "constant", "sequence_sum"])


@given(batches, kinds)
def test_a_batch_with_dropped_completions_weighs_like_the_batch_without_them(rows, kind):
    lengths, prompts, keep = map(np.array, zip(*rows, strict=True))
    max_tokens = 16 if kind == "constant" else None
    found = completion_weights(np.where(keep, lengths, 0), prompts, keep, kind=kind, max_tokens=max_tokens)
    assert not found[~keep].any()
    if keep.any():
        only = completion_weights(lengths[keep], prompts[keep], keep[keep], kind=kind, max_tokens=max_tokens)
        np.testing.assert_array_equal(found[keep], only)
    if kind in ("token", "sample", "prompt") and keep.any():
        np.testing.assert_allclose((found * lengths).sum(), 1.0, rtol=1e-12)  # each is an average


@given(batches, kinds, st.randoms())
def test_order_of_completions_is_nothing(rows, kind, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    max_tokens = 16 if kind == "constant" else None
    lengths, prompts, keep = map(np.array, zip(*rows, strict=True))
    found = completion_weights(lengths[order], prompts[order], keep[order], kind=kind, max_tokens=max_tokens)
    whole = completion_weights(lengths, prompts, keep, kind=kind, max_tokens=max_tokens)
    np.testing.assert_allclose(found, whole[order], rtol=1e-15)


def test_nothing_kept_is_all_zeros():
    assert not completion_weights(LENGTHS, PROMPTS, ~ALL, kind="prompt").any()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"kind": "mean"}, "'mean' is unknown"),
        ({"kind": "constant"}, "max_tokens is None"),
        ({"kind": "constant", "max_tokens": 0}, "max_tokens is 0"),
        ({"kind": "token", "max_tokens": 16}, "only 'constant'"),
    ],
)
def test_refusals(keywords, message):
    with pytest.raises(ValueError, match=message):
        completion_weights(LENGTHS, PROMPTS, ALL, **keywords)


def test_a_kept_completion_without_a_token_is_refused():
    with pytest.raises(ValueError, match="completion 2 is kept"):
        completion_weights(np.array([2, 4, 0, 3]), PROMPTS, ALL, kind="token")
