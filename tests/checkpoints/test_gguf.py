import contextlib
import re
import sys
import types

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.checkpoints.gguf import (
    read_gguf_config,
    read_gguf_metadata,
    read_gguf_params,
    resolve_init,
    unpermute,
)
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.types import UserError

CONFIG = {
    "layers": 2,
    "d_model": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "d_ff": 64,
    "vocab_size": 16,
    "rope_theta": 12345.5,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "max_context": 128,
}
LEAVES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
}
Q = gguf.GGMLQuantizationType


def make_params(d=32):
    draw = np.random.default_rng(0)
    shapes = {
        "attn_norm": (2, d),
        "q": (2, d, 4, 8),
        "k": (2, d, 2, 8),
        "v": (2, d, 2, 8),
        "o": (2, 4, 8, d),
        "mlp_norm": (2, d),
        "gate": (2, d, 64),
        "up": (2, d, 64),
        "down": (2, 64, d),
    }
    layers = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {
        "embed": draw.normal(size=(16, d)).astype(np.float32),
        "head": draw.normal(size=(16, d)).astype(np.float32),
        "final_norm": draw.normal(size=d).astype(np.float32),
        "layers": layers,
    }


def interleave(weight_DHC):
    """[D, H, C] -> the file's [H * C, D], row 2c of a head from column c, row 2c + 1 from column c + C/2."""
    D, H, C = weight_DHC.shape
    rows = np.empty((H * C, D), np.float32)
    for head in range(H):
        for c in range(C // 2):
            rows[head * C + 2 * c] = weight_DHC[:, head, c]
            rows[head * C + 2 * c + 1] = weight_DHC[:, head, c + C // 2]
    return rows


def tensors_of(params):
    """The file's tensors for our parameter tree, layer by layer."""
    out = {"token_embd.weight": params["embed"], "output_norm.weight": params["final_norm"]}
    if "head" in params:
        out["output.weight"] = params["head"]
    d = params["embed"].shape[1]
    for layer in range(2):
        for leaf, name in LEAVES.items():
            x = params["layers"][leaf][layer]
            if leaf in ("q", "k"):
                x = interleave(x)
            elif leaf == "v":
                x = x.reshape(d, -1).T
            elif leaf == "o":
                x = x.reshape(-1, d).T
            elif x.ndim == 2:
                x = x.T
            out[f"blk.{layer}.{name}.weight"] = np.ascontiguousarray(x)
    return out


def write(path, tensors, *, keys=(), kind=Q.F32, arch="llama", d=32):
    """`keys` changes metadata: a pair (key, None) leaves the key out."""
    writer = gguf.GGUFWriter(path, arch)
    fields = {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": d,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 12345.5,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 16,
    } | dict(keys)
    for key, value in fields.items():
        key = key.replace("llama.", f"{arch}.") if arch == "qwen2" else key
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, array in tensors.items():
        if isinstance(array, tuple):  # raw blocks and their type
            writer.add_tensor(name, array[0], raw_dtype=array[1])
        elif array.ndim == 1 or kind == Q.F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def params():
    return make_params()


@pytest.fixture
def tensors(params):
    return tensors_of(params)


def flat(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_float32_weights_come_back_exactly_and_the_shape_makes_a_model_config(tmp_path, params, tensors):
    path = write(tmp_path / "t.gguf", tensors)
    config = read_gguf_config(path)
    assert config == CONFIG
    assert ModelConfig(**config).max_context == 128
    read = dict(flat(read_gguf_params(path)))
    assert sorted(read) == sorted(name for name, _ in flat(params))
    for name, array in flat(params):
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], array, err_msg=name)


def test_without_an_output_tensor_the_embedding_is_tied(tmp_path, params):
    del params["head"]
    path = write(tmp_path / "t.gguf", tensors_of(params))
    assert read_gguf_config(path)["tie_embeddings"] is True
    assert "head" not in read_gguf_params(path)


def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path, params, tensors):
    path = write(tmp_path / "t.gguf", tensors)
    for name, array in flat(read_gguf_params(path, "bfloat16")):
        assert array.dtype.name == "bfloat16", name
        wanted = dict(flat(params))[name]
        np.testing.assert_allclose(array.astype(np.float32), wanted, rtol=2**-8, atol=0, err_msg=name)


