"""The critic: GAE by hand on packed and padded rows, the clipped value loss, and a head that learns."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.losses.value import critic_values, gae, value_loss


def test_gae_by_hand_with_a_tool_result_in_the_middle_and_a_second_document():
    # Document 1: tokens 0, 1, 3 (2 is a tool's); document 2: token 4; then padding. gamma .5, lambda .5.
    rewards = np.array([[0.0, 1.0, 9.0, 2.0, 3.0, 9.0]])
    values = np.array([[1.0, 2.0, 9.0, 4.0, 5.0, 9.0]])
    mask = np.array([[1, 1, 0, 1, 1, 0]], bool)
    segments = np.array([[1, 1, 1, 1, 2, 0]])
    # delta_3 = 2 - 4 = -2; delta_1 = 1 + 2 - 2 = 1, A_1 = 1 - .5; delta_0 = 0 + 1 - 1 = 0, A_0 = .25 * .5; A_4 = 3 - 5
    a = np.array([[0.125, 0.5, 0.0, -2.0, -2.0, 0.0]])
    with jax.enable_x64(True):
        advantages, returns = jax.jit(gae)(rewards, values, mask, segments, gamma=0.5, lam=0.5)
        np.testing.assert_allclose(advantages, a, atol=1e-12)
        np.testing.assert_allclose(returns, np.where(mask, a + values, 0.0), atol=1e-12)
        padded = [np.stack([x[0, :4], np.r_[x[0, 4:], 0, 0]]) for x in (rewards, values, mask)]
        rows, _ = jax.jit(gae)(padded[0], padded[1], padded[2].astype(bool), gamma=0.5, lam=0.5)
    np.testing.assert_allclose(rows, [a[0, :4], [-2.0, 0, 0, 0]], atol=1e-12)


def test_with_gamma_and_lambda_one_the_advantage_is_the_reward_to_go_minus_the_value():
    rewards, values = np.array([[1.0, 2.0, 4.0]]), np.array([[0.5, 0.25, 3.0]])
    advantages, returns = gae(jnp.asarray(rewards), jnp.asarray(values), jnp.ones((1, 3), bool))
    np.testing.assert_allclose(advantages, [[6.5, 5.75, 1.0]], atol=1e-6)
    np.testing.assert_allclose(returns, [[7.0, 6.0, 4.0]], atol=1e-6)


def test_value_loss_takes_the_larger_error_and_stops_where_the_value_has_moved_far_enough():
    # From old value 0, return 1, clip .2: V = .1 free; V = .5 held at .2, whose error is larger: no gradient;
    # V = -.5 moved away: its own error is larger, full gradient; masked.
    values, old, returns = jnp.array([0.1, 0.5, -0.5, jnp.nan]), jnp.zeros(4), jnp.array([1.0, 1.0, 1.0, jnp.inf])
    mask = jnp.array([True, True, True, False])

    def loss(values, clip):
        return value_loss(values, old, returns, mask, clip=clip)

    clipped, slopes, free = jax.jit(lambda v: (loss(v, 0.2), jax.grad(lambda v: loss(v, 0.2).sum())(v), loss(v, None)))(
        values
    )
    np.testing.assert_allclose(clipped, [0.405, 0.32, 1.125, 0.0], rtol=1e-6)
    np.testing.assert_allclose(slopes, [-0.9, 0.0, -1.5, 0.0], rtol=1e-6)
    np.testing.assert_allclose(free, [0.405, 0.125, 1.125, 0.0], rtol=1e-6)


def test_a_critic_head_learns_the_returns():
    rng = np.random.default_rng(0)
    hidden, mask = rng.normal(size=(4, 8, 3)).astype(np.float32), np.ones((4, 8), bool)
    returns = (hidden @ np.array([1.0, -2.0, 0.5]) + 3.0).astype(np.float32)

    @jax.jit
    def train(head, bias):
        def loss(head, bias, old):
            return value_loss(critic_values(hidden, head, bias), old, returns, mask, clip=0.5).mean()

        def step(_, weights):
            old = critic_values(hidden, *weights)
            slopes = jax.grad(loss, (0, 1))(*weights, old)
            return jax.tree.map(lambda w, g: w - 0.3 * g, weights, slopes)

        return jax.lax.fori_loop(0, 200, step, (head, bias))

    head, bias = train(jnp.zeros(3), jnp.zeros(()))
    np.testing.assert_allclose(head, [1.0, -2.0, 0.5], atol=1e-3)
    np.testing.assert_allclose(bias, 3.0, atol=1e-3)


def test_critic_values_are_float32_from_bfloat16_hidden_states():
    hidden = jnp.ones((2, 3), jnp.bfloat16)
    lowered = jax.jit(critic_values).lower(hidden, jnp.ones(3, jnp.bfloat16), jnp.zeros((), jnp.bfloat16))
    assert "precision = [HIGHEST, HIGHEST]" in lowered.as_text()
    assert lowered.out_info.dtype == jnp.float32
