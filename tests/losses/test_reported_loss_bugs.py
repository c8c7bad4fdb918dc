"""Loss-level bugs reported of other stacks, each named after what went wrong.

Elsewhere in this folder: k1/k3 gradients (test_kl_and_entropy), the ratio metric after truncation (test_loss_metrics),
the CISPO cap read as 1 + eps and corrections of the wrong shape (test_algorithm_table).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import advantages, kl
from jaxrl_llm.losses.aggregate import completion_weights
from jaxrl_llm.losses.algorithms import bind, bind_importance, check_composition
from jaxrl_llm.losses.logprobs import project_f32, token_logprobs
from jaxrl_llm.types import UserError

LENGTHS = np.arange(1, 17)
PROMPTS = np.arange(16) // 4


def padded(seed=0, width=16):
    """Sixteen completions of lengths 1..16, one per row."""
    rng = np.random.default_rng(seed)
    mask = np.arange(width) < LENGTHS[:, None]
    logprobs = np.where(mask, rng.normal(size=(16, width)) * 0.3 - 1.0, 0.0).astype(np.float32)
    behavior = (logprobs + rng.normal(size=(16, width)) * 0.2).astype(np.float32)
    a = np.where(mask, rng.normal(size=(16, 1)), 0.0).astype(np.float32)
    return logprobs, behavior, a, mask


@functools.partial(jax.jit, static_argnums=0)
def loss_of(objective, weights_N, logprobs, behavior, a, mask):
    j = objective(logprobs, behavior, behavior, a, mask)
    return -jnp.sum(jnp.asarray(weights_N, jnp.float32)[:, None] * j)


CISPO, PPO = bind("cispo", ratio_cap=5.0), bind("ppo")
RATIO_OBJECTIVES = [bind("ppo", dual_clip=3.0), PPO, bind("gspo"), bind("gspo_token"), CISPO]


@pytest.mark.parametrize("keep_all", [True, False])
@pytest.mark.parametrize("order", ["short first", "long first"])
def test_token_mean_per_microbatch(order, keep_all):
    """Under accumulation a mean of microbatch means lets short rows count more. Lengths 1..16, some rows masked."""
    logprobs, behavior, a, mask = padded()
    keep = np.ones(16, bool) if keep_all else np.arange(16) % 3 != 0
    rows = np.arange(16) if order == "short first" else np.arange(15, -1, -1)
    weights = completion_weights(LENGTHS, PROMPTS, keep, kind="token")
    weight = np.minimum(np.exp(logprobs - behavior), 5.0)
    reference = -(weight * a * logprobs)[mask & keep[:, None]].sum() / LENGTHS[keep].sum()
    arrays = [x[rows] for x in (weights, logprobs, behavior, a, mask & keep[:, None])]
    total = sum(loss_of(CISPO, *(x[i : i + 4] for x in arrays)) for i in range(0, 16, 4))
    np.testing.assert_allclose(total, reference, rtol=1e-5)
    if keep_all:  # the reported way gives something else on these numbers
        terms = (weight * a * logprobs)[rows]
        means = [terms[i : i + 4][mask[rows][i : i + 4]].mean() for i in range(0, 16, 4)]
        assert abs(-np.mean(means) - reference) > 0.01


def test_global_loss_divided_again_by_the_number_of_microbatches():
    """Weights already sum to 1 over the batch; a constant objective must give exactly that constant, however split."""
    for kind in ("token", "sample", "prompt"):
        weights = completion_weights(LENGTHS, PROMPTS, np.ones(16, bool), kind=kind)
        halves = [(weights * LENGTHS)[i : i + 8].sum() for i in (0, 8)]
        assert sum(halves) == pytest.approx(1.0, rel=1e-12)


def test_dr_grpo_divisor_is_the_constant_and_not_the_padded_length():
    weights = completion_weights(LENGTHS, PROMPTS, np.ones(16, bool), kind="constant", max_tokens=100)
    narrow = loss_of(PPO, weights, *padded())
    wide = loss_of(PPO, weights, *(np.pad(x, [(0, 0), (0, 48)]) for x in padded()))
    np.testing.assert_allclose(narrow, wide, rtol=1e-6)
    np.testing.assert_allclose(weights, 1 / 1600)


def test_masked_truncated_tokens_left_in_the_denominator():
    keep = LENGTHS < 16  # the longest was cut off
    for kind in ("token", "sample", "prompt"):
        weights = completion_weights(LENGTHS, PROMPTS, keep, kind=kind)
        assert (weights * LENGTHS).sum() == pytest.approx(1.0, rel=1e-12)
        assert weights[15] == 0.0


def test_temperature_applied_on_one_side_only():
    """Equal weights, T in {.5, 1, 2}: the sampler's log-probabilities and the trainer's give ratio 1 within 1e-5."""
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(6, 8)).astype(np.float32), rng.normal(size=(11, 8)).astype(np.float32)
    targets = rng.integers(0, 11, 6).astype(np.int32)

    @jax.jit
    def both(temperature):
        sampler = jax.nn.log_softmax(project_f32(hidden, head) / temperature)
        trainer, _ = token_logprobs(hidden, head, targets, temperature=temperature, chunk=4)
        return jnp.exp(trainer - sampler[jnp.arange(6), targets]), trainer

    seen = []
    for temperature in (0.5, 1.0, 2.0):
        ratio, logprobs = both(temperature)
        np.testing.assert_allclose(ratio, 1.0, atol=1e-5)
        seen.append(logprobs)
    assert np.abs(seen[0] - seen[2]).max() > 0.5


def test_renormalised_logprobs_against_a_full_vocabulary_trainer_are_refused():
    """Vocabulary of 8, top_p .8: at equal weights the ratio would be the kept mass and not 1."""
    with pytest.raises(UserError, match="renormalised after top-p"):
        check_composition(objective="cispo", aggregation="prompt", baseline="group_mean", renormalised_logprobs=True)
    check_composition(objective="ppo", aggregation="token", baseline="group_mean", renormalised_logprobs=True)


def test_gspo_term_broadcast_against_the_mask_weights_by_length():
    """Two sequences of lengths 1 and 9, same s, A = +1 and -1: the sequence average is 0, a length weighting is not."""
    mask = np.arange(9) < np.array([[1], [9]])
    logprobs, old = np.where(mask, -0.9999, 0.0), np.where(mask, -1.0, 0.0)
    a = np.where(mask, [[1.0], [-1.0]], 0.0)
    j = np.asarray(jax.jit(bind("gspo"))(logprobs, old, old, a, mask))
    assert j.shape == mask.shape
    weights = completion_weights(np.array([1, 9]), np.array([0, 0]), np.ones(2, bool), kind="sample")
    assert abs(float((weights[:, None] * j).sum())) < 1e-6
    token = completion_weights(np.array([1, 9]), np.array([0, 0]), np.ones(2, bool), kind="token")
    assert float((token[:, None] * j).sum()) < -0.7
    with pytest.raises(UserError, match="would weight it by length"):
        check_composition(objective="gspo", aggregation="token", baseline="group_mean")


def test_cispo_without_logp_has_no_gradient():
    logprobs, behavior, a, mask = padded()
    slopes = jax.jit(jax.grad(lambda x: CISPO(x, behavior, None, a, mask).sum()))(logprobs)
    assert (np.abs(np.asarray(slopes)[mask]) > 0).all()


def test_cispo_anchored_on_recomputed_logprobs_is_inert_when_asynchronous():
    """The cap must see the sampler's staleness: one update per batch, sampler 2 nats behind, cap 5."""
    logprobs, mask, a = np.full((1, 4), -1.0), np.ones((1, 4), bool), np.ones((1, 4))
    stale = logprobs - 2.0
    recomputed = bind("cispo", ratio_cap=5.0, anchor="old")
    slopes, inert = jax.jit(
        lambda x: [jax.grad(lambda x, f=f: f(x, stale, None, a, mask).sum())(x) for f in (CISPO, recomputed)]
    )(logprobs)
    np.testing.assert_allclose(slopes, 5.0, rtol=1e-6)
    np.testing.assert_allclose(inert, 1.0, rtol=1e-6)


