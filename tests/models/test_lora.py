import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.config import LoraConfig, ModelConfig, load
from jaxrl_llm.models.flops import adapter_params, matmul_params, train_flops
from jaxrl_llm.models.lora import attach, dense_projections, init_adapters, merge, trainable
from jaxrl_llm.models.transformer import DecoderLayer, abstract_params, forward, logical_axes
from jaxrl_llm.types import UserError

MODEL = ModelConfig(layers=2, d_model=32, heads=4, kv_heads=2, head_dim=16, d_ff=48, vocab_size=20, max_context=16)
LORA = LoraConfig(rank=3, alpha=4.0)
ROW = np.random.default_rng(0).integers(0, 20, (2, 16)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(16, dtype=np.int32), ROW.shape)


def drawn(abstract, seed, scale=0.2):
    """Noise of these shapes; norms around one. Drawn by numpy: nothing compiles."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        return scale * rng.standard_normal(x.shape, np.float32) + ("norm" in jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(leaf, abstract)


@pytest.fixture(scope="module")
def base():
    return drawn(abstract_params(MODEL), 1)


@pytest.fixture(scope="module")
def adapters():
    return drawn(trainable(MODEL, LORA)[0], 2)


hidden = jax.jit(lambda p: forward(MODEL, p, ROW, POSITIONS, np.ones_like(ROW)))


def test_a_fresh_adapter_changes_nothing(base):
    fresh = init_adapters(MODEL, LORA, seed=7)
    np.testing.assert_array_equal(hidden(attach(base, fresh, LORA)), hidden(base))
    jax.tree.map(np.testing.assert_array_equal, merge(base, fresh, LORA), base)


def test_adapters_are_born_as_peft_draws_them():
    fresh = init_adapters(MODEL, LoraConfig(rank=64), seed=7)["lora"]
    assert sorted(fresh) == sorted(LORA.targets)
    inputs = {"o": 64, "down": 48}
    for target, pair in fresh.items():
        assert (pair["b"] == 0).all()
        a, bound = np.asarray(pair["a"]), inputs.get(target, 32) ** -0.5
        assert 0.99 * bound < np.abs(a).max() <= bound
        np.testing.assert_allclose(a.std(), bound / np.sqrt(3), rtol=0.03)  # a uniform's
        assert not np.array_equal(a[0], a[1])
    assert not np.array_equal(fresh["q"]["a"], fresh["k"]["a"])
    again, other = (init_adapters(MODEL, LoraConfig(rank=64), seed)["lora"]["q"]["a"] for seed in (7, 8))
    np.testing.assert_array_equal(again, fresh["q"]["a"])
    assert not np.array_equal(other, fresh["q"]["a"])


def test_merged_equals_unmerged(base, adapters):
    unmerged = hidden(attach(base, adapters, LORA))
    on_host, on_device = merge(base, adapters, LORA), merge(jax.tree.map(jnp.asarray, base), adapters, LORA)
    np.testing.assert_allclose(hidden(on_host), unmerged, atol=1e-5)
    np.testing.assert_allclose(hidden(on_device), unmerged, atol=1e-5)
    assert np.abs(hidden(base) - unmerged).max() > 0.3
    assert isinstance(on_host["layers"]["q"], np.ndarray)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), on_host, on_device)
    assert on_host["embed"] is base["embed"]
    assert on_host["layers"]["attn_norm"] is base["layers"]["attn_norm"]


def test_the_scale_is_alpha_over_the_rank_or_its_root(base, adapters):
    assert LORA.scale == 4 / 3
    rooted = LORA.model_copy(update={"rslora": True})
    assert rooted.scale == 4 / np.sqrt(3)
    q, a, b = base["layers"]["q"], *adapters["lora"]["q"].values()
    for lora in (LORA, rooted):
        want = q + lora.scale * np.einsum("ldr,lrhc->ldhc", a.astype(np.float64), b)
        np.testing.assert_allclose(merge(base, adapters, lora)["layers"]["q"], want, atol=1e-6)


def test_a_merge_is_rounded_once(base, adapters):
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), base)
    for weights in (half, jax.tree.map(np.asarray, half)):
        exact = merge(weights, adapters, LORA, "float32")["layers"]["o"]
        assert exact.dtype == np.float32
        a, b = adapters["lora"]["o"].values()
        want = weights["layers"]["o"].astype(np.float32) + LORA.scale * np.einsum("lhcr,lrd->lhcd", a, b)
        np.testing.assert_allclose(exact, want, atol=1e-6)
        rounded = merge(weights, adapters, LORA)["layers"]["o"]
        assert rounded.dtype == jnp.bfloat16
        np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


def test_some_targets_leave_the_others_alone(base):
    lora = LoraConfig(rank=2, targets=("v", "down"))
    adapters = drawn(trainable(MODEL, lora)[0], 3)
    assert sorted(adapters["lora"]) == ["down", "v"]
    merged = merge(base, adapters, lora)
    changed = {name for name, w in merged["layers"].items() if w is not base["layers"][name]}
    assert changed == {"v", "down"}
    np.testing.assert_allclose(hidden(merged), hidden(attach(base, adapters, lora)), atol=1e-5)


@pytest.mark.parametrize("target", LORA.targets)
def test_full_rank_adapters_reach_any_matrix(base, target):
    # W + A B with B the wanted change and A the identity, or the other way round: whichever side is narrower.
    shape = base["layers"][target].shape
    cut = 3 if target == "o" else 2
    inputs, outputs = int(np.prod(shape[1:cut])), int(np.prod(shape[cut:]))
    rank = min(inputs, outputs)
    lora = LoraConfig(rank=rank, alpha=rank, targets=(target,))
    change = np.random.default_rng(4).standard_normal(shape, np.float32)
    flat, one = change.reshape(2, inputs, outputs), np.stack([np.eye(rank, dtype=np.float32)] * 2)
    a, b = (flat, one) if outputs == rank else (one, flat)
    pair = {"a": a.reshape(*shape[:cut], rank), "b": b.reshape(2, rank, *shape[cut:])}
    merged = merge(base, {"lora": {target: pair}}, lora)["layers"][target]
    np.testing.assert_allclose(merged, base["layers"][target] + change, atol=1e-6)


@pytest.mark.parametrize("target", ["q", "o", "gate"])
def test_gradients_are_those_of_the_full_weight_by_the_chain_rule(target):
    """d(A) = dW B^T and d(B) = A^T dW, in float64, for each way a projection has inputs and outputs."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(5)
        w = rng.standard_normal(abstract_params(MODEL)["layers"][target].shape[1:])
        cut = 2 if target == "o" else 1
        x_shape, y_shape = w.shape[:cut], w.shape[cut:]
        x = rng.standard_normal((5, *x_shape)).reshape(5, -1)
        a, b = rng.standard_normal((*x_shape, 3)), rng.standard_normal((3, *y_shape))
        seen = rng.standard_normal((5, *y_shape))

        def loss(y):
            return jnp.sum(seen * jnp.tanh(y))

        def unmerged(a, b):
            layer = nnx.eval_shape(lambda: DecoderLayer(MODEL, rngs=nnx.Rngs(0)))
            layer.adapters = nnx.data({target: {"a": a, "b": b}})
            return loss(layer._adapt(target, x, (x @ w.reshape(x.shape[1], -1)).reshape(5, *y_shape)))

        def full(w):
            return loss((x @ w.reshape(x.shape[1], -1)).reshape(5, *y_shape))

        product = np.tensordot(a, b, axes=1)
        dw = np.asarray(jax.grad(full)(w + product)).reshape(x.shape[1], -1)
        da, db = jax.grad(unmerged, argnums=(0, 1))(a, b)
        np.testing.assert_allclose(unmerged(a, b), full(w + product), rtol=1e-12)
        np.testing.assert_allclose(da, (dw @ b.reshape(3, -1).T).reshape(a.shape), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(db, (a.reshape(-1, 3).T @ dw).reshape(b.shape), rtol=1e-12, atol=1e-12)
        assert da.dtype == np.float64


def test_adapters_live_where_their_matrices_live():
    axes, matrices = trainable(MODEL, LORA)[1]["lora"], logical_axes(MODEL)["layers"]
    assert axes["q"] == {"a": ("layers", "embed", "rank"), "b": ("layers", "rank", "heads", "head_dim")}
    assert axes["o"] == {"a": ("layers", "heads", "head_dim", "rank"), "b": ("layers", "rank", "embed")}
    for target, pair in axes.items():
        assert pair["a"][:-1] + pair["b"][2:] == matrices[target]


def test_adapters_are_float32_on_a_bfloat16_base():
    half = MODEL.model_copy(update={"param_dtype": "bfloat16"})
    assert {str(x.dtype) for x in jax.tree.leaves(trainable(half, LORA)[0])} == {"float32"}


@pytest.mark.parametrize("names", [("layers", "experts", "embed", "mlp"), {"a": ("layers", "mlp")}, None])
def test_experts_take_no_adapters(names):
    axes = logical_axes(MODEL)["layers"] | {"gate": names}
    if names is None:
        del axes["gate"]
    with pytest.raises(UserError, match=r"lora.targets has gate, but .* take one of \['k', 'v', 'o', 'up', 'down'\]"):
        dense_projections(axes, ("q", "gate"))


def test_the_count_of_adapters_is_that_of_the_tree():
    for lora in (LORA, LoraConfig(rank=2, targets=("k", "o", "down"))):
        sizes = sum(x.size for x in jax.tree.leaves(trainable(MODEL, lora)[0]))
        assert adapter_params(MODEL, lora) == sizes
        assert train_flops(MODEL, 10, lora) == 10 * (4 * matmul_params(MODEL) + 6 * sizes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.targets=[]"], "must name at least one projection"),
        (["lora.targets=[q,q]"], "none twice"),
        (["lora.targets=[q,embed]"], "lora.targets"),
        (["lora.rank=-1"], "lora.rank"),
        (["lora.alpha=0"], "lora.alpha"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, overrides, message):
    (tmp_path / "c.yaml").write_text("lora: {rank: 4}\n")
    with pytest.raises(UserError, match=message):
        load(tmp_path / "c.yaml", overrides)
