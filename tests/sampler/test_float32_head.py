"""The sampler's side of the float32 head; the trainer's is in tests/train/test_step.py."""

import re

import numpy as np
import pytest
from sampler_reference import CONFIG, PROMPT, make_engine, make_params

STAGES = ["prefill", "scored prefill", "decode"]


def products_of_the_head(stage, dtype, **changes):
    """Of a stage's lowered program: the products whose outputs are logits, and all."""
    config = CONFIG.model_copy(update=changes)
    engine = make_engine(config, dtype=dtype, top_logprobs=2)
    params, state = engine.load_params(make_params(config, 3)), engine.init_decode_state()
    if stage == "decode":
        text = engine._generate_jit.lower(params, state, np.int32(5)).as_text()
    else:
        prompts = (np.zeros((4, PROMPT), np.int32), np.ones(4, np.int32), np.int32(1))
        program = engine._prefill_scored_jit if stage == "scored prefill" else engine._prefill_jit
        text = program.lower(params, *prompts, engine.device_version(0)).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    return [line for line in dots if re.search(r"tensor<\d+x20x\w+>$", line.strip().split(" loc(")[0])], dots


@pytest.mark.parametrize("stage", STAGES)
def test_the_samplers_head_is_float32_at_the_highest_precision_whatever_its_dtype(stage):
    # A head that is float32 on the trainer's side only makes ratios differ from 1 at equal weights.
    head, dots = products_of_the_head(stage, "bfloat16", compute_dtype="bfloat16")
    assert head
    assert all("precision = [HIGHEST, HIGHEST]" in line and "bf16" not in line for line in head)
    assert any("bf16" in line for line in dots)


@pytest.mark.parametrize("stage", STAGES)
def test_the_ablation_makes_bfloat16_products_of_the_samplers_head(stage):
    head, dots = products_of_the_head(stage, "float32", head_dtype="bfloat16")
    assert head
    assert all(line.count("xbf16>") == 2 and "HIGHEST" not in line for line in head)
    assert sum("bf16" in line for line in dots) == len(head)
