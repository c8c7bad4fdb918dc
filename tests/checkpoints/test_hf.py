"""Folders: bit-equal both ways, streamed to devices, and refused with the tensor's name."""

import collections
import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from families import configs, write_folder, write_tensors
from safetensors.numpy import load_file

from jaxrl_llm import sharding
from jaxrl_llm.checkpoints.hf import open_hf, read_hf_params, write_hf
from jaxrl_llm.checkpoints.hf_config import to_hf_config
from jaxrl_llm.models.transformer import abstract_params, logical_axes
from jaxrl_llm.types import UserError


def tables(path):
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    "name", ["llama31", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "llama4"]
)
def test_a_folder_comes_back_bit_for_bit_through_our_tree(name, tmp_path):
    tensors = write_folder(tmp_path / "in", name, shards=3)
    folder = open_hf(tmp_path / "in")
    params = read_hf_params(folder)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_params(folder.model)
    )
    write_hf(tmp_path / "out", folder.model, params, to_hf_config(folder.model), shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    back = tables(tmp_path / "out")
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(back[key], value, strict=True)
    again = open_hf(tmp_path / "out")
    assert again.model == folder.model
    jax.tree.map(np.testing.assert_array_equal, read_hf_params(again), params)


def test_dtypes_are_kept_or_cast(tmp_path):
    halves = write_folder(tmp_path / "f16", "qwen2", dtype=np.float16)
    folder = open_hf(tmp_path / "f16")
    params = read_hf_params(folder, "bfloat16")
    embed = halves["model.embed_tokens.weight"]
    np.testing.assert_array_equal(params["embed"], embed.astype(ml_dtypes.bfloat16), strict=True)
    write_hf(tmp_path / "bf16", folder.model, params, folder.raw)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = read_hf_params(open_hf(tmp_path / "bf16"), "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, again, params)
    write_hf(tmp_path / "f32", folder.model, read_hf_params(folder), folder.raw, dtype="float16")
    for key, value in tables(tmp_path / "f32").items():
        np.testing.assert_array_equal(value, halves[key], strict=True)


@pytest.fixture
def sent(monkeypatch):
    """Bytes sent to each device by reading a folder."""
    made, bytes_of = jax.make_array_from_callback, collections.Counter()

    def counted(*given):
        array = made(*given)
        bytes_of.update({shard.device: shard.data.nbytes for shard in array.addressable_shards})
        return array

    monkeypatch.setattr(jax, "make_array_from_callback", counted)
    return bytes_of


@pytest.mark.parametrize("axes", [{"data": 1}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "expert": 4}])
def test_streamed_to_devices_the_weights_lie_where_the_table_says_and_are_the_same(axes, sent, tmp_path, cpu_devices):
    write_folder(tmp_path / "m", "gemma2", shards=2)
    write_folder(tmp_path / "b", "qwen2")
    write_folder(tmp_path / "x", "mixtral")
    write_folder(tmp_path / "l", "llama4")
    for name in ("m", "b", "x", "l"):
        folder = open_hf(tmp_path / name)
        mesh = sharding.make_mesh(axes, cpu_devices[: int(np.prod(list(axes.values())))])
        places = sharding.param_shardings(mesh, logical_axes(folder.model), abstract_params(folder.model))
        sent.clear()
        placed = read_hf_params(folder, shardings=places)
        # An expert goes only to the devices that keep it.
        kept = collections.Counter()
        for shard in (shard for leaf in jax.tree.leaves(placed) for shard in leaf.addressable_shards):
            kept[shard.device] += shard.data.nbytes
        assert sent == kept
        jax.tree.map(np.testing.assert_array_equal, placed, read_hf_params(folder))
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), placed, places))
        write_hf(tmp_path / f"{name}-again", folder.model, placed, folder.raw)
        jax.tree.map(np.testing.assert_array_equal, placed, read_hf_params(open_hf(tmp_path / f"{name}-again")))


