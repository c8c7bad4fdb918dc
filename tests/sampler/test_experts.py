"""Sampler and trainer are one policy with experts and Llama 4's kinds of layers, on a mesh that splits experts too."""

import numpy as np
from sampler_reference import CONFIG, Trainer, make_engine, make_params, make_requests, run

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.sampler.scheduler import Scheduler

SCOUT = ModelConfig(
    **CONFIG.model_dump() | {
        "experts": 4, "experts_per_token": 2, "router_gate": "sigmoid_input", "shared_expert_d_ff": 16, "d_ff": 16,
        "attention_pattern": "CN", "attention_chunk": 3, "qk_unit_norm": True, "query_temperature_every": 2,
        "query_temperature_scale": 0.5,
    }
)  # fmt: skip


def test_logprobs_equal_the_teacher_forced_forward_with_experts_on_several_devices():
    # Prompts of up to 6 tokens in chunks of 4, slots that do not divide over the experts' devices.
    engine = make_engine(SCOUT, axes={"expert": 2, "tensor": 2}, slots=3, prefill_chunk=4, prefill_buckets=(4,))
    params, asked, trainer = make_params(SCOUT, 3), make_requests(32), Trainer(SCOUT)
    completions = run(Scheduler(engine, params), asked)
    for completion, (logprobs, _) in zip(completions, trainer(params, asked, completions), strict=True):
        np.testing.assert_allclose(completion.logprobs_T, logprobs, atol=2e-5)
    assert np.concatenate([c.logprobs_T for c in completions]).std() > 0.3
