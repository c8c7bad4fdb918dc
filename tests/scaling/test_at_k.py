"""Metrics at k against enumeration of all subsets, and their intervals."""

import itertools

import numpy as np
import pytest

from jaxrl_llm.scaling.at_k import maj_at_k, mean_interval, pass_at_k, worst_at_k


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_and_worst_are_means_over_all_subsets(n):
    for right in range(n + 1):
        outcomes = [1] * right + [0] * (n - right)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert pass_at_k(right, n, k) == pytest.approx(np.mean([max(s) for s in subsets]), abs=1e-12)
            assert worst_at_k(right, n, k) == pytest.approx(np.mean([min(s) for s in subsets]), abs=1e-12)


def test_large_numbers_do_not_overflow():
    assert pass_at_k(1, 10_000, 100) == pytest.approx(0.01)
    assert worst_at_k(9_999, 10_000, 5_000) == pytest.approx(0.5)


def test_majorities_worked_by_hand():
    right = [True, True, False, False, False]
    assert maj_at_k(["7", "7", "8", "9", "9"], right, 5, seed=0) == 0.5  # 7 and 9 tie
    assert maj_at_k(["7", "7", "8", "8", "8"], right, 5, seed=0) == 0.0
    assert maj_at_k(["7", "7", None, None, None], right, 5, seed=0) == 1.0  # no answer is no vote
    assert maj_at_k([None] * 5, [False] * 5, 5, seed=0) == 0.0
    assert maj_at_k(["7", "7", "7", "8", "9"], right, 5, seed=0) == pytest.approx(2 / 3)  # 7 was right twice of thrice
    assert maj_at_k(list("abcde"), right, 1, seed=0) == pytest.approx(0.4)  # one vote: avg@1
    # Of the ten pairs of {7, 7, 8, 9, 9}: one 7-7, six with one 7 (a tie), three without.
    assert maj_at_k(["7", "7", "8", "9", "9"], right, 2, seed=0) == pytest.approx((1 + 6 * 0.5) / 10)


def test_drawn_subsets_come_near_all_of_them_and_repeat():
    votes, right = ["7"] * 5 + ["8"] * 7 + ["9"] * 4, [True] * 5 + [False] * 11
    whole = maj_at_k(votes, right, 5, seed=0, draws=10_000)  # 4368 subsets: all
    drawn = maj_at_k(votes, right, 5, seed=1, draws=2_000)
    assert drawn == maj_at_k(votes, right, 5, seed=1, draws=2_000) != maj_at_k(votes, right, 5, seed=2, draws=2_000)
    assert abs(drawn - whole) < 0.05


def test_intervals_cover_the_mean():
    mean, low, high = mean_interval([0.0, 1.0] * 50, seed=0)
    assert mean == 0.5
    assert (low, high) == pytest.approx((0.4, 0.6), abs=0.02)  # 1.96 x .5 / 10
    assert mean_interval([1.0] * 7, seed=0) == (1.0, 1.0, 1.0)
    truths = np.random.default_rng(0).random((100, 40)) < 0.3
    inside = [
        low <= 0.3 <= high for _, low, high in (mean_interval(t.astype(float), seed=1, draws=300) for t in truths)
    ]
    assert 0.85 <= np.mean(inside) <= 1.0
    with pytest.raises(ValueError, match="no prompt has a value"):
        mean_interval([], seed=0)


@pytest.mark.parametrize(("right", "n", "k"), [(1, 4, 5), (5, 4, 1), (-1, 4, 1), (1, 4, 0)])
def test_what_has_no_meaning_is_refused(right, n, k):
    for metric in (pass_at_k, worst_at_k):
        with pytest.raises(ValueError, match=f"{right} right of {n} completions and k = {k}"):
            metric(right, n, k)
