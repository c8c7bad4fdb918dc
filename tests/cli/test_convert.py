"""`jaxrl convert` and `jaxrl inspect` on folders, GGUF files and run directories; `model.init` on a folder."""

import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.checkpoints.hf import open_hf, read_hf_params, write_hf
from jaxrl_llm.checkpoints.hf_config import to_hf_config
from jaxrl_llm.checkpoints.hf_tensors import hf_tensors
from jaxrl_llm.checkpoints.manifest import array_digest
from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.assemble import assemble, initial_params
from jaxrl_llm.config import ModelConfig, dump, load

# The vocabulary is that of conftest's tokenizer (at most 32 ids), with room behind.
MODEL = ModelConfig(
    layers=2, d_model=32, heads=2, kv_heads=2, head_dim=16, d_ff=64, vocab_size=40, max_context=12, qkv_bias=True
)
SHAPES = ["model.layers=2", "model.d_ff=64"]


@pytest.fixture
def folder(tmp_path):
    """A Qwen2 with token ids and a tokenizer's file of its own."""
    rng = np.random.default_rng(0)
    path = tmp_path / "start"
    path.mkdir()
    save_file({t.name: rng.standard_normal(t.shape, np.float32) for t in hf_tensors(MODEL)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(to_hf_config(MODEL) | {"eos_token_id": 7, "torch_dtype": "float32"}))
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_folder_is_converted_with_what_stands_beside_its_weights(folder, tmp_path, jaxrl):
    status, out, _ = jaxrl("convert", folder, tmp_path / "same")
    assert (status, out.strip()) == (0, str(tmp_path / "same"))
    old, new = load_file(folder / "model.safetensors"), load_file(tmp_path / "same" / "model.safetensors")
    assert old.keys() == new.keys()
    for name, value in old.items():
        np.testing.assert_array_equal(new[name], value, strict=True)
    assert json.loads((tmp_path / "same/config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (tmp_path / "same" / "tokenizer.json").exists()
    assert jaxrl("convert", folder, tmp_path / "half", "--dtype", "bfloat16")[0] == 0
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {tensor.kind for tensor in open_hf(tmp_path / "half").stored.values()} == {"BF16"}


def test_inspect_lists_every_array_with_its_digest(folder, jaxrl):
    status, out, _ = jaxrl("inspect", folder)
    assert status == 0
    rows = dict(line.split("  ", 1) for line in out.splitlines()[:-1])
    tensors = load_file(folder / "model.safetensors")
    assert list(rows) == sorted(tensors)
    name = "model.layers.1.self_attn.q_proj.bias"
    assert rows[name] == f"F32  32  128  {array_digest(tensors[name])[:16]}"
    numbers = sum(value.size for value in tensors.values())
    assert out.splitlines()[-1] == f"{len(tensors)} arrays, {numbers} numbers, {4 * numbers} bytes"


def test_a_gguf_file_is_inspected_and_converted_with_its_token_ids(tmp_path, jaxrl):
    plain = MODEL.model_copy(update={"qkv_bias": False})
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in {
        "block_count": 2, "context_length": 12, "embedding_length": 32, "feed_forward_length": 64,
        "attention.head_count": 2, "attention.head_count_kv": 2, "vocab_size": 40,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 3)
    names = {
        "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k",
        "v_proj": "attn_v", "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate",
        "up_proj": "ffn_up", "down_proj": "ffn_down", "norm": "output_norm",
    }  # fmt: skip
    for tensor in hf_tensors(plain):
        *_, last, _ = tensor.name.split(".")
        layer = "" if tensor.layer is None else f"blk.{tensor.layer}."
        writer.add_tensor(f"{layer}{names[last]}.weight", rng.standard_normal(tensor.shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    status, out, _ = jaxrl("inspect", tmp_path / "m.gguf")
    assert status == 0
    assert "blk.1.ffn_down.weight  F32  32x64  8192  " in out
    assert jaxrl("convert", tmp_path / "m.gguf", tmp_path / "hf")[0] == 0
    told = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (told["model_type"], told["eos_token_id"], told["bos_token_id"]) == ("llama", 3, None)
    assert open_hf(tmp_path / "hf").model == plain


def test_a_run_that_began_with_a_folder_gives_one_back(folder, tiny, tmp_path, jaxrl):
    setup = assemble(load(tiny, [f"model.init={folder}", *SHAPES]))
    assert setup.config.model.qkv_bias
    assert setup.config.model.vocab_size == 40
    text = setup.tokenizer.encode("12")
    assert setup.tokenizer.decode([39, *text, 39]) == "12"  # the model's rows beyond the tokenizer's ids are no text
    with pytest.raises(ValueError, match="40 is outside"):
        setup.tokenizer.decode([40])
    params = initial_params(setup)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump(setup.config))
    store = CheckpointStore(run / "checkpoints", keep=2)
    store.save(0, {"params": params}, {}, {})
    store.save(4, {"params": {**params, "embed": params["embed"] + 1}}, {}, {})
    for step, added in (("0", 0), (None, 1)):
        out = tmp_path / f"out{step}"
        assert jaxrl("convert", run, out, *(["--step", step] if step else []))[0] == 0
        weights = read_hf_params(open_hf(out))
        np.testing.assert_array_equal(weights["embed"], np.asarray(params["embed"]) + np.float32(added))
        np.testing.assert_array_equal(weights["layers"]["k_bias"], params["layers"]["k_bias"])
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == 7
        assert (out / "tokenizer.json").exists()
    status, listed, _ = jaxrl("inspect", run, "--step", 0)
    assert status == 0
    assert f"layers.q_bias  float32  2x2x16  256  {array_digest(np.asarray(params['layers']['q_bias']))[:16]}" in listed


def test_what_cannot_be_converted_says_why(folder, tiny, tmp_path, jaxrl):
    for arguments, message in [
        (("convert", folder, folder), "exists"),
        (("convert", folder, tmp_path / "x", "--dtype", "int8"), "--dtype int8"),
        (("convert", folder, tmp_path / "x", "--step", 3), "not a run directory"),
        (("convert", tmp_path / "gone", tmp_path / "x"), "neither a file nor a folder"),
        (("inspect", tmp_path / "gone"), "neither a file nor a folder"),
        (("train", tiny, f"model.init={folder}", "--run-dir", tmp_path / "r"), "model.layers = 1, but"),
        (
            ("train", tiny, f"model.init={folder}", *SHAPES, "model.window=3", "model.attention_pattern=L"),
            "pattern = L",
        ),
    ]:
        status, _, err = jaxrl(*arguments)
        assert status == 2, arguments
        assert message in err
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    status, _, err = jaxrl("train", tiny, f"model.init={folder}", *SHAPES, "--run-dir", tmp_path / "r")
    assert status == 2
    assert "tensor 'model.norm.weight' is missing" in err
    assert not (tmp_path / "r").exists()


def test_dynamic_scaling_leaves_the_context_to_the_user(tmp_path, tiny):
    model = MODEL.model_copy(update={"qkv_bias": False})
    model = ModelConfig(
        **model.model_dump() | {"rope_scaling": {"kind": "dynamic", "factor": 2, "original_context": 12}}
    )
    rng = np.random.default_rng(0)
    weights = {t.name: rng.standard_normal(t.shape, np.float32) for t in hf_tensors(model)}
    (tmp_path / "weights").mkdir()
    save_file(weights, tmp_path / "weights" / "model.safetensors")
    (tmp_path / "weights" / "config.json").write_text(json.dumps(to_hf_config(model)))
    config = load(tiny, [f"model.init={tmp_path / 'weights'}", *SHAPES, "model.max_context=24"])
    assert assemble(config).config.model.max_context == 24
    folder = open_hf(tmp_path / "weights")
    long = folder.model.model_copy(update={"max_context": 24})
    write_hf(tmp_path / "out", long, read_hf_params(folder), to_hf_config(long))
    assert open_hf(tmp_path / "out").model == folder.model
