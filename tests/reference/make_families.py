"""Tiny random models of every dense family as transformers computes them: tests/data/families.npz and families.json.

Each model's weights are drawn by numpy from its index (see `weights` in tests/checkpoints/families.py, which the suite
draws again), so that only configurations, tokens and logits are stored. Run from the repository's root; README.md in
this folder says in which environment.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

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
}


def main() -> None:
    configs, arrays = {}, {}
    for seed, (name, (kind, fields)) in enumerate(FAMILIES.items()):
        # transformers writes into the objects it is given.
        config = getattr(transformers, kind)(**copy.deepcopy({**SHAPE, **fields}))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        state = model.state_dict()
        drawn = hf_weights({key: tuple(value.shape) for key, value in state.items()}, seed)
        if config.tie_word_embeddings:
            drawn["lm_head.weight"] = drawn["model.embed_tokens.weight"]
        model.load_state_dict({key: torch.from_numpy(value) for key, value in drawn.items()})
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
