"""Which tokens may be drawn, against sorting the vocabulary; nothing of it changes a log-probability."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.sampler.restrictions import Restrictions, allowed, biased
from jaxrl_llm.sampler.sampling import request_keys, sample

S, V, N = 64, 19, 4


def limits(top_k=0, top_p=1.0, min_p=0.0, banned=(), active=True, slots=S):
    def full(value, dtype):
        return jnp.full(slots, value, dtype)

    ids = np.full((slots, N), -1, np.int32)
    ids[:, : len(banned)] = banned
    narrowing = full(top_k, jnp.int32), full(top_p, jnp.float32), full(min_p, jnp.float32)
    return Restrictions(full(active, bool), *narrowing, jnp.asarray(ids), jnp.full((slots, N), -jnp.inf))


def by_sorting(scaled, top_k, top_p, min_p, banned):
    scaled = np.where(np.isin(np.arange(len(scaled)), banned), -np.inf, scaled.astype(np.float64))
    order = np.argsort(-scaled)
    order = order[np.isfinite(scaled[order])]
    if top_k:
        order = order[:top_k]
    p = np.exp(scaled[order] - scaled.max())
    p /= p.sum()
    # the fewest that hold top_p: those whose predecessors do not
    kept = order[np.concatenate([[0.0], np.cumsum(p)[:-1]]) < top_p] if top_p < 1 else order
    kept = kept[scaled[kept] >= scaled.max() + (np.log(min_p) if min_p else -np.inf)]
    return np.isin(np.arange(len(scaled)), kept)


ask = jax.jit(lambda logits, limits: allowed(biased(logits, limits), limits))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "banned"),
    [
        (0, 1.0, 0.0, ()),
        (1, 1.0, 0.0, ()),
        (5, 1.0, 0.0, ()),
        (V, 1.0, 0.0, ()),
        (10**6, 1.0, 0.0, ()),
        (0, 0.7, 0.0, ()),
        (0, 1e-6, 0.0, ()),
        (0, 0.999, 0.0, ()),
        (0, 1.0, 0.1, ()),
        (0, 1.0, 1.0, ()),
        (0, 1.0, 0.0, (0, 18, 7)),
        (6, 0.8, 0.05, (3, 4)),
        (2, 0.5, 0.9, (1,)),
    ],
)
def test_what_is_allowed_is_what_sorting_says(top_k, top_p, min_p, banned):
    logits = np.random.default_rng(top_k + len(banned)).normal(size=(S, V)).astype(np.float32) * 2
    got = np.asarray(ask(logits, limits(top_k, top_p, min_p, banned)))
    for row, mask in zip(logits, got, strict=True):
        np.testing.assert_array_equal(mask, by_sorting(row, top_k, top_p, min_p, banned))
    assert got.any(axis=1).all()


def test_ties_at_the_border_all_stay():
    logits = np.tile(np.array([1.0, 2.0, 1.0, 0.0, 1.0] + [-9.0] * (V - 5), np.float32), (S, 1))
    assert np.flatnonzero(ask(logits, limits(top_k=2))[0]).tolist() == [0, 1, 2, 4]
    assert np.flatnonzero(ask(logits, limits(top_p=0.5))[0]).tolist() == [0, 1, 2, 4]


@jax.jit
def draw(logits, temperatures, keys, restrictions):
    tokens, softmax = sample(logits, temperatures, keys, restrictions)
    return tokens, softmax.logprob(logits, tokens)


def keys_for(count):
    zeros = jnp.zeros(count, jnp.uint32)
    return request_keys(zeros, jnp.arange(count, dtype=jnp.uint32), zeros)


def test_restricted_draws_follow_the_renormalised_softmax_and_report_the_whole_one():
    # Reported of other stacks: log-probabilities renormalised over what top-p left.
    count, temperature = 20_000, 0.8
    logits = np.random.default_rng(3).normal(size=V).astype(np.float32)
    rows = jnp.broadcast_to(logits, (count, V))
    restrictions = limits(6, 0.9, 0.01, (2,), slots=count)
    tokens, logprobs = draw(rows, jnp.full(count, temperature), keys_for(count), restrictions)
    mask = by_sorting(logits / temperature, 6, 0.9, 0.01, (2,))
    whole = np.exp(logits.astype(np.float64) / temperature)
    whole /= whole.sum()
    counts = np.bincount(tokens, minlength=V)
    assert counts[~mask].sum() == 0
    assert 2 <= mask.sum() < V
    assert stats.chisquare(counts[mask], count * whole[mask] / whole[mask].sum()).pvalue > 1e-3
    np.testing.assert_allclose(logprobs, np.log(whole)[tokens], atol=2e-6)


def test_greedy_takes_the_likeliest_that_is_left():
    logits = np.random.default_rng(4).normal(size=(S, V)).astype(np.float32)
    best = np.argsort(-logits, axis=1)
    ids = np.full((S, N), -1, np.int32)
    ids[:, 0] = best[:, 0]
    tokens, _ = draw(logits, jnp.zeros(S), keys_for(S), limits().replace(biased=jnp.asarray(ids)))
    np.testing.assert_array_equal(tokens, best[:, 1])


def test_a_slot_without_restrictions_draws_what_it_draws_alone():
    logits = np.random.default_rng(5).normal(size=(S, V)).astype(np.float32)
    temperatures = jnp.full(S, 1.3)
    alone = draw(logits, temperatures, keys_for(S), limits(active=False, top_k=1))
    half = limits(top_k=1).replace(active=jnp.arange(S) % 2 == 0)
    beside = draw(logits, temperatures, keys_for(S), half)
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[1::2], np.asarray(b)[1::2])
    assert (np.asarray(alone[0]) != np.asarray(beside[0]))[::2].any()


def test_what_a_ban_leaves_is_drawn_however_unlikely_it_was():
    # At temperature .01 a banned favourite is e^200 times as likely as all the others together.
    logits = np.full((S, V), -5.0, np.float32)
    logits[:, [9, 8, V - 1]] = 2.0, 1.0, 4.0
    for temperature in (0.01, 1e-6):
        tokens, logprobs = draw(logits, jnp.full(S, temperature), keys_for(S), limits(banned=(V - 1,)))
        assert set(np.asarray(tokens).tolist()) == {9}
        np.testing.assert_allclose(logprobs, -2 / np.float32(temperature), rtol=1e-5)


def test_biased_draws_follow_the_biased_softmax_and_report_the_policy_s():
    count, temperature, bias = 20_000, 0.8, {1: 1.5, 4: -2.0, 7: -np.inf}
    logits = np.random.default_rng(6).normal(size=V).astype(np.float32)
    ids, biases = np.full((count, N), -1, np.int32), np.zeros((count, N), np.float32)
    ids[:, :3], biases[:, :3] = list(bias), list(bias.values())
    restrictions = limits(slots=count).replace(biased=jnp.asarray(ids), biases=jnp.asarray(biases))
    tokens, logprobs = draw(
        jnp.broadcast_to(logits, (count, V)), jnp.full(count, temperature), keys_for(count), restrictions
    )
    pushed = logits.astype(np.float64)
    pushed[list(bias)] += list(bias.values())
    drawn, whole = (
        np.exp(x / temperature) / np.exp(x / temperature).sum() for x in (pushed, logits.astype(np.float64))
    )
    counts = np.bincount(tokens, minlength=V)
    assert counts[7] == 0
    assert stats.chisquare(np.delete(counts, 7), count * np.delete(drawn, 7)).pvalue > 1e-3
    np.testing.assert_allclose(logprobs, np.log(whole)[tokens], atol=2e-6)


def test_a_bias_of_100_chooses_its_token():
    logits = np.random.default_rng(8).normal(size=(S, V)).astype(np.float32)
    ids, biases = np.full((S, N), -1, np.int32), np.zeros((S, N), np.float32)
    ids[:, 0], biases[:, 0] = 5, 100.0
    tokens, logprobs = draw(
        logits,
        jnp.full(S, 0.1),
        keys_for(S),
        limits().replace(biased=jnp.asarray(ids), biases=jnp.asarray(biases)),
    )
    assert set(np.asarray(tokens).tolist()) == {5}
    assert np.isfinite(logprobs).all()