def test_unpermuted_rows_give_the_same_scores_under_the_half_split_rotation():
    draw = np.random.default_rng(1)
    q_file, k_file = draw.normal(size=(2, 8, 3))  # one head of width 8, input width 3
    x = draw.normal(size=(5, 3))
    angles = np.arange(5)[:, None] * 100.0 ** (-np.arange(4) / 4)

    def rotate_neighbours(y):
        pairs = (y[:, ::2] + 1j * y[:, 1::2]) * np.exp(1j * angles)
        return np.stack([pairs.real, pairs.imag], -1).reshape(y.shape)

    def rotate_halves(y):
        turned = (y[:, :4] + 1j * y[:, 4:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    wanted = rotate_neighbours(x @ q_file.T) @ rotate_neighbours(x @ k_file.T).T
    q, k = unpermute(q_file, 1), unpermute(k_file, 1)
    np.testing.assert_allclose(rotate_halves(x @ q.T) @ rotate_halves(x @ k.T).T, wanted, rtol=1e-12)
    assert np.abs(rotate_halves(x @ q_file.T) @ rotate_halves(x @ k_file.T).T - wanted).max() > 0.1


# Half a step of each format, as a share of the largest value of its block; the scales are float16.
STEP = {
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q8_0": 0.6 / 127,
    "Q5_0": 1.1 / 16,
    "Q5_1": 1.1 / 31,
    "Q4_0": 1.1 / 8,
    "Q4_1": 1.1 / 15,
}


@pytest.mark.parametrize("kind", STEP)
def test_dequantised_weights_are_within_one_step(tmp_path, params, tensors, kind):
    path = write(tmp_path / "t.gguf", tensors, kind=Q[kind])
    assert read_gguf_config(path) == CONFIG
    for name, array in flat(read_gguf_params(path)):
        wanted = dict(flat(params))[name]
        error = np.abs(array - wanted).max()
        assert error <= STEP[kind] * np.abs(wanted).max(), name
        assert error > 0 or "norm" in name, name


def test_a_block_of_q6_k_worked_by_hand(tmp_path):
    # 256 weights per block: value = d * scale[i // 16] * (six bits - 32). Low nibble 1, high bits 2: 33 - 32 = 1.
    row = np.concatenate(
        [
            np.full(128, 0x11, np.uint8),  # two low nibbles each
            np.full(64, 0b10101010, np.uint8),  # four pairs of high bits each
            np.arange(16, dtype=np.int8).view(np.uint8),  # a scale per 16 weights
            np.array([0.5], np.float16).view(np.uint8),  # d
        ]
    )
    tensors = tensors_of(make_params(d=256))
    tensors["token_embd.weight"] = (np.tile(row, (16, 1)), Q.Q6_K)
    path = write(tmp_path / "t.gguf", tensors, d=256)
    np.testing.assert_array_equal(read_gguf_params(path)["embed"], np.tile(np.repeat(np.arange(16) * 0.5, 16), (16, 1)))


def test_the_formats_defaults_are_used_where_it_has_some(tmp_path, tensors):
    keys = [("llama.attention.key_length", None), ("llama.attention.value_length", None)]
    keys += [("llama.rope.dimension_count", None), ("llama.vocab_size", None)]
    keys += [("tokenizer.ggml.tokens", [f"t{i}" for i in range(16)])]
    path = write(tmp_path / "t.gguf", tensors, keys=keys)
    assert read_gguf_config(path) == CONFIG
    assert read_gguf_metadata(path)["tokenizer.ggml.tokens"][15] == "t15"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.rope.freq_base": None}, "llama.rope.freq_base is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.context_length": None}, "llama.context_length is missing"),
        ({"llama.vocab_size": None}, "llama.vocab_size is missing"),
        ({"llama.context_length": 0}, "llama.context_length is 0; one positive int"),
        ({"llama.rope.freq_base": float("inf")}, "llama.rope.freq_base is inf"),
        ({"llama.feed_forward_length": [64, 64]}, "llama.feed_forward_length is [64, 64]; one positive int"),
        ({"llama.feed_forward_length": "64"}, "llama.feed_forward_length is '64'"),
        ({"llama.attention.head_count": 5, "llama.attention.key_length": None}, "32 is not a multiple of head_count 5"),
        ({"llama.attention.head_count_kv": 3}, "4 heads of width 8 over 3 key/value heads"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length differs from the head width 8"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count differs from the head width 8"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type 'linear' is not supported"),
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
    ],
)
def test_metadata_that_is_missing_or_not_supported_is_named(tmp_path, tensors, keys, message):
    path = write(tmp_path / "t.gguf", tensors, keys=keys.items())
    for read in (read_gguf_config, read_gguf_params):
        with pytest.raises(UserError, match=re.escape(message)) as error:
            read(path)
        assert str(path) in str(error.value)


def test_another_architecture_is_named(tmp_path, tensors):
    path = write(tmp_path / "t.gguf", tensors, arch="falcon")
    with pytest.raises(UserError, match=r"general\.architecture 'falcon' is not supported; known: 'llama', 'qwen2'"):
        read_gguf_config(path)


def qwen2(params):
    """The tensors of a qwen2: no row is moved, and queries, keys and values have biases."""
    out = tensors_of(params)
    draw = np.random.default_rng(5)
    for layer in range(2):
        for leaf in ("q", "k"):
            rows = params["layers"][leaf][layer].reshape(32, -1).T
            out[f"blk.{layer}.attn_{leaf}.weight"] = np.ascontiguousarray(rows)
        for leaf, width in (("q", 32), ("k", 16), ("v", 16)):
            out[f"blk.{layer}.attn_{leaf}.bias"] = draw.normal(size=width).astype(np.float32)
    return out


def test_a_qwen2_has_biases_and_rotary_pairs_as_we_have_them(tmp_path, params):
    tensors = qwen2(params)
    path = write(tmp_path / "t.gguf", tensors, arch="qwen2")
    assert read_gguf_config(path) == CONFIG | {"qkv_bias": True}
    read = read_gguf_params(path)
    for leaf, heads in (("q", 4), ("k", 2), ("v", 2)):
        np.testing.assert_array_equal(read["layers"][leaf], params["layers"][leaf])
        wanted = [tensors[f"blk.{layer}.attn_{leaf}.bias"].reshape(heads, 8) for layer in range(2)]
        np.testing.assert_array_equal(read["layers"][f"{leaf}_bias"], wanted)
    del tensors["blk.1.attn_k.bias"]
    path = write(tmp_path / "none.gguf", tensors, arch="qwen2")
    with pytest.raises(UserError, match=r"tensor 'blk\.1\.attn_k\.bias' is missing"):
        read_gguf_config(path)
    path = write(tmp_path / "llama.gguf", qwen2(params))
    with pytest.raises(UserError, match=r"unexpected tensor 'blk\.0\.attn_k\.bias' .*; not a plain llama"):
        read_gguf_config(path)
    path = write(tmp_path / "scaled.gguf", qwen2(params), arch="qwen2", keys=[("llama.rope.scaling.type", "yarn")])
    with pytest.raises(UserError, match=r"qwen2\.rope\.scaling\.type 'yarn' is not supported"):
        read_gguf_config(path)


def missing(tensors):
    del tensors["blk.1.ffn_up.weight"]


def extra(tensors):
    tensors["rope_freqs.weight"] = np.ones(4, np.float32)


def swapped(tensors):
    tensors["blk.1.ffn_up.weight"] = np.ascontiguousarray(tensors["blk.1.ffn_up.weight"].T)


def more_layers(tensors):
    tensors["blk.2.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"]


def no_norm(tensors):
    del tensors["output_norm.weight"]


def short_vocabulary(tensors):
    tensors["output.weight"] = tensors["output.weight"][:15]


def integers(tensors):
    tensors["blk.0.attn_norm.weight"] = np.ones(32, np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing, "tensor 'blk.1.ffn_up.weight' is missing"),
        (extra, "unexpected tensor 'rope_freqs.weight'"),
        (swapped, "tensor 'blk.1.ffn_up.weight' has shape (32, 64), (64, 32) is wanted"),
        (more_layers, "unexpected tensor 'blk.2.ffn_up.weight'"),
        (no_norm, "tensor 'output_norm.weight' is missing"),
        (short_vocabulary, "tensor 'output.weight' has shape (15, 32), (16, 32) is wanted"),
        (integers, "tensor 'blk.0.attn_norm.weight' has type 26, which cannot be dequantised"),
    ],
)
def test_a_tensor_that_is_missing_unexpected_or_misshapen_is_named(tmp_path, tensors, change, message):
    change(tensors)
    path = write(tmp_path / "t.gguf", tensors)
    for read in (read_gguf_config, read_gguf_params):
        with pytest.raises(UserError, match=re.escape(message)) as error:
            read(path)
        assert str(path) in str(error.value)


