"""Importance corrections: worked ratios, sequence products by hand, shapes, and no gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import importance

LOG_RATIOS = np.array([-1.0, -0.2, 0.0, 0.5, 1.0, 2.0])


@pytest.mark.parametrize(("dtype", "atol"), [(np.float64, 5e-9), (np.float32, 1e-5)])
def test_worked_ratios_of_tis_and_icepop(dtype, atol):
    arrays = (LOG_RATIOS.astype(dtype), np.zeros(6, dtype), np.ones(6, bool))
    with jax.enable_x64(dtype is np.float64):
        tis, icepop, mis, flat = jax.jit(
            lambda *a: (
                importance.tis(*a, cap=2.0),
                importance.icepop(*a),
                importance.mis(*a, low=0.5, high=5.0),
                importance.mis(*a, low=0.5, high=5.0, weighted=False),
            )
        )(*arrays)
    assert tis.dtype == icepop.dtype == dtype
    np.testing.assert_allclose(tis, [0.36787944, 0.81873075, 1, 1.64872127, 2, 2], atol=atol)
    np.testing.assert_allclose(icepop, [0, 0.81873075, 1, 1.64872127, 2.71828183, 0], atol=atol)
    np.testing.assert_array_equal(mis, icepop)
    np.testing.assert_array_equal(flat, [0, 1, 1, 1, 1, 0])


def at_completions(weight_BT, batch):
    """The one weight of each completion, checked to stand at all its tokens and nowhere else."""
    weight_BT = np.asarray(weight_BT)
    assert weight_BT.shape == batch.mask.shape
    assert not weight_BT[~batch.mask].any()
    found = [weight_BT[batch.completion == i] for i in range(4)]
    assert all(np.ptp(w) < 1e-6 for w in found)
    return [w[0] for w in found]


def test_sequence_weights_by_hand(worked):
    # Products of the worked ratios: exp(.5), exp(2.25), exp(-.6), exp(.1); means .25, .5625, -.6, .0333.
    products = np.exp([0.5, 2.25, -0.6, 0.1])
    arrays = (worked.logprobs, worked.old, worked.mask)

    @jax.jit
    def everything(arrays):
        call = functools.partial(lambda f, **constants: f(*arrays, **worked.structure, **constants))
        return (
            call(importance.tis_sequence, cap=2.0),
            call(importance.seq_mis, low=0.6, high=2.0),
            call(importance.seq_mis, low=0.6, high=2.0, weighted=False),
            call(importance.geometric_rejection, low=0.9, high=1.3),
            call(importance.geometric_rejection),
        )

    capped, masked, flat, geometric, strict = (at_completions(w, worked) for w in everything(arrays))
    np.testing.assert_allclose(capped, np.minimum(products, 2.0), rtol=1e-6)
    np.testing.assert_allclose(masked, [products[0], 0, 0, products[3]], rtol=1e-6)
    assert flat == [1, 0, 0, 1]
    assert geometric == [1, 0, 0, 1]
    assert strict == [0, 0, 0, 0]


def test_off_policy_mask_drops_bad_completions_the_policy_has_left(worked):
    # anchor - logprobs has means -.25, -.5625, .6, -.0333; advantages 1, -1, 1, -1.
    call = jax.jit(functools.partial(importance.off_policy_sequence_mask, **worked.structure))
    forward = call(worked.logprobs, worked.old, worked.advantages, worked.mask, delta=0.1)
    assert at_completions(forward, worked) == [1, 1, 1, 1]  # completion 2 has drifted, but is good
    bad = call(worked.logprobs, worked.old, -worked.advantages, worked.mask, delta=0.1)
    assert at_completions(bad, worked) == [1, 1, 0, 1]
    tolerant = call(worked.logprobs, worked.old, -worked.advantages, worked.mask, delta=0.7)
    assert at_completions(tolerant, worked) == [1, 1, 1, 1]


def test_huge_ratios_stay_finite_and_a_long_sequence_is_clamped_as_a_whole():
    log_ratio = np.array([[900.0, -900.0, 15.0, 15.0]])
    arrays = (log_ratio, np.zeros((1, 4)), np.ones((1, 4), bool))
    assert importance.tis(*arrays, cap=1e30).max() == pytest.approx(np.exp(20.0), rel=1e-5)
    # 20 - 20 + 15 + 15 = 30, clamped to 20
    assert importance.tis_sequence(*arrays, cap=1e30).max() == pytest.approx(np.exp(20.0), rel=1e-5)


def test_no_gradient_passes_through_a_weight(worked):
    def total(logprobs, old):
        arrays = (old, worked.old - 0.3, worked.mask)
        weights = [importance.tis(*arrays), importance.icepop(*arrays)]
        weights += [f(*arrays, **worked.structure) for f in (importance.tis_sequence, importance.seq_mis)]
        drift = (logprobs, old, worked.advantages, worked.mask)
        weights.append(importance.off_policy_sequence_mask(*drift, delta=0.1, **worked.structure))
        return sum(jnp.sum(w) for w in weights)

    assert not any(np.any(g) for g in jax.jit(jax.grad(total, (0, 1)))(worked.logprobs, worked.old))
