import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.kv_cache import empty_cache, read_layer, write_span, write_tokens
from jaxrl_llm.models.quantised import dequantise, input_axes, quantise
from jaxrl_llm.models.transformer import (
    abstract_params,
    decode,
    extend,
    forward,
    head_weight,
    init_params,
    logical_axes,
)

CONFIG = ModelConfig(
    layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab_size=19, max_context=16, tie_embeddings=False
)
T = 16


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, seed=3)


run_forward = jax.jit(lambda p, t, pos, seg: forward(CONFIG, p, t, pos, seg))


def hidden(params, rows):
    """Hidden states of one packed [1, T] row holding the documents `rows`."""
    tokens, positions, segments = (np.zeros((1, T), np.int32) for _ in range(3))
    start = 0
    for index, row in enumerate(rows, 1):
        end = start + len(row)
        tokens[0, start:end], positions[0, start:end], segments[0, start:end] = row, range(len(row)), index
        start = end
    return np.asarray(run_forward(params, tokens, positions, segments))[0]


def reference_hidden(params, tokens):
    """The same decoder in float64 numpy, written token by token from the equations."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + CONFIG.norm_eps) * scale

    def rope(x):  # [T n C]
        half = CONFIG.head_dim // 2
        angle = np.arange(len(x))[:, None] * CONFIG.rope_theta ** (-np.arange(half) / half)
        complex_x = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([complex_x.real, complex_x.imag], -1)

    x = p["embed"][np.asarray(tokens)]
    for i in range(CONFIG.layers):
        layer = {name: w[i] for name, w in p["layers"].items()}
        y = norm(x, layer["attn_norm"])
        q, k, v = (np.einsum("td,dhc->thc", y, layer[n]) for n in "qkv")
        q, k = rope(q), rope(k)
        out = np.zeros_like(q)
        for h in range(CONFIG.heads):
            kv = h // (CONFIG.heads // CONFIG.kv_heads)
            for t in range(len(tokens)):
                scores = k[: t + 1, kv] @ q[t, h] / np.sqrt(CONFIG.head_dim)
                w = np.exp(scores - scores.max())
                out[t, h] = (w / w.sum()) @ v[: t + 1, kv]
        x = x + np.einsum("thc,hcd->td", out, layer["o"])
        y = norm(x, layer["mlp_norm"])
        gate = y @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"])) @ layer["down"]
    return norm(x, p["final_norm"])


def test_forward_equals_the_equations_in_float64(params):
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    np.testing.assert_allclose(hidden(params, [tokens])[:8], reference_hidden(params, tokens), atol=2e-5)


def test_packing_does_not_move_a_document(params):
    documents = [[5, 6], [7, 8, 9, 10, 11], [1, 2, 3]]
    packed = hidden(params, documents)
    start = 0
    for document in documents:
        alone = hidden(params, [document])[: len(document)]
        np.testing.assert_allclose(packed[start : start + len(document)], alone, atol=1e-5)
        start += len(document)


def test_a_later_token_never_changes_an_earlier_state(params):
    one, two = hidden(params, [[1, 2, 3, 4, 5]]), hidden(params, [[1, 2, 3, 9, 9]])
    np.testing.assert_array_equal(one[:3], two[:3])
    assert np.abs(one[3] - two[3]).max() > 1e-3


@pytest.mark.parametrize("left", [0, 3, 9])
def test_padding_on_either_side_does_not_move_a_document(params, left):
    # Reported of other stacks: real tokens attended to pads
    tokens, positions, segments = (np.zeros((1, T), np.int32) for _ in range(3))
    tokens[:] = 7  # what stands in the padding is nobody's business
    tokens[0, left : left + 5], positions[0, left : left + 5], segments[0, left : left + 5] = (
        [5, 6, 7, 8, 9],
        range(5),
        1,
    )
    padded = np.asarray(run_forward(params, tokens, positions, segments))[0, left : left + 5]
    np.testing.assert_allclose(padded, hidden(params, [[5, 6, 7, 8, 9]])[:5], atol=1e-5)
    assert np.isfinite(np.asarray(run_forward(params, tokens, positions, segments))).all()


def test_prefill_in_chunks_and_decode_equal_the_full_forward(params):
    # Two slots: 6 tokens prefilled in chunks of 3, of which slot 1 holds 4; the rest is decoded one by one.
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    full = hidden(params, [tokens])
    cache = empty_cache(layers=2, slots=2, length=T, kv_heads=2, head_dim=8, dtype=jnp.float32)
    prefill = jax.jit(lambda p, t, start, c: extend(CONFIG, p, t, start, c))
    rows = np.stack([tokens[:6], np.append(tokens[:4], [7, 7])])
    for start in (0, 3):
        states, cache = prefill(params, rows[:, start : start + 3], np.int32(start), cache)
        np.testing.assert_allclose(states[0], full[start : start + 3], atol=1e-5)
        known = max(0, min(3, 4 - start))
        np.testing.assert_allclose(states[1, :known], full[start : start + known], atol=1e-5)
    step = jax.jit(lambda p, t, pos, c: decode(CONFIG, p, t, pos, c))
    for offset in range(2):
        positions = np.array([6 + offset, 4 + offset], np.int32)
        states, cache = step(params, tokens[positions], positions, cache)
        np.testing.assert_allclose(states, full[positions], atol=1e-5)


def test_an_int8_cache_and_int8_weights_stay_within_their_rounding():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 2, 8)).astype(np.float32) * 10)  # [S T K C]
    x = x.at[0, 0].set(0.0)
    cache = write_span(empty_cache(layers=1, slots=2, length=5, kv_heads=2, head_dim=8, dtype=jnp.int8), 0, 1, x, -x)
    cache = write_tokens(cache, 0, jnp.array([4, 9]), x[:, 1], x[:, 2])  # slot 1's position does not exist
    k, v = read_layer(cache, 0, jnp.float32)
    k = k.swapaxes(-1, -2)
    half_step = np.abs(x).max(axis=-1, keepdims=True).swapaxes(1, 2) / 254 + 1e-6
    assert (np.abs(k[:, :, 1:4] - x.swapaxes(1, 2)) <= half_step).all()
    assert (np.abs(v[:, :, 1:4] + x.swapaxes(1, 2)) <= half_step).all()
    assert np.abs(k[0, :, 4] - x[0, 1]).max() <= half_step.max()
    np.testing.assert_array_equal(k[1, :, 4], 0)
    for names in (("embed", "heads", "head_dim"), ("heads", "head_dim", "embed"), ("mlp", "embed")):
        weight = jnp.asarray(rng.normal(size=(6, 4, 5)[: len(names)]).astype(np.float32))
        encoded = quantise(weight, names)
        summed = input_axes(names)
        assert encoded.scale.shape == tuple(1 if axis in summed else n for axis, n in enumerate(weight.shape))
        back = dequantise({"w": encoded, "norm": weight[0]}, jnp.float32)
        assert (np.abs(back["w"] - weight) <= np.abs(weight).max(axis=summed, keepdims=True) / 254 + 1e-6).all()
        np.testing.assert_array_equal(back["norm"], weight[0])


def test_every_leaf_has_one_logical_axis_per_dimension(params):
    axes = logical_axes(CONFIG)
    ranks = jax.tree.map(lambda a: len(a), axes, is_leaf=lambda a: isinstance(a, tuple))
    assert ranks == jax.tree.map(lambda p: p.ndim, params)
    assert axes["layers"]["q"] == ("layers", "embed", "heads", "head_dim")
    assert abstract_params(CONFIG) == jax.eval_shape(lambda: init_params(CONFIG, 0))


def test_the_head_is_the_embedding_only_when_tied(params):
    assert head_weight(params) is params["head"]
    tied = init_params(CONFIG.model_copy(update={"tie_embeddings": True}), seed=3)
    assert "head" not in tied
    assert head_weight(tied) is tied["embed"]


def test_rope_theta_of_the_config_is_used(params):
    # Reported of other stacks.
    other = CONFIG.model_copy(update={"rope_theta": 5e5})
    row = np.arange(T, dtype=np.int32)[None]
    one = forward(CONFIG, params, row, row, np.ones_like(row))
    two = forward(other, params, row, row, np.ones_like(row))
    assert float(jnp.abs(one - two).max()) > 1e-2