def test_values_that_are_not_finite_are_refused_with_the_tensors_name(tmp_path, tensors):
    tensors["blk.1.attn_v.weight"][3, 4] = np.nan
    path = write(tmp_path / "t.gguf", tensors)
    with pytest.raises(UserError, match=r"blk\.1\.attn_v\.weight.*not finite"):
        read_gguf_params(path)


def test_a_file_cut_anywhere_is_refused_and_names_the_file(tmp_path, tensors):
    whole = write(tmp_path / "t.gguf", tensors).read_bytes()
    path = tmp_path / "cut.gguf"
    lengths = [*range(40), *range(40, len(whole), 997), len(whole) - 1]
    for length in lengths:
        path.write_bytes(whole[:length])
        for read in (read_gguf_metadata, read_gguf_config, read_gguf_params):
            with pytest.raises(UserError, match=r"cut\.gguf"):
                read(path)
    # The last tensor is named, although it is the last to be read.
    with pytest.raises(UserError, match=r"tensor 'blk\.1\.ffn_norm\.weight' ends at byte"):
        read_gguf_config(path)


def test_damage_in_the_header_ends_in_one_clear_error_or_none(tmp_path, tensors):
    whole = write(tmp_path / "t.gguf", tensors).read_bytes()
    header = whole.index(b"blk.1.ffn_norm.weight") + 60
    path = tmp_path / "bad.gguf"

    @settings(max_examples=150)
    @given(st.integers(0, header), st.binary(min_size=1, max_size=8))
    def check(at, junk):
        path.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
        with contextlib.suppress(UserError):  # anything else fails the test
            read_gguf_params(path)

    check()