def test_equal_non_dyadic_rewards_leave_a_residue_that_normalisation_blows_up():
    rewards = np.array([[0.1, 0.1, 0.1], [0.7, 0.7, 0.7]])
    assert (rewards - rewards.mean(axis=1, keepdims=True)).any()  # the residue is real
    for kind in ("none", "prompt_std", "batch_std", "global"):
        assert not advantages.normalise(advantages.centre(rewards), kind=kind, eps=1e-30).any()


def test_zero_variance_groups_receive_kl_or_stay_in_denominators():
    """A batch with an all-correct prompt has the loss, KL term included, of the batch without that prompt."""
    logprobs, behavior, a, mask = padded()
    rewards = np.array([[1.0, 0, 0, 1], [0.1, 0.1, 0.1, 0.1], [0, 1, 0, 0], [1, 1, 0, 1]])
    keep = np.repeat(~advantages.zero_variance(rewards), 4)
    assert keep.sum() == 12
    weights = completion_weights(LENGTHS, PROMPTS, keep, kind="prompt")

    def loss(rows, weights):
        x = [v[rows] for v in (logprobs, behavior, behavior, a, mask)]
        j = np.asarray(CISPO(*x)) - 0.5 * np.asarray(kl.k3(x[0], x[1] - 0.3, x[4]))
        return -(weights[:, None] * j).sum()

    without = completion_weights(LENGTHS[keep], PROMPTS[keep], keep[keep], kind="prompt")
    assert loss(np.arange(16), weights) == pytest.approx(loss(np.flatnonzero(keep), without), rel=1e-6)
    everything = completion_weights(LENGTHS, PROMPTS, np.ones(16, bool), kind="prompt")
    assert abs(loss(np.arange(16), everything) - loss(np.arange(16), weights)) > 1e-2


