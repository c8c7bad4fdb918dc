"""IsoCompute: published values, record-breaking points, the frontier and what is read from it."""

import numpy as np
import pytest

from jaxrl_llm.scaling import isocompute
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.data import prepare
from jaxrl_llm.scaling.fit import fit_many
from jaxrl_llm.scaling.laws import sigmoid
from jaxrl_llm.scaling.table import LAWS
from jaxrl_llm.types import UserError

EASY = isocompute.PUBLISHED["rollouts"]


def test_published_values():
    C = 10.0 ** np.array([4.5, 5.0, 5.5, 6.0, 6.5])
    by_hand = [2.73 + 6.09 / (1 + np.exp(-4.75 * (c - 5.84))) for c in (4.5, 5.0, 5.5, 6.0, 6.5)]
    value = isocompute.log2_rollouts(C, *EASY)
    np.testing.assert_allclose(value, by_hand, rtol=0, atol=1e-9)
    np.testing.assert_allclose(value, [2.7405, 2.8406, 3.7403, 6.8794, 8.5661], rtol=0, atol=5e-5)
    assert isocompute.PUBLISHED["tokens"] == (6.62, 3.47, 9.18, 2.64)


def test_middle_limits_and_inverse():
    assert isocompute.log2_rollouts(10**5.84, *EASY) == pytest.approx(2.73 + 6.09 / 2, abs=1e-9)
    # It saturates at 2^(6.09 + 2.73), about 450: the grid's 512.
    assert isocompute.nearest_power_of_two(EASY.L + EASY.b) == isocompute.SATURATION["easy"]
    C = np.geomspace(1e5, 1e7, 5)
    np.testing.assert_allclose(isocompute.budget_of_rollouts(isocompute.log2_rollouts(C, *EASY), *EASY), C, rtol=1e-9)
    assert np.isnan(isocompute.budget_of_rollouts(np.array([2.73, 9.0]), *EASY)).all()


def test_budget_is_prompts_times_rollouts_times_steps():
    assert isocompute.steps(32 * 512 * 100, 32, 512) == 100
    assert (isocompute.PROMPTS_GRID[0], isocompute.PROMPTS_GRID[-1]) == (32, 1024)
    assert (isocompute.ROLLOUTS_GRID[0], isocompute.ROLLOUTS_GRID[-1]) == (8, 2048)


def test_records_exceed_every_earlier_bucket():
    reward = np.array([0.10, 0.19, 0.20, 0.15, 0.29, 0.31, 0.30, 0.55, 0.41])
    # buckets of .1:      1     1     2     1     2     3     3     5     4
    assert isocompute.bucketed(reward, 0.1).tolist() == [1, 1, 2, 1, 2, 3, 3, 5, 4]
    expected = [True, False, True, False, False, True, False, True, False]
    assert isocompute.record_points(reward, 0.1).tolist() == expected
    assert isocompute.record_points(np.array([]), 0.1).tolist() == []
    with pytest.raises(UserError, match="bucket of width 0"):
        isocompute.record_points(reward, 0.0)


def sweep(C: np.ndarray) -> dict[int, np.ndarray]:
    """Few rollouts rise early and end low, many rise late and end high."""
    return {n: sigmoid(C, A, 1.8, mid, 0.1) for n, A, mid in ((8, 0.5, 2e4), (64, 0.65, 1e5), (512, 0.8, 1e6))}


def test_frontier_of_fitted_records_is_the_envelope_and_its_argmax():
    C = np.geomspace(3e3, 2e7, 60)
    runs = sweep(C)
    sets = []
    for reward in runs.values():
        kept = isocompute.record_points(reward, 0.005)
        sets.append(prepare(LAWS["sigmoid"], Curve(C[kept], reward[kept])))
    fits = dict(zip(runs, fit_many("sigmoid", sets), strict=True))
    budgets = np.array([1e4, 2e5, 1e7])
    found = isocompute.frontier(budgets, {n: fit.predict for n, fit in fits.items()})
    truth = np.stack(list(sweep(budgets).values()))
    np.testing.assert_allclose(found.reward, truth.max(axis=0), rtol=1e-6)
    assert found.rollouts.tolist() == [8, 64, 512]


def test_a_curve_counts_only_where_it_has_points_and_ties_go_to_fewer_rollouts():
    flat = {16: lambda C: np.full(len(C), 0.5), 8: lambda C: np.full(len(C), 0.5), 32: lambda C: np.full(len(C), 0.9)}
    reach = {8: (1.0, 10.0), 16: (1.0, 10.0), 32: (5.0, 10.0)}
    assert isocompute.frontier(np.array([2.0, 6.0]), flat, reach).rollouts.tolist() == [8, 32]
    with pytest.raises(UserError, match="no run reaches budget 20"):
        isocompute.frontier(np.array([2.0, 20.0]), flat, reach)


def test_smallest_stable_number_of_prompts():
    rewards = {32: 0.70, 64: 0.745, 128: 0.75, 256: 0.755}
    everywhere = dict.fromkeys(rewards, True)
    assert isocompute.smallest_sufficient_prompts(rewards, everywhere, margin=0.02) == 64
    assert isocompute.smallest_sufficient_prompts(rewards, everywhere, margin=0.0) == 256
    # What collapsed neither wins nor sets the mark.
    assert isocompute.smallest_sufficient_prompts(rewards, {**everywhere, 64: False, 256: False}, margin=0.02) == 128
    with pytest.raises(UserError, match="none of B_p = 32, 64, 128, 256 was stable"):
        isocompute.smallest_sufficient_prompts(rewards, dict.fromkeys(rewards, False), margin=0.02)
