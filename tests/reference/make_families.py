"""Tiny random models of every family as transformers computes them: tests/data/families.npz and families.json.

Each model's weights are drawn by numpy from its index (see `weights` in tests/checkpoints/families.py, which the suite
draws again), so that only configurations, tokens and logits are stored. Run from the repository's root; README.md in
this folder says in which environment.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "checkpoints"))
from families import DOCUMENTS, TOKENS, hf_weights  # noqa: E402

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
QWEN3_MOE = {
    "rope_theta": 1000000.0,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA4 = {
    "rope_theta": 5000.0,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layers": [],
    "attention_chunk_size": 5,
    "attn_temperature_tuning": True,
    "floor_scale": 3,
    "attn_scale": 0.4,
    "pad_token_id": None,
}
# name -> (config class, the fields beyond SHAPE)
FAMILIES = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4, "rope_theta": 10000.0}),
    "llama3": ("LlamaConfig", {"rope_theta": 500000.0}),
    "llama31": ("LlamaConfig", {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "llama32": (
        "LlamaConfig",
        {"rope_theta": 5000.0, "tie_word_embeddings": True, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ),
    "llama_linear": ("LlamaConfig", {"rope_theta": 1000.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama_dynamic": (
        "LlamaConfig",
        {"max_position_embeddings": 8, "rope_theta": 1000.0, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "smollm2": ("LlamaConfig", {"rope_theta": 100000.0, "tie_word_embeddings": True, "head_dim": 8}),
    "mistral": ("MistralConfig", {"rope_theta": 10000.0, "sliding_window": 5, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {"rope_theta": 1000000.0, "tie_word_embeddings": True}),
    "qwen25_yarn": ("Qwen2Config", {"rope_theta": 1000.0, "rope_scaling": {"rope_type": "yarn", **YARN}}),
    "qwen2_window": (
        "Qwen2Config",
        {"rope_theta": 10000.0, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"rope_theta": 1000000.0, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "rope_theta": 10000.0,
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 12,
            "rope_theta": 100000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "mixtral": ("MixtralConfig", {"rope_theta": 10000.0, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe_plain": ("Qwen3MoeConfig", {**QWEN3_MOE, "norm_topk_prob": False, "tie_word_embeddings": True}),
    "llama4": (
        "Llama4TextConfig",
        {**LLAMA4, "rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
    ),
    "llama4_plain": (
        "Llama4TextConfig",
        {
            **LLAMA4,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "no_rope_layers": [1, 0, 0, 1],
            "attention_chunk_size": None,
            "attn_temperature_tuning": False,
        },
    ),
}


def with_weights(config, seed):
    """The model with weights drawn for the names and shapes that its saved files have."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        with safe_open(file, "numpy") as saved:
            shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
        save_file(hf_weights(shapes, seed), file, {"format": "pt"})
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(info.values()), info
    return model.eval()


def main() -> None:
    configs, arrays = {}, {}
    for seed, (name, (kind, fields)) in enumerate(FAMILIES.items()):
        # transformers writes into the objects it is given.
        config = getattr(transformers, kind)(**copy.deepcopy({**SHAPE, **fields}))
        model = with_weights(copy.deepcopy(config), seed)
        with torch.no_grad():
            for document, tokens in zip(DOCUMENTS, TOKENS, strict=True):
                arrays[f"{name}.{document}"] = model(torch.tensor([tokens])).logits[0].numpy()
        # As released files have it, and as the present version of transformers saves it.
        gemma = config.model_type.startswith("gemma")
        activation = {"hidden_activation": "gelu_pytorch_tanh"} if gemma else {"hidden_act": "silu"}
        released = {"model_type": config.model_type} | activation | SHAPE | fields
        configs[name] = {"seed": seed, "released": released, "saved": json.loads(config.to_json_string())}
    data = ROOT / "tests" / "data"
    np.savez_compressed(data / "families.npz", **arrays)
    (data / "families.json").write_text(json.dumps(configs, indent=1) + "\n")


if __name__ == "__main__":
    main()
