import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.losses.router import balance_terms, z_terms


def test_worked_numbers():
    # Two experts, one choice. Document 1 has choices 0, 0, 1: shares 2/3 and 1/3. Probabilities of expert 0: 3/4, 3/4,
    # 1/4. Terms: 2 (2/3 3/4 + 1/3 1/4) = 7/6 twice, 2 (2/3 1/4 + 1/3 3/4) = 5/6. Document 2 is one token, undecided: 1.
    logits = np.log(np.array([[[3, 1], [3, 1], [1, 3], [1, 1], [9, 1]]], np.float32))
    chosen = np.array([[[0], [0], [1], [1], [0]]])
    segments = np.array([[1, 1, 1, 2, 0]])
    np.testing.assert_allclose(balance_terms(logits, chosen, segments), [[7 / 6, 7 / 6, 5 / 6, 1, 0]], rtol=1e-6)
    np.testing.assert_allclose(z_terms(logits)[0, :4], np.log([4, 4, 4, 2]) ** 2, rtol=1e-6)


def test_even_choices_or_even_probabilities_give_one_and_one_expert_gives_their_number():
    rng = np.random.default_rng(0)
    segments = np.ones((1, 8), np.int32)
    turns = np.stack([np.arange(8) % 4, (np.arange(8) + 1) % 4], -1)[None]
    logits = rng.standard_normal((1, 8, 4), np.float32)
    np.testing.assert_allclose(np.mean(balance_terms(logits, turns, segments)), 1, rtol=1e-6)
    np.testing.assert_allclose(balance_terms(np.zeros_like(logits), turns, segments), np.ones((1, 8)), rtol=1e-6)
    sure = np.where(np.arange(4) == 2, 50, np.zeros_like(logits))
    np.testing.assert_allclose(balance_terms(sure, np.full((1, 8, 1), 2), segments), np.full((1, 8), 4), rtol=1e-6)


def test_the_balance_pushes_away_from_what_is_chosen_too_often_whatever_a_packed_row_holds_beside():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((1, 9, 4), np.float32)
    chosen = np.asarray(jax.lax.top_k(logits, 2)[1])
    segments = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 0]])
    gradient = jax.grad(lambda x: jnp.sum(balance_terms(x, chosen, segments)))(logits)
    for document in (slice(0, 5), slice(5, 8)):
        own = jax.grad(lambda x, d=document: jnp.sum(balance_terms(x, chosen[:, d], np.ones_like(segments[:, d]))))
        np.testing.assert_allclose(gradient[:, document], own(logits[:, document]), atol=1e-6)
        # Softmax's gradient: E p_e (f_e - sum_j f_j p_j), with the shares held fixed.
        share = np.bincount(chosen[0, document].ravel(), minlength=4) / chosen[0, document].size
        p = np.asarray(jax.nn.softmax(logits[0, document]))
        np.testing.assert_allclose(gradient[0, document], 4 * p * (share - (p @ share)[:, None]), atol=1e-6)
    assert not np.any(gradient[0, 8])
