"""What n completions of every prompt say about k: avg@k, pass@k, best@k, worst@k and maj@k, with bootstrap intervals.

Plain numbers of one prompt at a time; a metric of a set of prompts is the mean over them, and its interval comes from
drawing prompts with replacement.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def pass_at_k(right: int, n: int, k: int) -> float:
    """Probability that at least one of k completions drawn from the n without replacement is right: the unbiased
    estimator 1 - C(n - right, k) / C(n, k) of arXiv:2107.03374.

    For answers that are right or wrong this is best@k too. Raises ValueError unless 0 <= right <= n and 0 < k <= n.
    """
    _check(right, n, k)
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def worst_at_k(right: int, n: int, k: int) -> float:
    """Probability that all of k completions drawn from the n are right: C(right, k) / C(n, k), unbiased.

    Raises ValueError as `pass_at_k` does.
    """
    _check(right, n, k)
    return math.comb(right, k) / math.comb(n, k)


def maj_at_k(votes: Sequence[Hashable | None], right: Sequence[bool], k: int, *, seed: int, draws: int = 200) -> float:
    """Probability that the most frequent answer of k of the n completions is right (arXiv:2203.11171).

    A vote of None is no answer and does not count; where nobody answers, nothing is right. Answers that are equally
    frequent share the decision, and an answer is as right as the share of its completions that are. The mean over all
    subsets of k where there are at most `draws`, else over so many seeded ones.
    """
    n = len(votes)
    _check(sum(right), n, k)
    if math.comb(n, k) <= draws:
        subsets = list(itertools.combinations(range(n), k))
    else:
        generator = np.random.default_rng([seed, n, k])
        subsets = [generator.permutation(n)[:k] for _ in range(draws)]
    return float(np.mean([_majority([votes[i] for i in s], [right[i] for i in s]) for s in subsets]))


def _majority(votes: Sequence[Hashable | None], right: Sequence[bool]) -> float:
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [vote for vote, count in counts.items() if count == most]
    shares = [
        np.mean([float(ok) for vote, ok in zip(votes, right, strict=True) if vote == winner]) for winner in winners
    ]
    return float(np.mean(shares))


def mean_interval(values: Sequence[float], *, seed: int, draws: int = 2000) -> tuple[float, float, float]:
    """(mean, low, high): the mean over prompts and its 95 % percentile interval over `draws` bootstrap resamples.

    Raises ValueError for no values.
    """
    if not len(values):
        raise ValueError("no prompt has a value: there is no mean")
    array = np.asarray(values, float)
    places = np.random.default_rng([seed, len(array)]).integers(len(array), size=(draws, len(array)))
    low, high = np.quantile(array[places].mean(axis=1), [0.025, 0.975])
    return float(array.mean()), float(low), float(high)


def _check(right: int, n: int, k: int) -> None:
    if not 0 <= right <= n or not 0 < k <= n:
        raise ValueError(f"{right} right of {n} completions and k = {k}: 0 <= right <= n and 0 < k <= n is needed")
