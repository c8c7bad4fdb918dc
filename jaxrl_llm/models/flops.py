"""Analytic compute of the decoder: the compiler's own count sees a scanned layer once."""

from jaxrl_llm.config import ModelConfig


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


def train_flops(model: ModelConfig, tokens: int) -> float:
    """6 N T: forward and backward (Kaplan et al., arXiv:2001.08361). Attention scores are left out."""
    return 6.0 * matmul_params(model) * tokens


def sample_flops(model: ModelConfig, tokens: int) -> float:
    """2 N T: one forward pass per token, prompts counted once per prefill."""
    return 2.0 * matmul_params(model) * tokens
