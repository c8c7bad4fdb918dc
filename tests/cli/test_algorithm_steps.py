"""Whole algorithms, from configuration to the weights after a step, against their formulas written out on padded rows.

One completion per row, all logits materialised, no segments, no microbatches: nothing is shared with the packed step
but the model's forward pass.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_algorithm import LONGEST, PROMPT, Tiny, configured, groups, host, number, weights

from jaxrl_llm.models.transformer import forward, head_weight
from jaxrl_llm.types import Episode, EpisodeGroup, Reward

RATE = 0.5


def rows_of(part):
    """The completions of some groups, one per row: tokens, targets, mask, sampler's log-probabilities; rewards."""
    episodes = [(g.task, e) for g in part for e in g.episodes]
    n, width = len(episodes), PROMPT + LONGEST
    tokens, mask = np.zeros((n, width), np.int32), np.zeros((n, width - 1), bool)
    behavior = np.zeros((n, width - 1), np.float32)
    for i, (task, episode) in enumerate(episodes):
        ids = np.concatenate([task.tokens_T, episode.completion.tokens_T])
        tokens[i, : len(ids)] = ids
        mask[i, PROMPT - 1 : len(ids) - 1] = True
        behavior[i, PROMPT - 1 : len(ids) - 1] = episode.completion.logprobs_T
    rewards = np.array([[e.reward.value for e in g.episodes] for g in part])
    return tokens[:, :-1], tokens[:, 1:], mask, behavior, rewards


