"""Analytic compute of the decoder: the compiler's own count sees a scanned layer once."""

from jaxrl_llm.config import LoraConfig, ModelConfig


def matmul_params(model: ModelConfig) -> int:
    """Parameters that multiply every token: all matrices and the head, not the embedding lookup and the norms.

    Of a layer's experts as many count as a token goes through, and the shared one.
    """
    attention = 2 * model.d_model * model.head_dim * (model.heads + model.kv_heads)
    feed_forward = 3 * model.d_model * model.d_ff
    if model.experts is not None:
        width = model.d_ff * (model.experts_per_token or 0) + (model.shared_expert_d_ff or 0)
        feed_forward = model.d_model * (3 * width + model.experts)
    return model.layers * (attention + feed_forward) + model.vocab_size * model.d_model


def adapter_params(model: ModelConfig, lora: LoraConfig) -> int:
    """Numbers in the adapters: rank times inputs plus outputs of every adapted projection."""
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = {"q": wide, "o": wide, "k": narrow, "v": narrow, "gate": model.d_ff, "up": model.d_ff, "down": model.d_ff}
    return model.layers * lora.rank * sum(model.d_model + width[target] for target in lora.targets)


def train_flops(model: ModelConfig, tokens: int, lora: LoraConfig | None = None) -> float:
    """6 N T: forward and backward (Kaplan et al., arXiv:2001.08361). Attention scores are left out.

    With adapters of n numbers (4 N + 6 n) T: the frozen matrices have no gradients.
    """
    if lora is None:
        return 6.0 * matmul_params(model) * tokens
    return (4.0 * matmul_params(model) + 6.0 * adapter_params(model, lora)) * tokens


def sample_flops(model: ModelConfig, tokens: int) -> float:
    """2 N T: one forward pass per token, prompts counted once per prefill."""
    return 2.0 * matmul_params(model) * tokens


_PEAKS = {
    # TPUs, per chip: cloud.google.com/tpu/docs, "peak compute per chip (bf16)" on each version's page
    "TPU v4": 275e12,
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), 197e12),
    **dict.fromkeys(("TPU v5", "TPU v5p"), 459e12),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), 918e12),
    # NVIDIA's datasheets: bfloat16 tensor cores, without sparsity
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989e12),
    "NVIDIA H100 PCIe": 756e12,
}


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of one device in bfloat16 products, by what JAX calls its kind; None of kinds that are not known."""
    return _PEAKS.get(device_kind)
