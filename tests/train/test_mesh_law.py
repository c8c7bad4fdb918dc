"""The law: one configuration and one stream of batches give the same parameters on every mesh."""

import functools
import itertools

import jax
import numpy as np
import pytest
from tiny_policy import ADAMW, CISPO, HEAD_CHUNK, TEMPERATURE, documents, make_batch

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.algorithm import Algorithm, Router
from jaxrl_llm.train.state import state_from_params
from jaxrl_llm.train.step import make_train_step

# Every size of a mesh axis divides: heads 16 in 8 groups, feed-forward 16, vocabulary 24, rows 8, row length 16.
DENSE = ModelConfig(
    layers=2, d_model=16, heads=16, kv_heads=8, head_dim=4, d_ff=16, vocab_size=24, max_context=16,
    attention_pattern="LG", window=3, attention_softcap=4.0, final_softcap=8.0, qk_norm=True,
)  # fmt: skip
EXPERTS = ModelConfig(
    layers=2, d_model=16, heads=8, kv_heads=4, head_dim=4, d_ff=16, vocab_size=24, max_context=16, experts=4,
    experts_per_token=2, router_gate="softmax_chosen", shared_expert_d_ff=8, attention_pattern="CN", attention_chunk=4,
)  # fmt: skip
ALGORITHMS = {DENSE: CISPO, EXPERTS: Algorithm(CISPO.objective, router=Router(0.5, 0.125))}
STEPS = 5

SIZES = [
    {axis: size for axis, size in zip(("data", "fsdp", "tensor", "context"), sizes, strict=True) if size > 1}
    for sizes in itertools.product((1, 2, 4, 8), repeat=4)
    if np.prod(sizes) == 8
]
"""Every combination of these axes whose product is 8."""

# Every pair of axes, and the longest context.
ORDINARY = [
    {"context": 8},
    {"fsdp": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "context": 2},
    {"data": 2, "tensor": 2, "context": 2},
]
WITH_EXPERTS = [
    {"expert": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "context": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"data": 2, "expert": 4},
]


def batches():
    """Packed rows; each row's first document is a prompt that the others share."""
    for seed in range(STEPS):
        batch = make_batch(documents(seed), per_row=3)
        yield batch.replace(prefix_ids=np.where(batch.segment_ids > 1, 1, 0).astype(np.int32))


@functools.cache
def start(model):
    """Weights uneven enough to matter, drawn in numpy, which has nothing to compile."""
    rng = np.random.default_rng(3)

    def draw(path, x):
        noise = rng.normal(size=x.shape).astype(np.float32)
        return 1 + 0.1 * noise if "norm" in jax.tree_util.keystr(path) else 0.25 * noise

    return jax.tree_util.tree_map_with_path(draw, abstract_params(model))


def after_five_steps(model, axes, remat):
    mesh = make_mesh(axes, jax.devices()[: int(np.prod(list(axes.values()), dtype=int))])
    how = {"temperature": TEMPERATURE, "head_chunk": HEAD_CHUNK, "remat": remat, "share_prompts": True}
    step = make_train_step(model, ADAMW, ALGORITHMS[model], mesh=mesh, **how)
    state = state_from_params(model, ADAMW, mesh=mesh, params=start(model))
    for batch in batches():
        state, metrics = step(state, batch)
        assert float(metrics["skipped"]) == 0
    return jax.tree.map(np.asarray, state.params), metrics


@functools.cache
def on_one_device(model):
    return after_five_steps(model, {}, "none")


def check(model, axes):
    wanted, wanted_metrics = on_one_device(model)
    got, metrics = after_five_steps(model, axes, remat="full" if axes.get("context", 1) > 1 else "none")
    for (path, a), b, first in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), jax.tree.leaves(start(model)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=jax.tree_util.keystr(path))
        moved = np.abs(b - first)
        # The steps were large against that tolerance; those of each expert too.
        assert np.min(moved.max(axis=(2, 3)) if "expert_" in str(path) else moved.max()) > 1e-3, path
    for (path, a), b in zip(jax.tree.leaves_with_path(metrics), jax.tree.leaves(wanted_metrics), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def test_the_combinations_are_all_there():
    assert len(SIZES) == 20
    assert all(axes in SIZES for axes in ORDINARY)


@pytest.mark.parametrize("axes", ORDINARY, ids=str)
def test_any_mesh_gives_the_parameters_of_one_device(axes):
    check(DENSE, axes)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [axes for axes in SIZES if axes not in ORDINARY], ids=str)
def test_every_other_mesh_gives_them_too(axes):
    check(DENSE, axes)


def test_a_mesh_that_splits_experts_gives_them():
    check(EXPERTS, WITH_EXPERTS[0])


@pytest.mark.slow
@pytest.mark.parametrize("axes", WITH_EXPERTS[1:], ids=str)
def test_every_other_mesh_that_splits_experts_gives_them_too(axes):
    check(EXPERTS, axes)
