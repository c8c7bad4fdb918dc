"""Every family against transformers' logits (tests/reference/make_families.py): packed rows and the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import DATA, DOCUMENTS, TOKENS, configs, write_folder

from jaxrl_llm.checkpoints.hf import open_hf, read_hf_params
from jaxrl_llm.checkpoints.hf_config import from_hf_config, to_hf_config
from jaxrl_llm.losses.logprobs import project_f32, soft_cap
from jaxrl_llm.models.kv_cache import empty_cache
from jaxrl_llm.models.transformer import decode, extend, forward, head_weight
from jaxrl_llm.types import Params

NAMES = (
    "llama2", "llama3", "llama31", "llama32", "llama_linear", "smollm2", "mistral", "qwen2", "qwen25_yarn",
    "qwen2_window", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "qwen3_moe_plain", "llama4", "llama4_plain",
)  # fmt: skip
CACHED = {"llama31": False, "mistral": True, "qwen2": False, "gemma2": False, "gemma3": True, "mixtral": True}
CACHED |= {"qwen3_moe": False, "llama4": False, "llama4_plain": True}
"""Families run through the cache: with every kind of difference between layers; True: layers not stacked."""
ROW, CHUNK = 32, 6


@pytest.fixture(scope="module")
def reference():
    with np.load(DATA / "families.npz") as stored:
        return dict(stored)


def load(path, name) -> tuple:
    write_folder(path, name)
    folder = open_hf(path)
    return folder.model, jax.tree.map(jnp.asarray, read_hf_params(folder))


def logits(config, params: Params, hidden):
    return soft_cap(project_f32(hidden, head_weight(params)), config.final_softcap)


def packed_logits(config, params):
    """Logits of both documents from one packed row, long before short, with padding behind."""
    tokens, positions, segments = (np.zeros((1, ROW), np.int32) for _ in range(3))
    at = 0
    for segment, document in enumerate(TOKENS, 1):
        part = slice(at, at + len(document))
        tokens[0, part], positions[0, part], segments[0, part] = document, range(len(document)), segment
        at += len(document)
    run = jax.jit(lambda p, t, o, s: logits(config, p, forward(config, p, t, o, s)[0]))
    out = np.asarray(run(params, tokens, positions, segments))
    return out[: len(TOKENS[0])], out[len(TOKENS[0]) : at]


def worst(reference, name, found):
    return [np.abs(reference[f"{name}.{d}"] - x).max() for d, x in zip(DOCUMENTS, found, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_packed_row_are_the_references(name, reference, tmp_path):
    differences = worst(reference, name, packed_logits(*load(tmp_path / name, name)))
    assert max(differences) < 1e-4, differences
    assert min(np.abs(reference[f"{name}.{d}"]).max() for d in DOCUMENTS) > 1  # 1e-4 is little beside the logits


@pytest.mark.parametrize("name", CACHED)
def test_chunks_and_single_tokens_through_the_cache_are_the_references(name, reference, tmp_path):
    config, params = load(tmp_path / name, name)
    if CACHED[name]:
        layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(config.layers)]
        params = params | {"layers": tuple(layers)}
    tokens, wanted = np.array(TOKENS[0], np.int32), reference[f"{name}.long"]
    shape = {"layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    cache = empty_cache(**shape, slots=2, length=24, dtype=jnp.float32, unstack=CACHED[name])
    run = jax.jit(lambda p, t, start, c: extend(config, p, t, start, c))
    step = jax.jit(lambda p, t, at, c: decode(config, p, t, at, c))
    for start in range(0, 18, CHUNK):
        rows = np.stack([tokens[start : start + CHUNK]] * 2)
        hidden, cache = run(params, rows, np.int32(start), cache)
        np.testing.assert_allclose(logits(config, params, hidden[0]), wanted[start : start + CHUNK], atol=1e-4)
    for at in range(18, 24):
        # The other slot goes over its twelfth token and those behind it again.
        positions = np.array([at, at - 6], np.int32)
        hidden, cache = step(params, tokens[positions], positions, cache)
        np.testing.assert_allclose(logits(config, params, hidden), wanted[positions], atol=1e-4)


def test_dynamic_scaling_is_the_references_at_the_length_the_model_is_set_up_for(reference, tmp_path):
    # transformers works the base out from each sequence's length: 24 tokens of a model made for 8, and 7 tokens.
    config, params = load(tmp_path / "m", "llama_dynamic")
    assert config.max_context == config.rope_scaling.original_context == 8
    short = packed_logits(config, params)[1]
    long = packed_logits(config.model_copy(update={"max_context": 24}), params)[0]
    assert max(worst(reference, "llama_dynamic", (long, short))) < 1e-4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3", {"rope_theta": 10000.0}),
        ("gemma2", {"unit_offset_norms": False}),
        ("llama31", {"rope_scaling": {}}),
        ("gemma3", {"local_rope_theta": None}),
        ("mistral", {"window": 6}),
        ("qwen3_moe", {"router_gate": "softmax"}),
        ("qwen3_moe_plain", {"experts_per_token": 2}),
        ("llama4", {"attention_chunk": 6}),
        ("llama4", {"attention_pattern": "C", "query_temperature_every": None, "query_temperature_scale": None}),
        ("llama4", {"qk_unit_norm": False}),
        ("llama4", {"query_temperature_every": 4}),
        ("llama4", {"router_gate": "sigmoid"}),
    ],
)
def test_a_wrong_constant_is_seen(name, change, reference, tmp_path):
    config, params = load(tmp_path / name, name)
    wrong = type(config)(**config.model_dump() | change)
    assert worst(reference, name, packed_logits(wrong, params))[0] > 1e-2


@pytest.mark.parametrize("name", configs())
def test_both_layouts_of_a_config_say_the_same_and_ours_says_it_too(name):
    told = configs()[name]
    model = from_hf_config(told["released"])
    assert model == from_hf_config(told["saved"])
    assert from_hf_config(to_hf_config(model)) == model
