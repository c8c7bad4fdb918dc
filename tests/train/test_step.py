import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_policy import ADAMW, CISPO, HEAD_CHUNK, MODEL, OPTIMIZER_CONFIG, TEMPERATURE, B, M, T, documents, make_batch

from jaxrl_llm.models.transformer import forward, head_weight
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.norms import part_norms
from jaxrl_llm.train.state import state_from_params
from jaxrl_llm.train.step import make_score, make_train_step
from jaxrl_llm.types import UserError


def host(tree):
    return jax.tree.map(np.asarray, tree)


def mean(weighted_sum):
    return float(weighted_sum.total) / float(weighted_sum.weight)


def assert_trees_close(left, right, atol):
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_bit_equal(left, right):
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def batch():
    return make_batch(documents(0))


@pytest.fixture(scope="module")
def gradient(gradient_of, batch):
    return gradient_of(batch)


def test_rematerialisation_is_in_the_program(build_step, batch):
    # The barrier is what keeps XLA from saving the activations after all; the numbers are compared above.
    def lowered(axes, remat):
        step, new_state = build_step(axes, remat)
        return step.jitted.lower(new_state(), batch, None, None).as_text()

    barriers = [lowered((("data", 1),), how).count("optimization_barrier") for how in ("none", "full")]
    assert barriers[1] > barriers[0]  # others keep a transpose of the head and norms apart


def test_layers_unrolled_are_another_program_with_the_same_numbers(build_step, batch):
    stepped = {}
    for unroll in (1, MODEL.layers, MODEL.layers + 5):
        step, new_state = build_step((("data", 1),), "none", unroll)
        program = step.jitted.lower(new_state(), batch, None, None).as_text()
        stepped[unroll] = program.count("stablehlo.while"), *step(new_state(), batch)
    loops, state, metrics = stepped[1]
    for unroll in (MODEL.layers, MODEL.layers + 5):
        got_loops, got_state, got_metrics = stepped[unroll]
        assert got_loops == loops - 2  # over the layers, forward and backward
        np.testing.assert_allclose(got_metrics["loss"], metrics["loss"], rtol=0, atol=1e-6)
        assert_trees_close(got_state.params, state.params, atol=1e-6)


def reference_loss(params, docs):
    """-sum(w min(ratio, 5) A logp) with the ratio held, a document per row, all logits materialised."""
    n = max(len(doc["tokens"]) for doc in docs)
    rows = {k: np.stack([np.pad(doc[k], (0, n - len(doc[k]))) for doc in docs]) for k in docs[0]}
    real = np.stack([np.arange(n) < len(doc["tokens"]) for doc in docs]).astype(np.int32)
    hidden = forward(MODEL, params, rows["tokens"], rows["positions"], real)
    logp = jax.nn.log_softmax(hidden @ head_weight(params).T / TEMPERATURE)
    logp = jnp.take_along_axis(logp, rows["targets"][..., None], -1)[..., 0]
    ratio = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logp) - rows["behavior_logprobs"].astype(np.float32)), 5.0)
    return -jnp.sum((rows["token_weights"] * rows["advantages"]).astype(np.float32) * ratio * logp)


def test_gradient_is_that_of_the_written_formula(gradient, host_params):
    got, metrics = gradient
    loss, want = jax.jit(jax.value_and_grad(lambda p: reference_loss(p, documents(0))))(host_params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=0, atol=1e-6)
    assert_trees_close(got, want, atol=2e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(want), rtol=1e-5)
    assert float(metrics["grad_norm"]) > 0.1


@pytest.mark.parametrize(("microbatches", "per_row"), [(1, 2), (4, 1), (8, 1), (1, 3), (2, 3)])
def test_any_split_and_packing_give_the_same_gradient(microbatches, per_row, gradient_of, gradient):
    split, metrics = gradient_of(make_batch(documents(0), microbatches=microbatches, per_row=per_row))
    assert_trees_close(split, gradient[0], atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], gradient[1]["loss"], rtol=0, atol=1e-6)
    for name in ("entropy", "ratio_mean", "log_ratio_mean_abs"):
        np.testing.assert_allclose(mean(metrics[name]), mean(gradient[1][name]), rtol=1e-5)
    for name in ("log_ratio_max", "ratio_max", "ess", "tokens_trained"):
        np.testing.assert_allclose(metrics[name], gradient[1][name], rtol=1e-5)