def test_the_text_part_of_a_model_that_sees_images_is_read_and_written_as_a_model_of_its_own(tmp_path):
    tensors = write_folder(tmp_path / "text", "llama4")
    path = tmp_path / "whole"
    path.mkdir()
    others = {"vision_model.class_embedding": np.ones(3, np.float32), "multi_modal_projector.x": np.ones(3, np.float32)}
    write_tensors(path, others | {f"language_model.{name}": value for name, value in tensors.items()})
    raw = json.loads((tmp_path / "text" / "config.json").read_text())
    whole = {"model_type": "llama4", "text_config": raw, "vision_config": {"hidden_size": 3}}
    (path / "config.json").write_text(json.dumps(whole))
    folder = open_hf(path)
    write_hf(tmp_path / "out", folder.model, read_hf_params(folder), folder.raw)
    back = tables(tmp_path / "out")
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(back[key], value, strict=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Llama4ForCausalLM"]
    write_tensors(
        path, others | {f"language_model.{name}": value for name, value in tensors.items()} | {"x": np.ones(1)}
    )
    with pytest.raises(UserError, match="tensor 'x' is unexpected"):
        open_hf(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama4"}))
    with pytest.raises(UserError, match="text_config is missing"):
        open_hf(path)


def test_a_missing_expert_or_one_of_another_shape_is_named(tmp_path):
    tensors = write_folder(tmp_path / "m", "mixtral")
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    for changed, message in (({}, "is missing"), ({name: tensors[name].T.copy()}, r"has shape \(48, 32\)")):
        write_tensors(tmp_path / "m", {key: value for key, value in tensors.items() if key != name} | changed)
        with pytest.raises(UserError, match=f"tensor '{name}' {message}"):
            open_hf(tmp_path / "m")


def test_files_beside_the_weights_travel_and_nothing_is_overwritten(tmp_path):
    write_folder(tmp_path / "in", "llama2")
    folder = open_hf(tmp_path / "in")
    (tmp_path / "tokenizer.json").write_text("{}")
    params = read_hf_params(folder)
    write_hf(tmp_path / "out", folder.model, params, folder.raw, beside=[tmp_path / "tokenizer.json"])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(UserError, match="exists"):
        write_hf(tmp_path / "out", folder.model, params, folder.raw)
    with pytest.raises(UserError, match="could not be written"):
        write_hf(tmp_path / "other", folder.model, params, folder.raw, beside=[tmp_path / "gone"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "tokenizer.json"]


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), f"{Q}' is missing"),
        (lambda t: t.update({Q + "x": t[Q]}), f"{Q}x' is unexpected"),
        (lambda t: t.update({Q: t[Q][:, :-1].copy()}), f"{Q}' has shape"),
        (lambda t: t.update({Q: t[Q].astype(np.int32)}), f"{Q}' has dtype I32"),
        (lambda t: t.update({"model.embed_tokens.weight": np.zeros((63, 32), np.float32)}), "embed_tokens.weight' has"),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), "lm_head.weight' differs"),
    ],
)
def test_a_folder_that_is_not_the_configs_model_is_refused_by_tensor(change, message, tmp_path):
    tensors = write_folder(tmp_path / "m", "smollm2")
    change(tensors)
    for shards in (1, 2):
        for file in (tmp_path / "m").glob("*safetensors*"):
            file.unlink()
        write_tensors(tmp_path / "m", tensors, shards)
        with pytest.raises(UserError, match=message):
            open_hf(tmp_path / "m")


def test_a_copy_of_the_tied_embedding_and_derived_frequencies_are_no_error(tmp_path):
    tensors = write_folder(tmp_path / "m", "smollm2")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    write_tensors(tmp_path / "m", tensors)
    assert "head" not in read_hf_params(open_hf(tmp_path / "m"))


def test_damaged_folders_are_refused_by_name(tmp_path):
    write_folder(tmp_path / "m", "qwen3", shards=2)
    path = tmp_path / "m"
    shard = path / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    names = [name for name in json.loads(whole[8 : 8 + length]) if name != "__metadata__"]

    def refused(content, message):
        shard.write_bytes(content)
        with pytest.raises(UserError, match=message):
            open_hf(path)

    refused(whole[:-4], "is cut off: tensor '(" + "|".join(names) + ")' ends at")
    refused(whole[: length // 2], "cut off inside its table")
    refused(b"", "cut off inside its table")
    refused(whole[:8] + b"x" * length + whole[8 + length :], "not JSON")
    table = json.loads(whole[8 : 8 + length])
    for row, message in [
        ({"dtype": "F32"}, "row of tensor"),
        (table[names[0]] | {"data_offsets": [4, 0]}, "row of tensor"),
        (table[names[0]] | {"shape": [1, -1]}, "row of tensor"),
        (table[names[0]] | {"shape": [1]}, "bytes"),
        (table[names[0]] | {"dtype": "Q4"}, "dtype Q4"),
    ]:
        text = json.dumps(table | {names[0]: row}).encode()
        refused(
            struct.pack("<Q", len(text)) + text + whole[8 + length :], f"{names[0]}.*{message}|{message}.*{names[0]}"
        )
    shard.unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        open_hf(path)
    shard.write_bytes(whole)
    index = path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": places | {"lm_head.weight": shard.name}}))
    with pytest.raises(UserError, match=r"lm_head\.weight' is missing in model-00002"):
        open_hf(path)
    index.write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(UserError, match="weight_map"):
        open_hf(path)
    index.unlink()
    with pytest.raises(UserError, match="has neither"):
        open_hf(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="holds no object"):
        open_hf(path)
    with pytest.raises(UserError, match="not a folder with a config"):
        open_hf(tmp_path)


def test_a_number_that_is_not_finite_is_refused_by_name(tmp_path):
    tensors = write_folder(tmp_path / "m", "llama2")
    tensors[Q][3, 2] = np.nan
    write_tensors(tmp_path / "m", tensors)
    with pytest.raises(UserError, match=f"{Q}' holds values that are not finite"):
        read_hf_params(open_hf(tmp_path / "m"))


def test_the_config_is_named_when_it_is_refused(tmp_path):
    write_folder(tmp_path / "m", "llama2")
    told = configs()["llama2"]["released"] | {"rope_style": "spiral"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match=r"config\.json: field rope_style = 'spiral' is unknown"):
        open_hf(tmp_path / "m")


def test_parts_are_read_in_blocks_that_end_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.checkpoints.safetensors_file._BLOCK", 300)
    tensors = write_folder(tmp_path / "m", "gemma3")
    params = read_hf_params(open_hf(tmp_path / "m"))
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(
        params["layers"]["down"][2], tensors["model.layers.2.mlp.down_proj.weight"].T, strict=True
    )
    o = tensors["model.layers.3.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(params["layers"]["o"][3], o.T.reshape(4, 16, 32))
    assert jnp.asarray(params["layers"]["k"]).shape == (4, 32, 2, 16)