def test_what_is_no_gguf_file(tmp_path, tensors):
    (tmp_path / "text.gguf").write_text("hello, this is not a model")
    with pytest.raises(UserError, match=r"text\.gguf is not a GGUF file"):
        read_gguf_config(tmp_path / "text.gguf")
    with pytest.raises(UserError, match=r"none\.gguf cannot be read: No such file"):
        read_gguf_config(tmp_path / "none.gguf")
    with pytest.raises(UserError, match=r"is a folder; give the \.gguf file"):
        read_gguf_config(tmp_path)
    whole = bytearray(write(tmp_path / "t.gguf", tensors).read_bytes())
    whole[4] = 1
    (tmp_path / "old.gguf").write_bytes(whole)
    with pytest.raises(UserError, match="GGUF version 1 is not supported"):
        read_gguf_config(tmp_path / "old.gguf")


def test_a_key_or_a_tensor_that_comes_twice_is_refused(tmp_path, tensors):
    whole = write(tmp_path / "t.gguf", tensors).read_bytes()
    path = tmp_path / "twice.gguf"
    path.write_bytes(whole.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"))
    with pytest.raises(UserError, match=r"the tensor 'blk\.1\.ffn_up\.weight' comes twice"):
        read_gguf_config(path)
    path.write_bytes(whole.replace(b"llama.attention.key_length", b"llama.rope.dimension_count"))
    with pytest.raises(UserError, match=r"the key 'llama\.rope\.dimension_count' comes twice"):
        read_gguf_config(path)


def test_rows_that_do_not_divide_into_blocks_are_refused(tmp_path, tensors):
    whole = bytearray(write(tmp_path / "t.gguf", tensors, kind=Q.Q8_0).read_bytes())
    name = b"blk.1.ffn_up.weight"
    width = whole.index(name) + len(name) + 4  # the count of axes, then the fastest axis
    assert whole[width] == 32
    whole[width] = 31
    path = tmp_path / "odd.gguf"
    path.write_bytes(whole)
    with pytest.raises(
        UserError, match=r"'blk\.1\.ffn_up\.weight' of shape \(64, 31\) does not divide into Q8_0 blocks"
    ):
        read_gguf_metadata(path)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that must not be imported."""
    folder = tmp_path / "site" / "some_weights"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_a_file_is_found_by_path_or_inside_a_package_that_is_not_imported(tmp_path, package):
    file = package / "data" / "model.gguf"
    file.write_bytes(b"")
    assert resolve_init("package:some_weights") == file
    assert resolve_init("package:some-weights") == file
    assert resolve_init(str(file)) == file
    assert "some_weights" not in sys.modules


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("package:not_installed", "no package 'not_installed' is installed; `make smollm2-weights`"),
        ("package:sys", "no package 'sys' is installed"),  # a module, but no folder
        ("package:os.path", "'os.path' is not the name of a package"),
        ("package:", "'' is not the name of a package"),
        ("package:some_weights", "one .gguf file is wanted in the package, found: none"),
        (
            "HuggingFaceTB/SmolLM2-135M",
            "'HuggingFaceTB/SmolLM2-135M' is neither a file nor a folder with a config.json; give a .gguf",
        ),
        ("/", "'/' is neither a file"),
    ],
)
def test_an_init_that_names_no_file_says_what_to_do(package, init, message):
    with pytest.raises(UserError, match=re.escape(message)):
        resolve_init(init)


def test_a_module_made_at_run_time_is_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    with pytest.raises(UserError, match="no package 'made_up' is installed"):
        resolve_init("package:made_up")


def test_two_files_in_a_package_are_both_named(package):
    for name in ("a.gguf", "b.gguf"):
        (package / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.gguf, .*b\.gguf"):
        resolve_init("package:some_weights")