def test_what_carries_no_weight_carries_nothing(gradient_of, gradient, batch):
    untrained = batch.token_weights == 0
    garbage = batch.replace(
        advantages=np.where(untrained, np.nan, batch.advantages),
        behavior_logprobs=np.where(untrained, -np.inf, batch.behavior_logprobs),
        tokens=np.where(batch.segment_ids == 0, 7, batch.tokens),
        targets=np.where(untrained, 11, batch.targets),
    )
    got, metrics = gradient_of(garbage)
    assert_bit_equal(got, gradient[0])
    assert_bit_equal(metrics, gradient[1])


def test_microbatches_beyond_the_count_are_not_read(gradient_of, gradient, batch):
    half = batch.replace(microbatches=np.asarray(1, np.int32))
    poisoned = half.replace(token_weights=np.concatenate([batch.token_weights[:1], np.full((M - 1, B, T), np.nan)]))
    assert_bit_equal(gradient_of(poisoned), gradient_of(half))
    assert float(gradient_of(half)[1]["tokens_trained"]) < float(gradient[1]["tokens_trained"])


def test_a_negative_weight_is_a_weight(gradient_of, gradient, batch):
    turned, metrics = gradient_of(batch.replace(token_weights=-batch.token_weights))
    assert_trees_close(turned, jax.tree.map(np.negative, gradient[0]), atol=1e-6)
    assert float(metrics["tokens_trained"]) == float(gradient[1]["tokens_trained"])


def test_a_single_microbatch_is_not_added_to_anything(gradient_of, gradient, batch):
    # All rows in one microbatch, a program of its own: the same gradient, and nothing read where there is none.
    whole = jax.tree.map(lambda x: x[:2].reshape(1, 2 * B, T) if x.ndim else np.asarray(1, np.int32), batch)
    got, metrics = gradient_of(whole)
    assert_trees_close(got, gradient[0], atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], gradient[1]["loss"], rtol=0, atol=1e-6)
    nothing = whole.replace(
        microbatches=np.asarray(0, np.int32), token_weights=np.full((1, 2 * B, T), np.nan, np.float32)
    )
    got, metrics = gradient_of(nothing)
    assert all((g == 0).all() for g in jax.tree.leaves(got))
    assert (float(metrics["tokens_trained"]), float(metrics["skipped"]), float(metrics["update_norm"])) == (0, 0, 0)


def test_gradients_may_be_added_up_in_bfloat16(host_params, gradient, batch):
    mesh = make_mesh({}, jax.devices()[:1])
    how = {"mesh": mesh, "temperature": TEMPERATURE, "head_chunk": HEAD_CHUNK, "remat": "none"}
    step = make_train_step(MODEL, ADAMW, CISPO, gradient_dtype="bfloat16", **how)
    state, metrics = step(state_from_params(MODEL, ADAMW, mesh=mesh, params=host_params), batch)
    moment = next(s for s in state.opt_state if hasattr(s, "mu")).mu
    got = jax.tree.map(lambda m: np.asarray(m, np.float64) / (1 - OPTIMIZER_CONFIG.b1), moment)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(gradient[0]), strict=True):
        # Two roundings to 8 bits (four of tied embeddings), each of at most 2^-9 of what is rounded; sums may cancel.
        error, size = np.abs(a - b).max(), np.abs(b).max()
        assert 1e-5 * size < error < 2**-7 * size, jax.tree_util.keystr(path)
        # What leaves the accumulator is a number of that dtype.
        rounded = a.astype(jnp.bfloat16).astype(np.float64)
        np.testing.assert_allclose(a, rounded, rtol=1e-6, atol=1e-12)
    assert {x.dtype.name for x in jax.tree.leaves(moment)} == {"float32"}
    np.testing.assert_allclose(metrics["grad_norm"], gradient[1]["grad_norm"], rtol=1e-2)


def test_zero_advantages_give_a_zero_gradient(gradient_of, batch):
    got, metrics = gradient_of(batch.replace(advantages=np.zeros_like(batch.advantages)))
    assert float(metrics["grad_norm"]) == 0.0
    assert all((g == 0).all() for g in jax.tree.leaves(got))
    assert float(metrics["tokens_trained"]) == np.count_nonzero(batch.token_weights)


@pytest.fixture(scope="module")
def scores(host_params, batch):
    """Teacher-forced log-probabilities of the batch's targets, [M B T]."""
    score = make_score(MODEL, mesh=make_mesh({}, jax.devices()[:1]), temperature=TEMPERATURE, head_chunk=HEAD_CHUNK)
    fields = (batch.tokens, batch.targets, batch.positions, batch.segment_ids)
    return np.stack([np.asarray(score(host_params, *(x[m] for x in fields))) for m in range(M)])


