"""Adapters in PEFT's layout, against an adapter and logits that PEFT wrote (tests/reference/make_peft.py)."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import DATA, DOCUMENTS, TOKENS, write_folder
from safetensors.numpy import load_file, save_file

from jaxrl_llm.checkpoints.hf import open_hf, read_hf_params
from jaxrl_llm.checkpoints.peft import read_peft, read_peft_config, write_peft
from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models.lora import attach, merge
from jaxrl_llm.models.transformer import forward, head_weight
from jaxrl_llm.types import UserError

WRITTEN = DATA / "peft"
WEIGHTS = "adapter_model.safetensors"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(model, weights) under the adapter that PEFT wrote."""
    path = tmp_path_factory.mktemp("base") / "qwen3"
    write_folder(path, "qwen3")
    folder = open_hf(path)
    return folder.model, read_hf_params(folder)


def logits(model, params):
    rows = np.zeros((3, 2, 24), np.int32)  # tokens, positions, segments
    for row, document in enumerate(TOKENS):
        rows[:, row, : len(document)] = document, range(len(document)), [1] * len(document)
    run = jax.jit(lambda p, t, o, s: forward(model, p, t, o, s) @ head_weight(p).T)
    out = np.asarray(run(jax.tree.map(jnp.asarray, params), *rows))
    return [out[row, : len(document)] for row, document in enumerate(TOKENS)]


def test_an_adapter_of_peft_gives_its_logits(base):
    model, params = base
    lora, adapters = read_peft(WRITTEN, model)
    assert (lora.rank, lora.alpha, lora.rslora, len(lora.targets)) == (3, 4.0, True, 7)
    with np.load(WRITTEN / "logits.npz") as stored:
        wanted = [stored[document] for document in DOCUMENTS]
    plain = max(np.abs(a - b).max() for a, b in zip(wanted, logits(model, params), strict=True))
    assert plain > 1  # the adapter matters
    for policy in (attach(params, adapters, lora), merge(params, adapters, lora)):
        for a, b in zip(wanted, logits(model, policy), strict=True):
            np.testing.assert_allclose(b, a, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_is_read_is_written_again_bit_by_bit(base, dtype, tmp_path):
    model, _ = base
    lora, adapters = read_peft(WRITTEN, model)
    write_peft(tmp_path / "out", model, lora, adapters, base="some/model", dtype=dtype)
    before, after = load_file(WRITTEN / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value.astype(dtype or np.float32), strict=True)
    told = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    theirs = json.loads((WRITTEN / "adapter_config.json").read_text())
    for key in ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "inference_mode"):
        assert told[key] == theirs[key], key
    assert set(told["target_modules"]) == set(theirs["target_modules"])
    assert read_peft_config(tmp_path / "out") == read_peft_config(WRITTEN)
    again = read_peft(tmp_path / "out", model)[1]
    write_peft(tmp_path / "again", model, lora, again, base=None, dtype=dtype)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()


@pytest.fixture
def copy(tmp_path):
    """`copy(tensors=..., **options)`: PEFT's folder with changed tensors (None removes) and options."""

    def made(tensors=None, **options):
        path = tmp_path / "adapter"
        shutil.copytree(WRITTEN, path)
        config = json.loads((path / "adapter_config.json").read_text()) | options
        (path / "adapter_config.json").write_text(json.dumps(config))
        stored = load_file(path / WEIGHTS) | (tensors or {})
        save_file({name: value for name, value in stored.items() if value is not None}, path / WEIGHTS)
        return path

    return made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora = true is not supported"),
        ({"bias": "all"}, 'bias = "all" is not supported'),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save = \["lm_head"\] is not supported'),
        ({"rank_pattern": {"q_proj": 8}}, r'rank_pattern = {"q_proj": 8} is not supported'),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"option_of_next_year": 1}, "option_of_next_year = 1 is not supported"),
        ({"init_lora_weights": "pissa"}, "it changes the base's weights"),
        ({"peft_type": "IA3"}, 'peft_type = "IA3" is not supported'),
        ({"target_modules": "all-linear"}, 'target_modules = "all-linear" is not supported'),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head'; known are"),
        ({"lora_alpha": "8"}, 'lora_alpha = "8" is not supported'),
        ({"r": 0}, "r = 0 is not supported"),
        ({"r": 4}, rf"{Q0}' has shape \(3, 32\); r = 4 .* ask for \(4, 32\)"),
        ({"target_modules": ["q_proj"]}, r"down_proj.lora_A.weight' \(and 47 more\) is unexpected"),
        ({"tensors": {Q0: None}}, f"tensor '{Q0}' is missing"),
        ({"tensors": {Q0: np.zeros((3, 40), np.float32)}}, r"ask for \(3, 32\), so .* of another model"),
        ({"tensors": {Q0.replace("layers.0", "layers.4"): np.zeros((3, 32), np.float32)}}, "layers.4.* is unexpected"),
        ({"tensors": {Q0: np.zeros((3, 32), np.int32)}}, "has dtype I32"),
        ({"tensors": {Q0: np.full((3, 32), np.nan, np.float32)}}, "not finite"),
    ],
    ids=str,
)
def test_another_adapter_is_refused_by_name(base, copy, options, message):
    with pytest.raises(UserError, match=message):
        read_peft(copy(**options), base[0])


def test_a_folder_that_is_no_adapter_is_refused(base, copy, tmp_path):
    model, _ = base
    with pytest.raises(UserError, match=r"has no adapter_config\.json; give a folder in PEFT's layout"):
        read_peft(tmp_path / "nowhere", model)
    path = copy()
    (path / "adapter_config.json").write_text("[]")
    with pytest.raises(UserError, match="holds no object"):
        read_peft(path, model)
    shutil.copy(WRITTEN / "adapter_config.json", path)
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-4])
    with pytest.raises(UserError, match="cut off"):
        read_peft(path, model)
    (path / WEIGHTS).rename(path / "adapter_model.bin")
    with pytest.raises(UserError, match="only safetensors are read"):
        read_peft(path, model)
    with pytest.raises(UserError, match="exists; give a folder that does not"):
        write_peft(path, model, LoraConfig(rank=3), {}, base=None)


@pytest.mark.parametrize("family", ["qwen3", "llama4"])
def test_merging_here_is_merging_there(family, tmp_path):
    """W + s B A of the file's own matrices, for rows that lie as ours do and for Llama 4's parted pairs."""
    tensors = write_folder(tmp_path / "base", family)
    folder = open_hf(tmp_path / "base")
    rng, adapter, modules = np.random.default_rng(5), {}, ("q_proj", "k_proj", "v_proj", "o_proj")
    for name, matrix in tensors.items():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] not in modules:
            continue
        a, b = rng.standard_normal((2, matrix.shape[1])), rng.standard_normal((matrix.shape[0], 2))
        adapter[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
        adapter[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
        tensors[name] = (matrix + 1.5 * b @ a).astype(np.float32)
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / WEIGHTS)
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": list(modules)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    lora, adapters = read_peft(tmp_path / "adapter", folder.model)
    merged = merge(read_hf_params(folder), adapters, lora)
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    wanted = read_hf_params(open_hf(tmp_path / "base"))
    for (path, a), b in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(merged), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    write_peft(tmp_path / "out", folder.model, lora, adapters, base=None)
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert written.keys() == adapter.keys()
    for name, array in adapter.items():
        np.testing.assert_array_equal(written[name], array)
