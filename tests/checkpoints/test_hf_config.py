"""config.json: published files are understood as published, everything else is refused by the field's name."""

import math

import pytest

from jaxrl_llm.checkpoints.hf_config import from_hf_config, to_hf_config
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.types import UserError

LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
    "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip


def shape(raw, *keys):
    model = from_hf_config(raw)
    return tuple(getattr(model, key) for key in keys)


def test_published_files_are_understood():
    llama = from_hf_config(LLAMA31_8B)
    assert (llama.head_dim, llama.rope_theta, llama.max_context, llama.tie_embeddings) == (128, 5e5, 131072, False)
    assert (llama.rope_scaling.kind, llama.rope_scaling.original_context) == ("llama3", 8192)
    assert shape(SMOLLM2_135M, "heads", "kv_heads", "head_dim", "tie_embeddings") == (9, 3, 64, True)
    assert shape(QWEN25_05B, "qkv_bias", "qk_norm", "window", "attention_pattern") == (True, False, None, "G")
    gemma2 = from_hf_config(GEMMA2_2B)
    assert (gemma2.attention_pattern, gemma2.window, gemma2.tie_embeddings) == ("LG", 4096, True)
    assert (gemma2.attention_softcap, gemma2.final_softcap, gemma2.activation) == (50.0, 30.0, "gelu_tanh")
    assert gemma2.post_norms
    assert gemma2.unit_offset_norms
    assert gemma2.scale_embeddings
    assert not gemma2.qk_norm
    gemma3 = from_hf_config(GEMMA3_1B)
    assert (gemma3.attention_pattern, gemma3.window, gemma3.qk_norm) == ("LLLLLG", 512, True)
    assert (gemma3.rope_theta, gemma3.local_rope_theta, gemma3.final_softcap) == (1e6, 1e4, None)
    # Gemma 2's 27B: heads of 128, scores over the root of 144.
    assert shape(GEMMA2_2B | {"head_dim": 128, "query_pre_attn_scalar": 144}, "query_pre_attn_scalar") == (144,)


def test_llama_2_needs_no_rope_theta_and_its_successors_do():
    raw = {key: value for key, value in LLAMA31_8B.items() if key not in ("rope_theta", "rope_scaling")}
    assert shape(raw, "rope_theta") == (10000.0,)
    for published in (QWEN25_05B, GEMMA2_2B, GEMMA3_1B):
        with pytest.raises(UserError, match="field rope_theta is missing"):
            from_hf_config({key: value for key, value in published.items() if key != "rope_theta"})


@pytest.mark.parametrize("raw", [LLAMA31_8B, SMOLLM2_135M, QWEN25_05B, GEMMA2_2B, GEMMA3_1B])
def test_every_field_that_matters_is_missed_by_name(raw):
    wanted = {
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings",
    }  # fmt: skip
    if raw["model_type"].startswith("gemma"):
        wanted |= {"hidden_activation", "head_dim", "query_pre_attn_scalar", "sliding_window"}
        wanted |= (
            {"attn_logit_softcapping", "final_logit_softcapping"} if raw is GEMMA2_2B else {"rope_local_base_freq"}
        )
    else:
        wanted.add("hidden_act")
    for name in wanted:
        with pytest.raises(UserError, match=f"field {name} is"):
            from_hf_config({key: value for key, value in raw.items() if key != name})


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (LLAMA31_8B, {"model_type": "mamba"}, "model_type is 'mamba'; supported: 'llama'"),
        (LLAMA31_8B, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA31_8B, {"attention_bias": True}, "attention_bias is True"),
        (LLAMA31_8B, {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA31_8B, {"rms_norm_eps": math.inf}, "rms_norm_eps is inf"),
        (LLAMA31_8B, {"hidden_size": -1}, "hidden_size is -1"),
        (LLAMA31_8B, {"hidden_size": 4095}, "hidden_size = 4095 is not a multiple"),
        (LLAMA31_8B, {"num_key_value_heads": 5}, "not a multiple of kv_heads"),
        (LLAMA31_8B, {"quantization_config": {}}, "quantization_config = {} is unknown"),
        (LLAMA31_8B, {"sliding_window": 8}, "sliding_window = 8 is unknown"),
        (LLAMA31_8B, {"rope_scaling": {"type": "longrope", "factor": 2}}, r"rope_scaling.type is 'longrope'"),
        (LLAMA31_8B, {"rope_scaling": {"type": "linear"}}, r"rope_scaling.factor is missing"),
        (LLAMA31_8B, {"rope_scaling": {"type": "linear", "factor": 2.0, "wave": 1}}, r"rope_scaling.wave = 1 is unk"),
        (LLAMA31_8B, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"original_max_position_embeddings is"),
        (LLAMA31_8B, {"rope_scaling": 4}, "rope_scaling is 4"),
        (QWEN25_05B, {"use_sliding_window": 1}, "use_sliding_window is 1"),
        (QWEN25_05B, {"layer_types": ["sliding_attention"] * 24}, "use_sliding_window is false"),
        (GEMMA2_2B, {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        (GEMMA2_2B, {"layer_types": ["chunked_attention"] * 26}, "layer_types is"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA3_1B, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(raw, change, message):
    with pytest.raises(UserError, match=message):
        from_hf_config(raw | change)


def test_yarn_takes_the_papers_attention_factor_unless_told():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaling = from_hf_config(QWEN25_05B | {"rope_scaling": yarn}).rope_scaling
    assert (scaling.beta_fast, scaling.beta_slow) == (32, 1)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    told = from_hf_config(QWEN25_05B | {"rope_scaling": yarn | {"mscale": 2.0, "mscale_all_dim": 1.0}}).rope_scaling
    assert told.attention_factor == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))


def test_a_model_that_no_family_describes_is_refused_by_key():
    for change, key in [
        ({"final_softcap": 30.0}, "final_softcap"),
        ({"attention_pattern": "LG", "window": 4}, "attention_pattern"),
        ({"qkv_bias": True, "qk_norm": True}, "qkv_bias"),
        ({"post_norms": True}, "unit_offset_norms|activation|scale_embeddings"),
    ]:
        with pytest.raises(UserError, match=key):
            to_hf_config(ModelConfig(**change))
    assert to_hf_config(ModelConfig())["model_type"] == "llama"
