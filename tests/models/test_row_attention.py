"""The kernels against XLA's products. Splash runs here in interpret mode; cuDNN is compiled by tests/aot."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.near_attention import pays
from jaxrl_llm.models.row_attention import XLA, RowAttention, Sight, choose_attention, row_attention
from jaxrl_llm.models.transformer import forward, init_params
from jaxrl_llm.sharding import joined, make_mesh, pieces
from jaxrl_llm.types import Reach, UserError

SCALE = 0.3


def rows(lengths, row_length):
    """Segment ids and positions [B T] of rows that hold documents of these lengths, then padding."""
    segments, positions = np.zeros((2, len(lengths), row_length), np.int32)
    for row, documents in enumerate(lengths):
        at = 0
        for segment, length in enumerate(documents, 1):
            segments[row, at : at + length], positions[row, at : at + length] = segment, range(length)
            at += length
    return segments, positions


def values_and_gradients(how, sight, softcap, q, k, v, cotangent):
    """What the real tokens get, and d sum(result * cotangent) for queries, keys and values."""
    attend = row_attention(how, [sight], scale=SCALE, softcap=softcap)

    def run(q, k, v):
        q, k, v = (pieces(how.mesh, x) for x in (q, k, v))
        attended = joined(how.mesh, attend(q, k, v, 0))
        return jnp.sum(attended * cotangent), attended

    (_, attended), gradients = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return np.where(np.asarray(sight.segment_ids_BT)[..., None, None] > 0, attended, 0), gradients


@pytest.mark.parametrize(
    ("axes", "length", "narrower", "softcap", "kv_heads", "shared"),
    [
        ({}, 300, {"window": 70}, 2.0, 2, False),
        ({"fsdp": 2, "tensor": 2}, 300, {"chunk": 60}, None, 2, False),
        ({"fsdp": 2}, 300, {"window": 1}, None, 1, False),
        ({"context": 3, "tensor": 2}, 384, {"window": 70}, 2.0, 2, False),
        ({"fsdp": 2, "context": 3}, 384, {"chunk": 60}, None, 1, False),
        ({}, 300, {}, 2.0, 2, True),
        ({"fsdp": 2, "context": 3}, 384, {"chunk": 170}, None, 1, True),
    ],
    ids=[
        "window and soft cap",
        "chunks on a mesh",
        "one key head, window of one",
        "pieces and window",
        "pieces, chunks",
        "shared prompts, soft cap",
        "pieces, chunks, shared prompts",
    ],
)
def test_splash_gives_what_xla_gives(axes, length, narrower, softcap, kv_heads, shared):
    # 300 tokens are padded to three blocks of 128; documents begin and end inside blocks, one is longer than a block.
    segments, positions = rows([[41, 1, 200], [150, 97, 53]], length)
    # The second and third documents of a row go on from the first, the second row's third is on its own.
    prefixes = ((segments > 1) & (segments < [[4], [3]])).astype(np.int32) if shared else None
    if shared:
        positions += np.where(prefixes, (segments == 1).sum(axis=1, keepdims=True), 0)
    rng = np.random.default_rng(0)
    q, cotangent = rng.normal(size=(2, 2, length, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, length, kv_heads, 8)).astype(np.float32)
    cotangent *= (segments > 0)[..., None, None]
    mesh = make_mesh(axes, jax.devices()[: np.prod(list(axes.values()), dtype=int)]) if axes else None
    sight = Sight(segments, positions, **narrower, prefix_ids_BT=prefixes)
    wanted, wanted_gradients = values_and_gradients(XLA, sight, softcap, q, k, v, cotangent)
    splash = RowAttention("splash", mesh, interpret=True)
    got, gradients = values_and_gradients(splash, sight, softcap, q, k, v, cotangent)
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.abs(wanted).max() > 1
    assert min(float(jnp.abs(g).max()) for g in wanted_gradients[2:]) > 1


@pytest.mark.parametrize(
    ("axes", "seen", "shared"),
    [
        ({"fsdp": 4, "context": 2}, {"window": 5}, False),
        ({"context": 4, "tensor": 2}, {"chunk": 3}, False),
        ({"data": 2, "context": 4}, {"window": 5}, True),
    ],
    ids=["window", "chunk", "shared prompts and window"],
)
def test_rows_in_pieces_give_what_whole_rows_give(axes, seen, shared):
    # Pieces of five or ten tokens: documents, windows, chunks and shared prompts lie across them.
    segments, positions = rows([[4, 3, 7], [9, 2, 5], [1, 1, 1], [16, 2, 2]], 20)
    rng = np.random.default_rng(0)
    q, cotangent = rng.normal(size=(2, 4, 20, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 4, 20, 2, 8)).astype(np.float32)
    cotangent *= (segments > 0)[..., None, None]
    sight = Sight(segments, positions, **seen, prefix_ids_BT=np.where(segments > 1, 1, 0) if shared else None)
    wanted, wanted_gradients = values_and_gradients(XLA, sight, 2.0, q, k, v, cotangent)
    how = RowAttention("xla", make_mesh(axes, jax.devices()))
    got, gradients = values_and_gradients(how, sight, 2.0, q, k, v, cotangent)
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert min(float(jnp.abs(g).max()) for g in wanted_gradients) > 0.1


def families_of(made, row_length):
    """Segment, positions and prefix ids of rows of families: (tokens of the shared prompt, those of each document)."""
    segments, positions, prefixes = np.zeros((3, len(made), row_length), np.int32)
    for row, its in enumerate(made):
        at = segment = 0
        for prompt, documents in its:
            first = segment + 1 if prompt else 0
            for length, before, prefix in [(prompt, 0, 0)] * bool(prompt) + [(d, prompt, first) for d in documents]:
                segment, place = segment + 1, slice(at, at + length)
                segments[row, place], prefixes[row, place] = segment, prefix
                positions[row, place] = before + np.arange(length)
                at += length
    return segments, positions, prefixes


@pytest.mark.parametrize(
    ("axes", "seen", "softcap", "length"),
    [
        ({}, {}, 2.0, 640),
        ({"fsdp": 2, "tensor": 2}, {"window": 40}, None, 600),
        ({"data": 2}, {"chunk": 50}, None, 620),
    ],
    ids=["soft cap", "window on a mesh", "chunks, prompts cut off"],
)
@pytest.mark.parametrize("shared", [True, False])
def test_blocks_that_look_no_further_than_documents_reach_give_what_whole_rows_give(
    axes, seen, softcap, length, shared
):
    # Documents begin and end anywhere in blocks of 64: prompts longer than the completions, of one token and none,
    # families inside one block, a prompt across a border, and one that stands at the end of its row.
    made = [
        [(100, [70, 64, 1, 70]), (1, [3, 2]), (0, [5]), (30, [70, 11]), (99, [1])],
        [(0, [1, 70]), (100, [70] * 3), (2, [9]), (77, [60, 70])],
    ]
    segments, positions, prefixes = families_of(made, length)
    sight = Sight(segments, positions, **seen, prefix_ids_BT=prefixes if shared else None)
    rng = np.random.default_rng(0)
    q, cotangent = rng.normal(size=(2, 2, length, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, length, 2, 8)).astype(np.float32)
    cotangent *= (segments > 0)[..., None, None]
    wanted, wanted_gradients = values_and_gradients(XLA, sight, softcap, q, k, v, cotangent)
    mesh = make_mesh(axes, jax.devices()[: np.prod(list(axes.values()))]) if axes else None
    reach = Reach(70, 100) if shared else Reach(100)
    assert pays(reach, length)
    got, gradients = values_and_gradients(RowAttention("xla", mesh, reach=reach), sight, softcap, q, k, v, cotangent)
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert min(float(jnp.abs(g).max()) for g in wanted_gradients) > 0.1


def test_splash_refuses_pieces_that_are_no_whole_blocks():
    segments, positions = rows([[300]], 300)
    how = RowAttention("splash", make_mesh({"context": 2}, jax.devices()[:2]), interpret=True)
    with pytest.raises(UserError, match=r"300 tokens are no whole blocks of 128 on each of 2 .*a multiple of 256"):
        row_attention(how, [Sight(segments, positions)], scale=SCALE, softcap=None)


@pytest.mark.parametrize(("shared", "context"), [(False, 1), (True, 1), (True, 4)])
def test_what_cudnn_is_asked_for_is_what_xla_computes(shared, context, monkeypatch):
    # Everything but the kernel itself: mask, causal flag, scale, odd length, shards. JAX's own XLA form answers for it.
    plain = jax.nn.dot_product_attention
    asked = []

    def instead(*arrays, implementation, **how):
        asked.append(implementation)
        return plain(*arrays, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    length = 17 if context == 1 else 20  # pieces of 5 tokens are padded too
    segments, positions = rows([[4, 3, 7], [9, 2, 5]], length)
    # The second and third documents go on from the first.
    prefixes = np.where(segments > 1, 1, 0) if shared else None
    rng = np.random.default_rng(0)
    q, cotangent = rng.normal(size=(2, 2, length, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, length, 2, 8)).astype(np.float32)
    cotangent *= (segments > 0)[..., None, None]
    sight = Sight(segments, positions, 5, prefix_ids_BT=prefixes)
    wanted, wanted_gradients = values_and_gradients(XLA, sight, None, q, k, v, cotangent)
    axes = {"fsdp": 2, "tensor": 2} if context == 1 else {"context": 4, "tensor": 2}
    mesh = make_mesh(axes, jax.devices()[: 2 * max(context, 2)])
    got, gradients = values_and_gradients(RowAttention("cudnn", mesh), sight, None, q, k, v, cotangent)
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert set(asked) == {"cudnn"}


def test_a_model_with_three_kinds_of_layers_is_the_same_under_splash_on_a_mesh():
    # Layers are scanned, so which of the kernels a layer runs is decided inside the program.
    config = ModelConfig(
        layers=3, d_model=16, heads=4, kv_heads=2, head_dim=8, d_ff=16, vocab_size=19, attention_pattern="LCG",
        window=20, attention_chunk=25, local_rope_theta=100.0,
    )  # fmt: skip
    params = init_params(config, seed=0)
    segments, positions = rows([[60, 50], [128]], 128)
    tokens = np.random.default_rng(0).integers(0, 19, segments.shape)
    cotangent = np.random.default_rng(1).normal(size=(*segments.shape, 16)) * (segments > 0)[..., None]
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])

    def loss(params, how):
        hidden = forward(config, params, tokens, positions, segments, remat="full", attention=how)
        return jnp.sum(hidden * cotangent), hidden

    # Compiling is most of the work, and the numbers are float32 all the same.
    unhurried = {"xla_backend_optimization_level": 0}
    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1, compiler_options=unhurried)
    ((_, wanted), wanted_gradients), ((_, got), gradients) = (
        run(params, how) for how in (XLA, RowAttention("splash", mesh, interpret=True))
    )
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[segments > 0], wanted[segments > 0], atol=2e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * float(jnp.abs(other).max()))
    assert float(jnp.abs(wanted_gradients["layers"]["k"]).max()) > 1


def fake_mesh(platform, capability=None, kind="device"):
    """All that the choice looks at: the first device's platform and generation."""
    device = SimpleNamespace(platform=platform, compute_capability=capability, device_kind=kind)
    return SimpleNamespace(devices=np.array([device]))