def test_advantages_normalised_twice_are_refused():
    with pytest.raises(UserError, match="normalised by prompt_std and then batch_std"):
        check_composition(
            objective="cispo",
            aggregation="prompt",
            baseline="group_mean",
            normalisations=["prompt_std", "batch_std"],
        )


def test_token_mean_within_the_group_confused_with_that_within_the_batch():
    """Prompt 0 has 2 tokens, prompt 1 has 8. J = 1 on prompt 0 only: its share is 1/2 by prompt, 2/10 by token."""
    lengths, prompts, keep = np.array([1, 1, 4, 4]), np.array([0, 0, 1, 1]), np.ones(4, bool)
    shares = {}
    for kind in ("prompt", "token", "sample"):
        shares[kind] = (completion_weights(lengths, prompts, keep, kind=kind) * lengths)[:2].sum()
    assert shares == pytest.approx({"prompt": 0.5, "token": 0.2, "sample": 0.5})
    # and inside a prompt, by length for prompt average, by completion for sample average
    uneven = np.array([1, 3])
    found = [completion_weights(uneven, np.zeros(2), np.ones(2, bool), kind=k) * uneven for k in ("prompt", "sample")]
    np.testing.assert_allclose(found, [[0.25, 0.75], [0.5, 0.5]])


def test_nan_gradients_from_masked_positions():
    """Mask multiplied after exp: 0 * inf. A fully masked row and log-ratio 1e4 at masked places."""
    logprobs, behavior, a, mask = padded()
    mask[3] = False
    wild = np.where(mask, logprobs, behavior + 1e4).astype(np.float32)
    for name, constants in (
        ("ppo", {"dual_clip": 3.0}),
        ("gspo", {}),
        ("gspo_token", {}),
        ("cispo", {"ratio_cap": 5.0}),
    ):
        objective = bind(name, **constants)
        slope = jax.jit(jax.grad(lambda x, f=objective: f(x, behavior, behavior, a, mask).sum()))
        found = slope(wild)
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, slope(logprobs))


def test_nan_gradients_from_a_huge_ratio_at_a_trained_token():
    """The clipped branch must not send 0 * inf back: log-ratio 1e4, both signs of the advantage."""
    logprobs, zeros, mask = np.array([[1e4, 1e4, -1e4, -1e4]]), np.zeros((1, 4)), np.ones((1, 4), bool)
    a = np.array([[1.0, -1.0, 1.0, -1.0]])
    tis = bind_importance("tis")

    def weighted(x):
        arrays = (x, zeros, zeros, a, mask)
        return sum(jnp.sum(f(*arrays) * tis(*arrays) - kl.k3(x, zeros, mask)) for f in RATIO_OBJECTIVES)

    value, slope = jax.jit(jax.value_and_grad(weighted))(logprobs)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()


def test_deterministic_sampling_clones_the_group():
    """Greedy with G > 1: identical completions, identical rewards, advantages exactly 0 whatever the baseline."""
    rewards = np.full((1, 8), 0.3)
    for baseline in (advantages.centre, advantages.leave_one_out):
        assert not advantages.normalise(baseline(rewards), kind="batch_std").any()
    keep = np.repeat(~advantages.zero_variance(rewards), 8)
    assert not completion_weights(np.full(8, 5), np.zeros(8, int), keep, kind="prompt").any()
