import json
import sys

import pytest

from jaxrl_llm.cli.main import main

TINY = """
device: {platform: cpu, cpu_devices: 8}
model: {layers: 1, d_model: 32, heads: 2, kv_heads: 2, head_dim: 16, d_ff: 64, max_context: 12}
tokenizer: {vocab_size: 32}
data: {task: addition, low: 1, high: 9, heldout_prompts: 16}
algorithm: {no_positive_resampling: null}
rollout: {prompts_per_step: 2, group_size: 4, max_lag: 0, max_prompt_tokens: 4, max_new_tokens: 3}
sampler: {slots: 8, decode_steps: 2}
optimizer: {lr: 1e-3, warmup_steps: 2}
train: {steps: 6, row_length: 32, microbatch_rows: 2}
sft: {steps: 150, examples_per_step: 8, lr: 3e-3, warmup_steps: 2}
eval: {every: 2, prompts: 16, samples: 2}
checkpoint: {every: 2, keep: 2}
"""


@pytest.fixture
def tiny(tmp_path):
    """A configuration of seconds: one-digit addition, one layer."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def jaxrl(monkeypatch, capsys):
    """Run a `jaxrl` command in this process: (exit status, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxrl", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def records():
    """The records of a run's .jsonl file."""
    return lambda run_dir, name: [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]