BF16 = ModelConfig(compute_dtype="bfloat16", head_dim=64)


@pytest.mark.parametrize(
    ("mesh", "changes", "wanted"),
    [
        (fake_mesh("cpu"), {}, "xla"),
        (fake_mesh("tpu"), {}, "splash"),
        (fake_mesh("tpu"), {"compute_dtype": "float32", "attention_softcap": 50.0, "head_dim": 2}, "splash"),
        (fake_mesh("gpu", "9.0"), {}, "cudnn"),
        (fake_mesh("gpu", "9.0"), {"head_dim": 256}, "cudnn"),
        (fake_mesh("gpu", "8.0"), {"head_dim": 256}, "xla"),
        (fake_mesh("gpu", "7.5"), {}, "xla"),
        (fake_mesh("gpu", "gfx942"), {}, "xla"),
        (fake_mesh("gpu", "9.0"), {"attention_softcap": 50.0}, "xla"),
        (fake_mesh("gpu", "9.0"), {"compute_dtype": "float32"}, "xla"),
    ],
)
def test_auto_takes_the_devices_kernel_where_it_can_run_and_says_why(mesh, changes, wanted):
    choice = choose_attention(BF16.model_copy(update=changes), mesh)
    assert choice.implementation == wanted
    platform = mesh.devices.flat[0].platform
    assert platform in choice.reason
    assert ("cudnn cannot run" in choice.reason) == (platform == "gpu" and wanted == "xla")


