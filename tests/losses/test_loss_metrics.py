"""Metrics beside the loss: by hand, before any truncation, and adding up over parts of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import metrics
from jaxrl_llm.losses.algorithms import bind_metrics

RATIOS = np.array([0.5, 1.0, 1.5, 4.0])
LOGPROBS, ZEROS, MASK = np.log(RATIOS), np.zeros(4), np.ones(4, bool)


def numbers(name, advantages, mask=MASK, **constants):
    return metrics.summarise(bind_metrics(name, **constants)(LOGPROBS, ZEROS, ZEROS, advantages, mask))


def test_clip_fractions_by_hand():
    # A < 0: .5 clipped from below, 4 by the dual clip; A > 0: 1.5 and 4 from above.
    bad = numbers("ppo", -np.ones(4), dual_clip=3.0)
    assert (bad["clip_low"], bad["clip_high"], bad["clip_dual"]) == (0.25, 0.0, 0.25)
    good = numbers("ppo", np.ones(4))
    assert (good["clip_low"], good["clip_high"], good["clip_dual"]) == (0.0, 0.5, 0.0)
    wide = numbers("ppo", np.ones(4), clip_high=0.6)
    assert wide["clip_high"] == 0.25
    cispo = numbers("cispo", np.ones(4), ratio_cap=2.0, ratio_floor=0.75)
    assert (cispo["clip_low"], cispo["clip_high"]) == (0.25, 0.25)
    assert numbers("reinforce", np.ones(4)).keys() == {"ratio_mean", "ratio_ess", "ratio_max"}


def test_gspo_clip_fraction_is_that_of_the_sequence_ratio():
    # One row: the mean log-ratio is ln(3) / 4 = .27, ratio 1.32, for all its tokens, although .5 alone is below 1.
    arrays = (LOGPROBS[None], ZEROS[None], ZEROS[None], np.ones((1, 4)), MASK[None])
    assert metrics.summarise(bind_metrics("gspo", clip_high=0.3)(*arrays))["clip_high"] == 1.0
    assert metrics.summarise(bind_metrics("gspo", clip_high=0.4)(*arrays))["clip_high"] == 0.0


def test_reported_bug_ratio_metrics_are_taken_before_truncation():
    found = numbers("cispo", np.ones(4), ratio_cap=2.0)
    assert found["ratio_max"] == pytest.approx(4.0, rel=1e-6)
    assert found["ratio_mean"] == pytest.approx(1.75, rel=1e-6)
    # (sum)^2 / (n sum of squares) = 49 / (4 * 19.5)
    assert found["ratio_ess"] == pytest.approx(49 / 78, rel=1e-6)


def test_kl_metrics_by_hand_and_masked_places_do_not_count():
    mask, logprobs = np.array([True, True, False]), np.array([-1.0, -2.0, np.nan])
    found = metrics.summarise(metrics.kl_metrics(logprobs, np.array([-1.5, -1.0, 0.0]), mask, "kl_sampler"))
    assert found["kl_sampler_k1"] == pytest.approx((0.5 - 1.0) / 2)
    assert found["kl_sampler_k3"] == pytest.approx((0.1065306597 + 0.7182818285) / 2)


def test_parts_of_a_batch_add_up_to_the_batch():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(4, 6)) * 0.5 for _ in range(3)]
    mask = rng.random((4, 6)) < 0.6
    mask[3] = False
    measure = jax.jit(bind_metrics("ppo", dual_clip=3.0))

    def of(rows):
        logprobs, old, advantages = (x[rows] for x in arrays)
        return measure(logprobs, old, old, advantages, mask[rows])

    whole = metrics.summarise(of(slice(0, 4)))
    parts = metrics.summarise(jax.jit(metrics.add)(of(slice(0, 2)), of(slice(2, 4))))
    assert parts == pytest.approx(whole, rel=1e-6)
    assert whole["ratio_max"] == pytest.approx(np.exp(arrays[0] - arrays[1])[mask].max(), rel=1e-6)
    with pytest.raises(ValueError, match=r"differ between parts of a batch: \['extra'\]"):
        metrics.add({}, {"extra": metrics.masked_mean(jnp.ones(1), jnp.ones(1, bool))})


def test_group_metrics_by_hand():
    rewards = np.array([[1.0, 0.0], [0.1, 0.1], [np.nan, 1.0], [0.0, 0.0]])
    keep = np.array([[True, True], [True, True], [False, True], [False, False]])
    truncated = np.array([[True, False], [False, False], [True, False], [True, True]])
    lengths = np.array([[8, 2], [3, 3], [99, 4], [0, 0]])
    found = metrics.summarise(metrics.group_metrics(rewards, truncated, lengths, keep))
    assert found["reward"] == pytest.approx((1.0 + 0.1 + 0.1 + 1.0) / 5)
    assert found["zero_variance"] == pytest.approx(2 / 3)
    assert found["truncation_rate"] == pytest.approx(1 / 5)
    assert found["length"] == pytest.approx(20 / 5)
    assert found["tokens"] == 20


def test_a_mean_over_nothing_is_not_a_number():
    found = numbers("ppo", np.ones(4), mask=np.zeros(4, bool))
    assert np.isnan(found["ratio_mean"])
    assert np.isnan(found["clip_high"])
    assert found["ratio_max"] == 0.0
