"""A run of seconds."""

TINY = """
device: {platform: cpu, cpu_devices: 8}
model: {layers: 1, d_model: 32, heads: 2, kv_heads: 2, head_dim: 16, d_ff: 64, max_context: 12}
tokenizer: {vocab_size: 32}
data: {sources: [{name: addition, kind: arithmetic, low: 1, high: 9, heldout: 16}]}
algorithm: {no_positive_resampling: null}
rollout: {prompts_per_step: 2, group_size: 4, max_lag: 0, max_prompt_tokens: 4, max_new_tokens: 3}
sampler: {slots: 8, decode_steps: 2}
optimizer: {lr: 1e-3, warmup_steps: 2}
train: {steps: 6, row_length: 32, microbatch_rows: 2}
sft: {steps: 150, examples_per_step: 8, lr: 3e-3, warmup_steps: 2}
eval: {every: 2, prompts: 16, samples: 2}
checkpoint: {every: 2, keep: 2}
"""