@pytest.mark.parametrize(
    ("asked", "mesh", "changes", "message"),
    [
        ("cudnn", fake_mesh("cpu"), {}, "kernel for GPU, the trainer's devices are cpu"),
        ("splash", fake_mesh("gpu", "9.0"), {}, "kernel for TPU"),
        ("cudnn", fake_mesh("gpu", "9.0"), {"compute_dtype": "float32"}, "set model.compute_dtype=bfloat16"),
        ("cudnn", fake_mesh("gpu", "9.0"), {"attention_softcap": 50.0}, "soft cap"),
        ("cudnn", fake_mesh("gpu", "8.6"), {"head_dim": 136}, "up to 128"),
        ("cudnn", fake_mesh("gpu", "9.0"), {"head_dim": 60}, "multiple of 8"),
        ("cudnn", fake_mesh("gpu", "7.5", "Tesla T4"), {}, "this is Tesla T4"),
    ],
)
def test_a_kernel_that_was_asked_for_and_cannot_run_is_refused(asked, mesh, changes, message):
    with pytest.raises(UserError, match=message):
        choose_attention(BF16.model_copy(update={**changes, "attention": asked}), mesh)
    assert choose_attention(BF16.model_copy(update={"attention": "xla"}), mesh).implementation == "xla"


def test_splash_takes_shared_prompts_where_no_layer_has_a_window_and_auto_knows_it():
    splash = {"attention": "splash"}
    local = BF16.model_copy(update={"attention_pattern": "LG", "window": 64})
    with pytest.raises(UserError, match=r"windows count places .*set train\.share_prompts=false"):
        choose_attention(local.model_copy(update=splash), fake_mesh("tpu"), share_prompts=True)
    assert choose_attention(local.model_copy(update=splash), fake_mesh("tpu")).implementation == "splash"
    assert choose_attention(local, fake_mesh("tpu"), share_prompts=True).implementation == "xla"
    assert choose_attention(BF16, fake_mesh("tpu"), share_prompts=True).implementation == "splash"
    assert choose_attention(BF16, fake_mesh("gpu", "9.0"), share_prompts=True).implementation == "cudnn"
