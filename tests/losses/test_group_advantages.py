"""Advantages from [P, G] rewards: the worked numbers, and what must not depend on anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.losses.advantages import centre, leave_one_out, normalise, uncentred, zero_variance

REWARDS = np.array([[1.0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
ALL = np.ones((3, 4), bool)
VARIED = ALL & np.array([[True], [True], [False]])
CENTRED = np.array([[0.5, 0.5, -0.5, -0.5], [0.75, -0.25, -0.25, -0.25], [0, 0, 0, 0]])

# Tenths are not dyadic, so their means round.
rewards_PG = st.lists(st.lists(st.integers(-20, 20), min_size=4, max_size=4), min_size=3, max_size=3).map(
    lambda rows: np.array(rows) / 10
)
keeps_PG = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=3, max_size=3).map(
    lambda rows: np.array(rows, bool)
)
KINDS = ["none", "prompt_std", "batch_std", "global"]


def test_worked_leave_one_out():
    expected = [[2 / 3, 2 / 3, -2 / 3, -2 / 3], [1, -1 / 3, -1 / 3, -1 / 3], [0, 0, 0, 0]]
    np.testing.assert_allclose(leave_one_out(REWARDS), expected, atol=1e-15)


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-9), (np.float32, 1e-5)])
def test_worked_batch_std(dtype, rtol):
    """The deviation of all twelve and of the two groups that vary, with 0 and 1 taken off the count, read back from
    the first advantage, .5."""
    worked = {(True, 0): 0.3818813079, (True, 1): 0.3988620176, (False, 0): 0.4677071733, (False, 1): 0.5}
    for (every, ddof), std in worked.items():
        keep = ALL if every else VARIED
        with jax.enable_x64(dtype is np.float64):
            for arrays in ((REWARDS.astype(dtype), keep), (jnp.asarray(REWARDS, dtype), jnp.asarray(keep))):
                found = normalise(centre(*arrays), arrays[1], kind="batch_std", ddof=ddof, eps=0.0)
                np.testing.assert_allclose(0.5 / found[0, 0], std, rtol=rtol)
                expected = np.where(keep, CENTRED, 0.0) / std
                np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-15)


def test_batch_std_takes_no_degree_of_freedom_off_unless_asked():
    scaled = CENTRED / (0.46770717334674267 + 1e-6)
    np.testing.assert_allclose(normalise(centre(REWARDS), VARIED, kind="batch_std"), scaled, rtol=1e-12)


def test_worked_prompt_std_takes_one_degree_of_freedom_off():
    # Rows: sqrt(1/3) and sqrt((.5625 + 3 * .0625) / 3) = .5.
    expected = CENTRED / (np.array([[np.sqrt(1 / 3)], [0.5], [0.0]]) + 1e-6)
    np.testing.assert_allclose(normalise(centre(REWARDS), kind="prompt_std"), expected, rtol=1e-12)
    population = CENTRED / (np.array([[0.5], [np.sqrt(0.75 / 4)], [0.0]]) + 1e-6)
    np.testing.assert_allclose(normalise(centre(REWARDS), kind="prompt_std", ddof=0), population, rtol=1e-12)


def test_global_centres_and_scales_over_the_batch():
    raw = np.array([[1.0, 0.0], [3.0, 0.0]])  # mean 1, variance (0 + 1 + 4 + 1) / 4
    expected = (raw - 1.0) / (np.sqrt(1.5) + 1e-6)
    np.testing.assert_allclose(normalise(uncentred(raw), kind="global"), expected, rtol=1e-12)


def test_batch_std_does_not_shift():
    # The mean of these is not 0; a shift would turn the sign of the small ones.
    raw = np.array([[0.1, 0.1], [3.0, 3.0]])
    assert (normalise(raw, kind="batch_std") > 0).all()
    assert (normalise(raw, kind="global")[0] < 0).all()


def test_unknown_normalisation_is_refused():
    with pytest.raises(ValueError, match="'batch' is unknown"):
        normalise(CENTRED, kind="batch")


@given(rewards_PG, st.integers(-30, 30).map(lambda n: n / 10))
def test_adding_a_constant_to_a_group_changes_nothing(rewards, constant):
    moved = rewards + np.array([[0.0], [constant], [0.0]])
    keep_PG = np.ones((3, 4), bool) & ~zero_variance(rewards)[:, None]
    for baseline in (centre, leave_one_out):
        for kind in KINDS:
            found = normalise(baseline(moved), keep_PG, kind=kind)
            np.testing.assert_allclose(found, normalise(baseline(rewards), keep_PG, kind=kind), atol=1e-8)


@given(st.integers(-1000, 1000).map(lambda n: n / 10), st.sampled_from([np.float32, np.float64]))
def test_equal_rewards_give_exactly_zero(reward, dtype):
    rewards = np.full((2, 3), reward, dtype)
    rewards[1] = [0.0, 1.0, 0.0]
    assert zero_variance(rewards).tolist() == [True, False]
    for baseline in (centre, leave_one_out):
        for kind in ("none", "prompt_std", "batch_std"):
            assert not normalise(baseline(rewards), kind=kind)[0].any()


def test_rewards_that_differ_in_the_last_bit_are_a_signal():
    rewards = np.array([[0.1, np.nextafter(0.1, 1.0)], [0.1, 0.1]])
    assert zero_variance(rewards).tolist() == [False, True]


@given(rewards_PG, keeps_PG)
def test_dropped_siblings_are_not_read(rewards, keep):
    dirty = np.where(keep, rewards, np.nan)
    short = [row[k] for row, k in zip(rewards, keep, strict=True)]
    np.testing.assert_array_equal(zero_variance(dirty, keep), [len(set(row)) < 2 for row in short])
    for baseline in (centre, leave_one_out):
        found = baseline(dirty, keep)
        assert not found[~keep].any()
        for row, k, kept in zip(found, keep, short, strict=True):
            if len(kept):
                np.testing.assert_allclose(row[k], baseline(kept[None])[0], atol=1e-12)
        for kind in KINDS:
            scaled = normalise(np.where(keep, found, np.inf), keep, kind=kind)
            assert np.isfinite(scaled).all()
            assert not scaled[~keep].any()
    np.testing.assert_array_equal(uncentred(dirty, keep), np.where(keep, rewards, 0.0))


def test_jax_gives_what_numpy_gives():
    keep = np.array([[True] * 4, [True, True, False, True], [True] * 4])

    def everything(rewards, keep):
        found = [zero_variance(rewards, keep), uncentred(rewards, keep)]
        for baseline in (centre, leave_one_out):
            found += [normalise(baseline(rewards, keep), keep, kind=kind) for kind in KINDS]
        return found

    with jax.enable_x64(True):
        traced = jax.jit(everything)(jnp.asarray(REWARDS), jnp.asarray(keep))
    for got, wanted in zip(traced, everything(REWARDS, keep), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-15)
        assert got.dtype == wanted.dtype


def test_a_lone_sibling_has_no_advantage():
    assert leave_one_out(np.array([[0.3]])).tolist() == [[0.0]]
    assert normalise(centre(np.array([[0.3]])), kind="prompt_std").tolist() == [[0.0]]
