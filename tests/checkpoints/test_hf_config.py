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

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA4_SCOUT = {  # the text part
    "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
    "attention_dropout": 0.0, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008],
    "for_llm_compression": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
    "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
    "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
    "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True, "vocab_size": 202048,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
EXPERTS = (MIXTRAL_8X7B, QWEN3_30B_A3B, LLAMA4_SCOUT)


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


def test_published_files_with_experts_are_understood():
    keys = ("experts", "experts_per_token", "d_ff", "router_gate", "shared_expert_d_ff")
    assert shape(MIXTRAL_8X7B, *keys) == (8, 2, 14336, "softmax_chosen", None)
    assert shape(QWEN3_30B_A3B, *keys, "qk_norm") == (128, 8, 768, "softmax_chosen", None, True)
    assert shape(QWEN3_30B_A3B | {"norm_topk_prob": False}, "router_gate") == ("softmax",)
    scout = from_hf_config(LLAMA4_SCOUT)
    assert tuple(getattr(scout, key) for key in keys) == (16, 1, 8192, "sigmoid_input", 8192)
    assert (scout.attention_pattern, scout.attention_chunk, scout.qk_unit_norm) == ("CCCN", 8192, True)
    assert (scout.query_temperature_every, scout.query_temperature_scale) == (8192, 0.1)
    for raw in EXPERTS:
        assert from_hf_config(to_hf_config(from_hf_config(raw))) == from_hf_config(raw)


def test_llama_2_needs_no_rope_theta_and_its_successors_do():
    raw = {key: value for key, value in LLAMA31_8B.items() if key not in ("rope_theta", "rope_scaling")}
    assert shape(raw, "rope_theta") == (10000.0,)
    for published in (QWEN25_05B, GEMMA2_2B, GEMMA3_1B):
        with pytest.raises(UserError, match="field rope_theta is missing"):
            from_hf_config({key: value for key, value in published.items() if key != "rope_theta"})


@pytest.mark.parametrize("raw", [LLAMA31_8B, SMOLLM2_135M, QWEN25_05B, GEMMA2_2B, GEMMA3_1B, *EXPERTS])
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
    if raw in EXPERTS:
        wanted |= {"num_experts_per_tok", "num_experts" if raw is QWEN3_30B_A3B else "num_local_experts", "rope_theta"}
    if raw is QWEN3_30B_A3B:
        wanted = (wanted - {"intermediate_size"}) | {"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"}
    if raw is LLAMA4_SCOUT:
        wanted |= {"interleave_moe_layer_step", "use_qk_norm", "attention_chunk_size", "head_dim"}
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
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "experts_per_token 9 is more than the 8 experts"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; supported: 1"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]"),
        (QWEN3_30B_A3B, {"use_sliding_window": True}, "use_sliding_window is True"),
        (QWEN3_30B_A3B, {"num_local_experts": 8}, "num_experts = 128 is unknown"),
        (LLAMA4_SCOUT, {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is 2"),
        (LLAMA4_SCOUT, {"moe_layers": [1, 3]}, r"moe_layers is \[1, 3\]"),
        (LLAMA4_SCOUT, {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, num_hidden_layers is 48"),
        (LLAMA4_SCOUT, {"no_rope_layers": [1, 2]}, "a list of 0 and 1"),
        (LLAMA4_SCOUT, {"attn_temperature_tuning": 8}, "attn_temperature_tuning is 8"),
        (LLAMA4_SCOUT, {"floor_scale": 0}, "floor_scale is 0"),
        (LLAMA4_SCOUT, {"model_type": "llama4"}, "model_type is 'llama4'"),
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
        ({"experts": 4, "experts_per_token": 2, "router_gate": "sigmoid"}, "router_gate|head_dim|shared_expert"),
        ({"experts": 4, "experts_per_token": 2, "router_gate": "softmax"}, "router_gate"),
        ({"attention_pattern": "N"}, "attention_pattern"),
        ({"qk_unit_norm": True}, "qk_unit_norm"),
        ({"post_norms": True}, "unit_offset_norms|activation|scale_embeddings"),
    ]:
        with pytest.raises(UserError, match=key):
            to_hf_config(ModelConfig(**change))
    assert to_hf_config(ModelConfig())["model_type"] == "llama"
