import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.sampler.sampling import _first_above, _pick, request_keys, sample, token_keys

DRAWS = 20_000


def keys_for(count, *, seed=0):
    seeds = jnp.full(count, seed, jnp.uint32)
    return request_keys(seeds, jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.uint32))


@jax.jit
def draw(logits, temperatures, keys):
    tokens, softmax = sample(logits, temperatures, keys)
    return tokens, softmax.logprob(logits, tokens)


def softmax(logits, temperature):
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    # 19 tokens: blocks of 8, the last one padded. Expected counts below 5 are pooled for the chi-square law.
    logits = np.random.default_rng(0).normal(size=19).astype(np.float32) * 1.5
    logits[[3, 18]] = -np.inf
    batch = jnp.broadcast_to(logits, (DRAWS, 19))
    tokens, _ = draw(batch, jnp.full(DRAWS, temperature), keys_for(DRAWS))
    counts = np.bincount(tokens, minlength=19)
    assert counts[3] == counts[18] == 0

    def p_value(probabilities):
        expected = DRAWS * probabilities
        large = expected >= 5
        observed = np.append(counts[large], counts[~large].sum())
        wanted = np.append(expected[large], expected[~large].sum())
        keep = wanted > 0
        return stats.chisquare(observed[keep], wanted[keep] * observed.sum() / wanted.sum()).pvalue

    assert p_value(softmax(logits, temperature)) > 1e-3
    assert p_value(softmax(logits, temperature * 1.1)) < 1e-3  # the test can tell


def test_draws_at_a_real_vocabulary_follow_the_softmax_of_ranges():
    # 1000 tokens over 32 blocks, with a peak: the mass of ranges that cut across blocks.
    logits = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    logits[517] = 6.0
    rows = jnp.broadcast_to(logits, (2000, 1000))
    tokens, _ = draw(rows, jnp.ones(2000), keys_for(2000, seed=7))
    edges = [0, 100, 333, 517, 518, 700, 1000]
    probabilities = np.add.reduceat(softmax(logits, 1.0), edges[:-1])
    counts, _ = np.histogram(tokens, edges)
    assert stats.chisquare(counts, 2000 * probabilities).pvalue > 1e-3
    assert len(np.unique(tokens)) > 300


def test_inverse_cdf_worked_by_hand():
    # total 4; running sums 0 2 2 3 4 4; the first above u * 4
    mass = jnp.broadcast_to(jnp.array([0.0, 2.0, 0.0, 1.0, 1.0, 0.0]), (6, 6))
    uniforms = jnp.array([0.0, 0.49, 0.5, 0.74, 0.75, 1 - 2**-24])
    np.testing.assert_array_equal(_pick(mass, uniforms), [1, 1, 3, 3, 4, 4])
    # Rounding at its worst: a uniform that leaves no candidate gives the heaviest entry, and the empty entry at 2,
    # whose running sum an ulp too high lies above .5 * 4, is passed over.
    np.testing.assert_array_equal(_pick(mass, jnp.full(6, 1.0)), [1] * 6)
    wobbly = jnp.broadcast_to(jnp.array([0.0, 2.0, 2.0000002, 3.0, 4.0, 4.0]), (6, 6))
    np.testing.assert_array_equal(_first_above(wobbly, mass, uniforms), [1, 1, 3, 3, 4, 4])


@pytest.mark.parametrize("vocab", [2, 19, 300])
def test_logprob_is_the_full_vocabulary_log_softmax_after_temperature(vocab):
    # Reported of other stacks.
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(64, vocab)).astype(np.float32) * 4
    temperatures = rng.choice([0.0, 0.5, 1.0, 2.0], 64).astype(np.float32)
    tokens, logprobs = draw(logits, temperatures, keys_for(64))
    for row, temperature, token, logprob in zip(logits, temperatures, tokens, logprobs, strict=True):
        expected = np.log(softmax(row, temperature or 1.0))
        np.testing.assert_allclose(logprob, expected[token], atol=2e-6)
        if temperature == 0:
            assert token == np.argmax(row)


def test_ties_and_extremes():
    rows = np.full((64, 19), -30.0, np.float32)
    rows[0, [4, 17]] = 2.0  # greedy tie: the lowest id
    rows[1, 18] = 300.0  # everything else underflows, its own block too
    rows[2] = -1e30  # flat at a huge offset
    temperatures = np.ones(64, np.float32)
    temperatures[:2] = 0.0, 0.5
    tokens, logprobs = draw(rows, temperatures, keys_for(64))
    assert tokens[0] == 4
    assert tokens[1] == 18
    np.testing.assert_allclose(logprobs[:3], [-np.log(2), 0.0, -np.log(19)], atol=1e-6)


def test_every_number_of_a_request_changes_its_keys():
    # Reported of other stacks.
    numbers = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (2**32 - 1, 0, 0)]
    seed, stream, sibling = (jnp.array(column, jnp.uint32) for column in zip(*numbers, strict=True))
    base = request_keys(seed, stream, sibling)
    keys = [jax.random.key_data(token_keys(base, jnp.full(len(numbers), n))) for n in (0, 1)]
    assert len({tuple(np.asarray(k)) for k in jnp.concatenate(keys)}) == 12
    key = jax.random.key(1, impl="threefry2x32")
    for number in (1, 1, 1):  # seed, then stream, sibling and position folded in one after another
        key = jax.random.fold_in(key, number)
    np.testing.assert_array_equal(jax.random.key_data(key), keys[1][4])