def scores(config, params, tokens, targets):
    """(log-probabilities of the targets, entropies, hidden states)."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    hidden = forward(config.model, params, tokens, positions, np.ones(tokens.shape, np.int32))
    logp = jax.nn.log_softmax(hidden @ head_weight(params).T)
    chosen = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
    return chosen, -(jnp.exp(logp) * logp).sum(-1), hidden


def descend(tree, slope):
    return jax.tree.map(lambda p, g: p - RATE * g, tree, slope)


def assert_close(got, want, start):
    for (path, a), b, c in zip(
        jax.tree.leaves_with_path(host(got)), jax.tree.leaves(want), jax.tree.leaves(start), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6, err_msg=jax.tree_util.keystr(path))
        assert np.abs(b - c).max() > 1e-4, path  # it moved, and by much more than the tolerance


def test_grpo_with_two_updates_tis_kl_and_entropy():
    config = configured(
        {
            "objective": "ppo",
            "importance": {"tis": {"cap": 1.5}},
            "updates_per_batch": 2,
            "normalisation": "prompt_std",
            "aggregation": "sample",
            "kl": {"place": "loss", "estimator": "k3", "coefficient": 0.1},
            "entropy": {"coefficient": 0.02},
            "zero_variance_filter": False,
        }
    )
    start, reference = weights(config), weights(config, seed=1)
    given = groups(config)

    def loss(params, old, kl_to, tokens, targets, mask, behavior, advantages, length):
        logp, entropy, _ = scores(config, params, tokens, targets)
        ratio, a = jnp.exp(logp - old), advantages[:, None]
        clipped = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        weight = jnp.minimum(jnp.exp(old - behavior), 1.5)
        delta = logp - kl_to
        j = weight * clipped - 0.1 * (jnp.exp(-delta) + delta - 1) + 0.02 * entropy
        return -(jnp.where(mask, j, 0.0).sum(1) / length).mean()

    slope = jax.jit(jax.grad(loss))
    score = jax.jit(lambda p, tokens, targets: scores(config, p, tokens, targets)[0])
    want = start
    for part in (given[:2], given[2:]):
        tokens, targets, mask, behavior, rewards = rows_of(part)
        spread = rewards.std(axis=1, ddof=1, keepdims=True)
        advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-6)).reshape(-1)
        old, kl_to = (score(p, tokens, targets) for p in (start, reference))
        rest = (tokens, targets, mask, behavior, advantages.astype(np.float32), mask.sum(1).astype(np.float32))
        want = descend(want, slope(want, old, kl_to, *rest))

    tiny = Tiny(config, rate=RATE, reference=reference)
    state, metrics = tiny(tiny.state(start), given)
    assert_close(state.params, want, start)
    assert number(metrics["clip_high"]) + number(metrics["clip_low"]) > 0  # the second update did meet its clip
    assert number(metrics["old_ratio_max"]) > 1.2
    assert number(metrics["kl_reference_k3"]) > 0.1
    assert int(state.step) == 1


def test_ppo_with_a_critic_and_kl_in_the_reward():
    config = configured(
        {
            "objective": "ppo",
            "updates_per_batch": 2,
            "baseline": "none",
            "normalisation": "global",
            "aggregation": "token",
            "kl": {"place": "reward", "estimator": "k1", "coefficient": 0.2},
            "critic": {"enabled": True, "gamma": 0.9, "lam": 0.8, "coefficient": 0.3, "clip": 0.1},
            "zero_variance_filter": False,
        }
    )
    start, reference = weights(config), weights(config, seed=1)
    given = groups(config)
    head = {"weight": np.linspace(-0.3, 0.3, 16).astype(np.float32), "bias": np.float32(0.2)}

    def value(head, hidden):
        return hidden @ head["weight"] + head["bias"]

    def loss(trained, old, old_values, tokens, targets, mask, advantages, returns):
        logp, _, hidden = scores(config, trained[0], tokens, targets)
        ratio = jnp.exp(logp - old)
        j = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        values = value(trained[1], hidden)
        held = jnp.clip(values, old_values - 0.1, old_values + 0.1)
        error = 0.5 * jnp.maximum((values - returns) ** 2, (held - returns) ** 2)
        return jnp.where(mask, -j + 0.3 * error, 0.0).sum() / mask.sum()

    slope = jax.jit(jax.grad(loss))
    score = jax.jit(lambda p, tokens, targets: scores(config, p, tokens, targets))
    want = (start, head)
    for part in (given[:2], given[2:]):
        tokens, targets, mask, _, rewards = rows_of(part)
        old, _, hidden = host(score(start, tokens, targets))
        kl = old - np.asarray(score(reference, tokens, targets)[0])
        old_values = value(head, hidden)
        advantages, returns = np.zeros(mask.shape, np.float32), np.zeros(mask.shape, np.float32)
        for i, reward in enumerate(rewards.reshape(-1)):
            following, last = 0.0, np.flatnonzero(mask[i])[-1]
            for t in reversed(np.flatnonzero(mask[i])):
                next_value = 0.0 if t == last else old_values[i, t + 1]
                delta = -0.2 * kl[i, t] + (reward if t == last else 0.0) + 0.9 * next_value - old_values[i, t]
                following = delta + 0.9 * 0.8 * following
                advantages[i, t], returns[i, t] = following, following + old_values[i, t]
        kept = advantages[mask]
        advantages = np.where(mask, (advantages - kept.mean()) / (kept.std() + 1e-6), 0.0).astype(np.float32)
        want = descend(want, slope(want, old, old_values, tokens, targets, mask, advantages, returns))

    tiny = Tiny(config, rate=RATE, reference=reference)
    state = tiny.state(start)
    state = state.replace(critic=state.critic.replace(head=jax.device_put(head, state.critic.head["bias"].sharding)))
    state, metrics = tiny(state, given)
    assert_close((state.params, state.critic.head), want, (start, head))
    assert number(metrics["value_loss"]) > 0


def test_rloo_with_kl_in_the_reward_compares_whole_completions():
    config = configured(
        {
            "objective": "reinforce",
            "importance": {"tis_sequence": {"cap": 1.3}},
            "baseline": "leave_one_out",
            "normalisation": "none",
            "aggregation": "sequence_sum",
            "kl": {"place": "reward", "estimator": "k2", "coefficient": 0.2},
            "zero_variance_filter": True,
        }
    )
    start, reference = weights(config), weights(config, seed=1)
    given = groups(config, rewards=[[1, 1, -1, 1], [1, 1, 1, 1], [-1, 1, -1, -1], [1, -1, 1, -1]])
    tokens, targets, mask, behavior, rewards = rows_of([given[p] for p in (0, 2, 3)])  # group 1 has nothing to compare

    def loss(params, weighted_advantages):
        logp, _, _ = scores(config, params, tokens, targets)
        return -jnp.where(mask, weighted_advantages * logp, 0.0).sum() / len(tokens)

    score = jax.jit(lambda p: scores(config, p, tokens, targets)[0])
    old, kl_to = host(score(start)), host(score(reference))
    penalised = rewards - 0.2 * np.where(mask, 0.5 * (old - kl_to) ** 2, 0.0).sum(1).reshape(rewards.shape)
    advantages = 4 / 3 * (penalised - penalised.mean(axis=1, keepdims=True))
    product = np.exp(np.where(mask, old - behavior, 0.0).sum(1))
    slope = jax.jit(jax.grad(loss))(
        start, (np.minimum(product, 1.3) * advantages.reshape(-1))[:, None].astype(np.float32)
    )

    tiny = Tiny(config, rate=RATE, reference=reference)
    state, metrics = tiny(tiny.state(start), given)
    assert_close(state.params, descend(start, slope), start)
    np.testing.assert_allclose(
        number(metrics["importance_mean"]), (np.minimum(product, 1.3) * mask.sum(1)).sum() / mask.sum(), rtol=1e-5
    )


# The step's laws for an algorithm that uses what ScaleRL does not: sequence ratios over packed rows, several updates,
# a reference, a critic's neighbour (credit on the device), an entropy coefficient that adapts.
EVERYTHING = {
    "objective": "gspo_token",
    "clip_low": 0.2,
    "clip_high": 0.3,
    "importance": {"seq_mis": {"low": 0.0, "high": 8.0}, "off_policy_mask": {"delta": 2.0}},
    "updates_per_batch": 2,
    "baseline": "group_mean",
    "normalisation": "batch_std",
    "aggregation": "prompt",
    "kl": {"place": "reward", "estimator": "k1", "coefficient": 0.1},
    "entropy": {"target": 5.0, "step": 0.01},
    "overlong_filter": True,
}


@pytest.fixture(scope="module")
def everything():
    """(step, state after one step that moves the entropy coefficient off 0, the groups of the next step)."""
    config = configured(EVERYTHING)
    return config, weights(config), weights(config, seed=1)


@pytest.fixture(scope="module")
def one_device(everything):
    config, _, reference = everything
    return Tiny(config, rate=0.05, reference=reference)


def two_steps(tiny, start, batches):
    state = tiny.state(start)
    for batch in batches:
        state, metrics = tiny.step(state, batch)
    return host(state), host(metrics)


@pytest.fixture(scope="module")
def after_two_steps(everything, one_device):
    config, start, _ = everything
    batches = [one_device.batch(groups(config, seed)) for seed in (21, 22)]
    return batches, *two_steps(one_device, start, batches)


def assert_same(got, want, atol=1e-5):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol, err_msg=jax.tree_util.keystr(path))


def test_two_steps_used_everything(everything, after_two_steps):
    _, state, metrics = after_two_steps
    assert np.abs(state.params["embed"] - everything[1]["embed"]).max() > 1e-3
    np.testing.assert_allclose(state.entropy.coefficient, 0.04, rtol=1e-5)  # four updates below the target
    assert 0 < number(metrics["entropy_coefficient"]) < 0.04
    assert number(metrics["importance_zero"]) > 0
    assert number(metrics["old_ess"]) < 1


def test_a_mesh_changes_nothing(everything, after_two_steps):
    config, start, reference = everything
    batches, state, metrics = after_two_steps
    spread = Tiny(config, rate=0.05, reference=reference, axes={"fsdp": 2, "context": 2, "tensor": 2})
    got, got_metrics = two_steps(spread, start, batches)
    assert_same(got, state)
    assert_same(got_metrics, metrics, atol=1e-4)


def relaid(batch, order, per_row):
    """The documents of every update in another order, `per_row` to a row at most."""

    def one(k):
        fields = {n: x[k] for n, x in vars(batch).items() if n != "microbatches" and x is not None}
        shape = fields["tokens"].shape
        flat = {n: x.reshape(-1, shape[-1]) for n, x in fields.items()}
        ids = flat["segment_ids"]
        documents = [(r, np.flatnonzero(ids[r] == s)) for r in range(len(ids)) for s in range(1, ids[r].max() + 1)]
        made = {n: np.zeros_like(x) for n, x in flat.items()}
        row, cursor, held = 0, 0, 0
        for r, columns in [documents[i] for i in order(len(documents))]:
            if held == per_row or cursor + len(columns) > shape[-1]:
                row, cursor, held = row + 1, 0, 0
            place = np.arange(cursor, cursor + len(columns))
            for n, x in flat.items():
                made[n][row, place] = x[r, columns]
            made["segment_ids"][row, place] = held + 1
            cursor, held = cursor + len(columns), held + 1
        return {n: x.reshape(shape) for n, x in made.items()}, -(-(row + 1) // shape[1])

    parts = [one(k) for k in range(len(batch.microbatches))]
    fields = {n: np.stack([part[n] for part, _ in parts]) for n in parts[0][0]}
    return type(batch)(**fields, microbatches=np.array([count for _, count in parts], np.int32))


@pytest.mark.parametrize("per_row", [1, 2, 8])
def test_order_packing_and_microbatches_change_nothing(per_row, everything, one_device, after_two_steps):
    batches, state, metrics = after_two_steps
    assert [b.microbatches.tolist() for b in batches] == [[1, 1], [1, 1]]
    order = np.random.default_rng(per_row).permutation
    moved = [relaid(batch, order, per_row) for batch in batches]
    assert per_row > 1 or all(b.microbatches.min() == 2 for b in moved)  # padded rows take two microbatches
    got, got_metrics = two_steps(one_device, everything[1], moved)
    assert_same(got, state)
    assert_same(got_metrics, metrics, atol=1e-4)


@pytest.mark.parametrize("garbage", [np.nan, -np.inf, 1e4])
def test_garbage_where_nothing_is_trained_changes_nothing(garbage, everything, one_device, after_two_steps):
    batches, state, metrics = after_two_steps

    def spoil(batch):
        untrained = batch.token_weights == 0
        floats = ("advantages", "behavior_logprobs", "scores")
        return batch.replace(
            **{name: np.where(untrained, np.float32(garbage), getattr(batch, name)) for name in floats},
            completions=np.where(untrained, 3, batch.completions),
            targets=np.where(untrained, 7, batch.targets),
            tokens=np.where(batch.segment_ids == 0, 5, batch.tokens),
        )

    got, got_metrics = two_steps(one_device, everything[1], [spoil(batch) for batch in batches])
    for a, b in zip(jax.tree.leaves((got, got_metrics)), jax.tree.leaves((state, metrics)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_constant_added_to_a_groups_rewards_changes_nothing(everything, one_device, after_two_steps):
    config, start, _ = everything
    _, state, _ = after_two_steps
    lifted = []
    for seed in (21, 22):
        given = groups(config, seed)
        rewards = np.array([[e.reward.value for e in group.episodes] for group in given])
        constants = np.array([[3.0], [-2.0], [0.5], [0.0]])
        moved = [
            EpisodeGroup(
                p, g.task, tuple(replace(e, reward=Reward(r, {})) for e, r in zip(g.episodes, row, strict=True))
            )
            for p, (g, row) in enumerate(zip(given, rewards + constants, strict=True))
        ]
        lifted.append(one_device.batch(moved))
    got, _ = two_steps(one_device, start, lifted)
    assert_same(got, state)


def test_a_group_of_equal_rewards_is_as_if_its_rewards_had_failed(everything, one_device):
    """It is in no numerator, no denominator, no KL and no standard deviation of the batch."""
    config, start, _ = everything
    rewards = np.array([[1, -1, 1, 1], [0.1, 0.1, 0.1, 0.1], [1, -1, -1, -1], [1, 1, -1, 1]])
    flat = groups(config, 3, rewards)
    failed = list(flat)
    gone = [Episode(e.completion, e.trainable_T, Reward(9.0, {}, failed="judge")) for e in flat[1].episodes]
    failed[1] = EpisodeGroup(1, flat[1].task, tuple(gone))
    want = two_steps(one_device, start, [one_device.batch(failed)])
    got = two_steps(one_device, start, [one_device.batch(flat)])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    # All groups equal: nothing is trained, and nothing but the step's number moves.
    before = one_device.state(start)
    kept = host((before.params, before.entropy))
    after, metrics = one_device(before, groups(config, 3, np.ones((4, 4))))
    for a, b in zip(jax.tree.leaves(host((after.params, after.entropy))), jax.tree.leaves(kept), strict=True):
        assert a.tobytes() == b.tobytes()
    assert (int(after.step), number(metrics["tokens_trained"]), number(metrics["skipped"])) == (1, 0, 0)
    assert all(np.isfinite(x) for x in jax.tree.leaves(host(metrics)))


def test_an_update_that_is_not_finite_is_left_out_and_counted(everything, one_device, after_two_steps):
    _, start, _ = everything
    batch = after_two_steps[0][0]
    weights = batch.token_weights.copy()
    weights[1][tuple(np.argwhere(weights[1] != 0)[0])] = np.nan
    state, metrics = one_device.step(one_device.state(start), batch.replace(token_weights=weights))
    empty = batch.replace(microbatches=np.array([batch.microbatches[0], 0], np.int32))
    want, _ = one_device.step(one_device.state(start), empty)
    for a, b in zip(jax.tree.leaves(host(state)), jax.tree.leaves(host(want)), strict=True):
        assert a.tobytes() == b.tobytes()  # the first update went in, the second did not
    assert number(metrics["skipped"]) == 1