def test_score_is_the_log_softmax_at_the_temperature(scores, host_params, batch):
    hidden = forward(MODEL, host_params, batch.tokens[0], batch.positions[0], batch.segment_ids[0])
    logp = jax.nn.log_softmax(hidden @ host_params["embed"].T / TEMPERATURE)
    want = np.take_along_axis(np.asarray(logp), batch.targets[0][..., None], -1)[..., 0]
    np.testing.assert_allclose(scores[0], want, atol=1e-5)


def test_on_policy_the_ratio_is_one(gradient_of, scores, batch):
    _, metrics = gradient_of(batch.replace(behavior_logprobs=scores))
    assert float(metrics["log_ratio_max"]) < 1e-5
    np.testing.assert_allclose(mean(metrics["ratio_mean"]), 1.0, atol=1e-5)
    np.testing.assert_allclose(metrics["ess"], 1.0, atol=1e-5)


def test_metrics_are_means_and_maxima_over_trained_tokens(gradient, scores, batch):
    trained = batch.token_weights != 0
    log_ratio = (scores - batch.behavior_logprobs)[trained]
    ratio = np.exp(log_ratio)
    metrics = gradient[1]
    np.testing.assert_allclose(mean(metrics["log_ratio_mean_abs"]), np.abs(log_ratio).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["log_ratio_max"], np.abs(log_ratio).max(), rtol=1e-5)
    np.testing.assert_allclose(mean(metrics["ratio_mean"]), ratio.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio_max"], ratio.max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["ess"], ratio.sum() ** 2 / (ratio**2).sum() / ratio.size, rtol=1e-5)
    assert float(metrics["tokens_trained"]) == trained.sum() == float(metrics["entropy"].weight)
    assert 0 < mean(metrics["entropy"]) < np.log(MODEL.vocab_size)
    assert float(metrics["skipped"]) == 0.0


def test_the_donated_state_is_gone(one_device, batch):
    step, new_state = one_device
    state = new_state()
    after, _ = step(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))


def test_differing_batches_share_one_trace(one_device, traces, batch):
    step, new_state = one_device
    state, _ = step(new_state(), batch)
    before = len(traces)
    for seed, microbatches, per_row in ((1, 1, 3), (2, 8, 1), (3, 0, 1)):
        state, _ = step(state, make_batch(documents(seed), microbatches=microbatches, per_row=per_row))
    assert len(traces) == before > 0
    assert int(state.step) == 4


@pytest.mark.parametrize("microbatches", [0, 2], ids=["no_rows", "no_weights"])
def test_a_batch_with_nothing_to_train_moves_only_the_step(microbatches, one_device, batch):
    step, new_state = one_device
    state, _ = step(new_state(), batch)  # moments that would move the weights, and weights that decay
    before = host((state.params, state.opt_state))
    empty = batch.replace(
        token_weights=np.zeros_like(batch.token_weights), microbatches=np.asarray(microbatches, np.int32)
    )
    state, metrics = step(state, empty)
    assert_bit_equal((state.params, state.opt_state), before)
    assert int(state.step) == 2
    assert (float(metrics["tokens_trained"]), float(metrics["skipped"]), float(metrics["update_norm"])) == (0, 0, 0)
    assert all(np.isfinite(x) for x in jax.tree.leaves(metrics))


def poison_loss(batch):
    weights = batch.token_weights.copy()
    weights[tuple(np.argwhere(weights != 0)[0])] = np.nan
    return batch.replace(token_weights=weights)


def poison_gradient(batch):
    # The loss is about 1e21, the squares in the gradient's norm and in Adam's second moment are beyond float32.
    return batch.replace(token_weights=batch.token_weights * np.float32(1e22))


@pytest.mark.parametrize("poison", [poison_loss, poison_gradient])
def test_a_non_finite_update_never_reaches_the_weights(poison, one_device, batch):
    step, new_state = one_device
    state, _ = step(new_state(), batch)
    before = host((state.params, state.opt_state))
    state, metrics = step(state, poison(batch))
    assert np.isfinite(float(metrics["loss"])) == (poison is poison_gradient)
    assert_bit_equal((state.params, state.opt_state), before)
    assert float(metrics["skipped"]) == 1.0
    assert float(metrics["update_norm"]) == 0.0
    assert int(state.step) == 2
    state, metrics = step(state, batch)
    assert float(metrics["skipped"]) == 0.0
    assert float(metrics["update_norm"]) > 0.0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(host(state)))


