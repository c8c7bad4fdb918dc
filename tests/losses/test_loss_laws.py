"""What must not change a loss: masked garbage, microbatches, order, packing and sharding. All algorithms at once.

One jitted function holds every composition, so that a shape costs one compilation.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.losses.aggregate import completion_weights
from jaxrl_llm.losses.algorithms import KL_ESTIMATORS, bind, bind_corrections
from jaxrl_llm.losses.entropy import entropy_bonus

GSPO = {"clip_low": 0.1, "clip_high": 0.2}
NEAR = {"low": 0.9, "high": 1.1}
COMPOSITIONS = {
    "reinforce + tis_sequence": (bind("reinforce"), {"tis_sequence": {"cap": 4.0}}, "k1"),
    "ppo + tis": (bind("ppo", clip_high=0.28), {"tis": {}}, None),
    "ppo dual + mis": (bind("ppo", dual_clip=3.0), {"mis": {}}, "k3"),
    "ppo + icepop + off_policy_mask": (bind("ppo"), {"icepop": {}, "off_policy_mask": {"delta": 0.05}}, None),
    "gspo + seq_mis": (bind("gspo", **GSPO), {"seq_mis": {}}, "k2"),
    "gspo_token + geometric": (bind("gspo_token", **GSPO), {"geometric": NEAR}, None),
    "cispo": (bind("cispo", ratio_cap=1.2), {}, None),
    "reinforce": (bind("reinforce"), {}, None),
}

FIELDS = ("logprobs", "behavior", "old", "advantages", "reference", "entropy")


def losses_and_gradients(arrays, token_weights, mask, segment_ids, num_segments):
    """Loss [A] and its gradients [A, B, T] with respect to logprobs and to entropy, for every composition."""
    fixed = {k: arrays[k] for k in FIELDS[1:-1]}

    def loss(logprobs, entropy, composition):
        objective, corrections, estimator = composition
        inputs = (logprobs, fixed["behavior"], fixed["old"], fixed["advantages"], mask, segment_ids, num_segments)
        j = objective(*inputs) * bind_corrections(corrections)(*inputs)
        if estimator is not None:
            j -= 0.1 * KL_ESTIMATORS[estimator](logprobs, fixed["reference"], mask)
        return -jnp.sum(token_weights * (j + entropy_bonus(entropy, mask, 0.01)))

    def total(logprobs_ABT, entropy_ABT):
        found = [loss(*inputs) for inputs in zip(logprobs_ABT, entropy_ABT, COMPOSITIONS.values(), strict=True)]
        return sum(found), jnp.stack(found)

    # Every composition reads a copy of its own, so that one backward pass gives the gradients of all.
    copies = [jnp.stack([arrays[k]] * len(COMPOSITIONS)) for k in ("logprobs", "entropy")]
    gradients, found = jax.grad(total, (0, 1), has_aux=True)(*copies)
    return found, gradients


all_losses = jax.jit(losses_and_gradients, static_argnums=4)

SEGMENTS, ROWS, WIDTH = 3, 8, 16


def draw_batch(seed, keep=None):
    """24 completions of 6 prompts, three documents in each of 8 rows; a document is two prompt tokens + completion."""
    rng = np.random.default_rng(seed)
    lengths_N = rng.integers(1, 4, size=24)
    keep_N = np.ones(24, bool) if keep is None else keep
    weights_N = completion_weights(lengths_N, np.arange(24) // 4, keep_N, kind="prompt")
    arrays = {k: (rng.normal(size=(ROWS, WIDTH)) * 0.3 - 1.0).astype(np.float32) for k in FIELDS}
    for k in ("behavior", "old", "reference"):
        arrays[k] = (arrays["logprobs"] + rng.normal(size=(ROWS, WIDTH)) * 0.25).astype(np.float32)
    segment_ids, mask = np.zeros((ROWS, WIDTH), np.int32), np.zeros((ROWS, WIDTH), bool)
    weights = np.zeros((ROWS, WIDTH), np.float32)
    for n in range(24):
        b, s = divmod(n, SEGMENTS)
        start = int((segment_ids[b] > 0).sum())
        tokens = np.s_[b, start + 2 : start + 2 + lengths_N[n]]
        segment_ids[b, start : start + 2 + lengths_N[n]] = s + 1
        arrays["advantages"][tokens] = rng.normal()
        mask[tokens], weights[tokens] = keep_N[n], weights_N[n]
    return arrays, weights, mask, segment_ids


def same(found, wanted, atol=1e-6):
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=atol)


@given(st.integers(0, 2**31), st.sampled_from([np.nan, np.inf, -np.inf, 1e4, -1e4, 3e38, 17.0]))
def test_garbage_at_masked_places_changes_neither_loss_nor_gradient(seed, garbage):
    arrays, weights, mask, segment_ids = draw_batch(seed)
    mask[5] = False  # a row with nothing to train
    weights = np.where(mask, weights, 0.0).astype(np.float32)
    clean = all_losses(arrays, weights, mask, segment_ids, SEGMENTS + 1)
    for field in (None, *FIELDS):
        dirty = {k: np.where(mask, x, np.float32(garbage)) if field in (None, k) else x for k, x in arrays.items()}
        found = all_losses(dirty, weights, mask, segment_ids, SEGMENTS + 1)
        for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(got, expected)
    assert all(not np.any(np.asarray(g)[:, ~mask]) for g in clean[1])


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_microbatches_change_nothing(parts):
    for seed in range(3):
        batch = draw_batch(seed)
        loss, gradients = all_losses(*batch, SEGMENTS + 1)
        pieces = []
        for rows in np.split(np.arange(ROWS), parts):
            micro = jax.tree.map(lambda x, rows=rows: x[rows], batch)
            pieces.append(all_losses(*micro, SEGMENTS + 1))
        same(sum(part for part, _ in pieces), loss)
        same(jax.tree.map(lambda *g: np.concatenate(g, axis=1), *(slopes for _, slopes in pieces)), gradients)


@given(st.integers(0, 2**31), st.permutations(range(ROWS)))
def test_order_of_rows_changes_nothing(seed, order):
    batch = draw_batch(seed)
    loss, gradients = all_losses(*batch, SEGMENTS + 1)
    found, found_gradients = all_losses(*jax.tree.map(lambda x: x[order], batch), SEGMENTS + 1)
    same(found, loss)
    same(found_gradients, jax.tree.map(lambda g: g[:, order], gradients))


@given(st.integers(0, 2**31), st.permutations(range(24)))
def test_packing_otherwise_changes_nothing(seed, order):
    """The same documents, dealt to rows in another order: gradients follow their tokens."""
    arrays, weights, mask, segment_ids = draw_batch(seed)
    loss, gradients = all_losses(arrays, weights, mask, segment_ids, SEGMENTS + 1)
    places = [(b, np.flatnonzero(segment_ids[b] == s)) for b in range(ROWS) for s in range(1, SEGMENTS + 1)]
    moved = jax.tree.map(np.zeros_like, (arrays, weights, mask, segment_ids))
    came_from = np.full((ROWS, WIDTH), -1)
    filled = np.zeros(ROWS, int)
    for position, n in enumerate(order):
        row, (b, columns) = position // SEGMENTS, places[n]
        target = np.arange(filled[row], filled[row] + len(columns))
        for to, source in zip(
            jax.tree.leaves(moved), jax.tree.leaves((arrays, weights, mask, segment_ids)), strict=True
        ):
            to[row, target] = source[b, columns]
        moved[3][row, target] = position % SEGMENTS + 1
        came_from[row, target] = b * WIDTH + columns
        filled[row] += len(columns)
    found, found_gradients = all_losses(*moved, SEGMENTS + 1)
    same(found, loss)
    for got, expected in zip(found_gradients, gradients, strict=True):
        flat = np.asarray(expected).reshape(len(COMPOSITIONS), -1)
        same(np.asarray(got), np.where(came_from >= 0, flat[:, came_from], 0.0))


def test_padded_rows_equal_packed_rows():
    for seed in range(3):
        arrays, weights, mask, segment_ids = draw_batch(seed)
        loss, gradients = all_losses(arrays, weights, mask, segment_ids, SEGMENTS + 1)
        alone = [(b, segment_ids[b] == s) for b in range(ROWS) for s in range(1, SEGMENTS + 1)]
        rows = np.array([b for b, _ in alone])
        padded_mask = np.stack([mask[b] & here for b, here in alone])
        padded_weights = np.where(padded_mask, weights[rows], 0.0).astype(np.float32)
        padded = jax.tree.map(lambda x, rows=rows: x[rows], arrays)
        found, found_gradients = all_losses(padded, padded_weights, padded_mask, None, None)
        same(found, loss)
        for got, expected in zip(found_gradients, gradients, strict=True):
            # Three padded rows came from each packed row, and no token is in two of them.
            same(np.asarray(got).reshape(-1, ROWS, SEGMENTS, WIDTH).sum(axis=2), expected)


@pytest.mark.parametrize(
    ("axes", "placing"),
    [
        ({"data": 1}, P("data", None)),
        ({"data": 2}, P("data", None)),
        ({"data": 4}, P("data", None)),
        ({"data": 8}, P("data", None)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, P(("data", "fsdp"), None)),  # as the train step places its rows
        ({"data": 2, "time": 4}, P("data", "time")),  # sequences cut in the middle
    ],
    ids=str,
)
def test_sharding_changes_nothing(cpu_devices, axes, placing):
    batch = draw_batch(0)
    count, shape = math.prod(axes.values()), tuple(axes.values())
    mesh = jax.make_mesh(shape, tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=cpu_devices[:count])
    placed = jax.device_put(batch, NamedSharding(mesh, placing))
    same(all_losses(*placed, SEGMENTS + 1), all_losses(*batch, SEGMENTS + 1))


def test_vmap_over_microbatches_equals_one_after_another():
    batches = [draw_batch(seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    at_once = jax.jit(jax.vmap(functools.partial(losses_and_gradients, num_segments=SEGMENTS + 1)))(*stacked)
    for i, batch in enumerate(batches):
        same(jax.tree.map(lambda x, i=i: x[i], at_once), all_losses(*batch, SEGMENTS + 1))


@given(st.integers(0, 2**31))
def test_dropped_completions_weigh_nothing_and_leave_the_denominators(seed):
    """Truncated and masked, or of a zero-variance prompt: their tokens may hold anything, and the loss is that of the
    batch without them."""
    rng = np.random.default_rng(seed)
    keep = rng.random(24) < 0.6
    keep[4:8] = False  # one prompt goes altogether, as the zero-variance filter does it
    keep[0] = True
    arrays, weights, mask, segment_ids = draw_batch(seed, keep)
    loss, gradients = all_losses(arrays, weights, mask, segment_ids, SEGMENTS + 1)
    other = {k: np.where(mask, x, x + 3.0).astype(np.float32) for k, x in arrays.items()}
    same(all_losses(other, weights, mask, segment_ids, SEGMENTS + 1), (loss, gradients), atol=0)
    # By definition, for plain REINFORCE: the mean over kept prompts of the token means over their kept siblings.
    lengths_N = np.random.default_rng(seed).integers(1, 4, size=24)
    terms, by_prompt = arrays["advantages"] * arrays["logprobs"] + 0.01 * arrays["entropy"], []
    for p in range(6):
        mine = [n for n in range(4 * p, 4 * p + 4) if keep[n]]
        tokens = [terms[n // 3][mask[n // 3] & (segment_ids[n // 3] == n % 3 + 1)] for n in mine]
        if mine:
            by_prompt.append(np.concatenate(tokens).sum() / lengths_N[mine].sum())
    np.testing.assert_allclose(loss[-1], -np.mean(by_prompt), rtol=2e-5, atol=1e-6)  # "reinforce" stands last