def test_norms_describe_the_update(one_device, host_params, batch):
    step, new_state = one_device
    state, metrics = step(new_state(), batch)
    moved = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, host_params)
    np.testing.assert_allclose(metrics["update_norm"], optax.tree.norm(moved), rtol=1e-3)
    np.testing.assert_allclose(metrics["param_norm"], optax.tree.norm(host(state.params)), rtol=1e-6)
    for name, tree in {"update_norm": moved, "param_norm": host(state.params)}.items():
        np.testing.assert_allclose(metrics[f"{name}_mlp"], part_norms(tree)["mlp"], rtol=1e-3)
        np.testing.assert_allclose(metrics[f"{name}_embed"], optax.tree.norm(tree["embed"]), rtol=1e-3)


def test_gradient_norms_come_part_by_part(gradient):
    got, metrics = gradient
    for part, norm in part_norms(got).items():
        np.testing.assert_allclose(metrics["grad_norm" if part == "all" else f"grad_norm_{part}"], norm, rtol=1e-4)


def products_of_the_head(axes, host_params, batch, **changes):
    """Of the step's lowered program: the products that have an axis of the vocabulary, and all."""
    config = MODEL.model_copy(update={"compute_dtype": "bfloat16"} | changes)
    mesh = make_mesh(axes, jax.devices()[: 8 if axes else 1])
    step = make_train_step(config, ADAMW, CISPO, mesh=mesh, temperature=1.0, head_chunk=HEAD_CHUNK, remat="none")
    text = step.jitted.lower(
        state_from_params(config, ADAMW, mesh=mesh, params=host_params), batch, None, None
    ).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    return [line for line in dots if re.search(r"tensor<20x32x\w+>|tensor<(\d+x)+20x\w+>", line)], dots


@pytest.mark.parametrize("axes", [{}, {"data": 2, "context": 2, "tensor": 2}], ids=str)
def test_the_head_is_a_float32_product_at_highest_precision(axes, host_params, batch):
    head, dots = products_of_the_head(axes, host_params, batch)
    # Forward, and the gradients of head and hidden state.
    assert len(head) == 3
    assert all("precision = [HIGHEST, HIGHEST]" in line and "bf16" not in line for line in head)
    assert any("bf16" in line for line in dots)


def test_the_ablation_makes_bfloat16_products_of_the_head(host_params, batch):
    head, _ = products_of_the_head({}, host_params, batch, head_dtype="bfloat16", compute_dtype="float32")
    assert len(head) >= 3
    assert all(line.count("xbf16>") == 2 and "HIGHEST" not in line for line in head)


def test_rows_that_do_not_divide_are_refused_before_compilation(build_step, host_params, batch):
    step, new_state = build_step((("data", 2), ("fsdp", 2), ("tensor", 2)))
    with pytest.raises(UserError, match=r"train.microbatch_rows: batch 6 does not divide over data 2 x fsdp 2"):
        step(new_state(), jax.tree.map(lambda x: x[:, :6] if x.ndim else x, batch))
    score = make_score(MODEL, mesh=step.mesh, temperature=1.0, head_chunk=HEAD_CHUNK)
    with pytest.raises(UserError, match=r"batch 6 does not divide over data 2 x fsdp 2"):
        score(host_params, *[np.zeros((6, 16), np.int32)] * 4)


def test_rows_whose_tokens_do_not_divide_are_refused_before_compilation(host_params, batch):
    mesh = make_mesh({"context": 8}, jax.devices())
    how = {"mesh": mesh, "temperature": 1.0, "head_chunk": HEAD_CHUNK}
    step = make_train_step(MODEL, ADAMW, CISPO, remat="none", **how)
    with pytest.raises(
        UserError, match=r"train\.row_length: time 12 does not divide over context 8; use a multiple of 8"
    ):
        step(None, jax.tree.map(lambda x: x[..., :12] if x.ndim else x, batch))
    with pytest.raises(UserError, match=r"tokens of a row to score: time 12 does not divide over context 8"):
        make_score(MODEL, **how)(host_params, *[np.zeros((8, 12), np.int32)] * 4)


def test_the_score_of_rows_in_pieces_is_that_of_whole_rows(scores, host_params, batch):
    mesh = make_mesh({"fsdp": 2, "context": 4}, jax.devices())
    score = make_score(MODEL, mesh=mesh, temperature=TEMPERATURE, head_chunk=HEAD_CHUNK)
    fields = (batch.tokens, batch.targets, batch.positions, batch.segment_ids)
    got = score(host_params, *(x[1] for x in fields))
    real = batch.segment_ids[1] != 0
    np.testing.assert_allclose(np.asarray(got)[real], scores[1][real], rtol=0, atol=1e-5)
