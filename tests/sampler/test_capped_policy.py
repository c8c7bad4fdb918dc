"""Sampler and trainer are one policy under every option of the decoder, the cap of the logits included."""

import jax
import jax.numpy as jnp
import numpy as np
from sampler_reference import CONFIG, NEW, PROMPT, Trainer, make_engine, make_params, make_requests, run

from jaxrl_llm import sharding
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.train.microbatch import Scorer

OPTIONS = ModelConfig(
    **CONFIG.model_dump() | {
        "attention_pattern": "LG", "window": 3, "local_rope_theta": 100.0, "rope_theta": 1000.0, "qk_norm": True,
        "qkv_bias": True, "query_pre_attn_scalar": 12, "attention_softcap": 2.0, "final_softcap": 1.5,
        "activation": "gelu_tanh", "post_norms": True, "scale_embeddings": True,
        "rope_scaling": {"kind": "linear", "factor": 2},
    }
)  # fmt: skip


def test_logprobs_equal_the_teacher_forced_forward_under_every_option():
    # Prompts of up to 6 tokens in chunks of 4, answers of 8: windows of 3 begin in the chunk before.
    engine, params = make_engine(OPTIONS, prefill_chunk=4, prefill_buckets=(4,)), make_params(OPTIONS, 3)
    asked, trainer = make_requests(32), Trainer(OPTIONS)
    completions = run(Scheduler(engine, params), asked)
    for completion, (logprobs, _) in zip(completions, trainer(params, asked, completions), strict=True):
        np.testing.assert_allclose(completion.logprobs_T, logprobs, atol=2e-5)
    assert max(len(r.tokens_T) + len(c.tokens_T) for r, c in zip(asked, completions, strict=True)) == PROMPT + NEW
    spread = np.concatenate([c.logprobs_T for c in completions])
    assert spread.std() > 0.1  # a policy that is not flat
    # No token is less likely than the cap lets it be: two logits are at most 3 apart, at temperature .5 six.
    assert spread.min() > -6 - np.log(CONFIG.vocab_size)


def test_the_trainers_scores_cap_the_logits_before_the_temperature(cpu_devices):
    mesh = sharding.make_mesh({"data": 1}, cpu_devices[:1])
    params = make_params(OPTIONS, 3)
    rng = np.random.default_rng(0)
    hidden, targets = rng.standard_normal((1, 5, 32), np.float32), rng.integers(0, 20, (1, 5))
    found, _ = Scorer(OPTIONS, mesh, temperature=0.5, head_chunk=8).logprobs(params, jnp.asarray(hidden), targets)
    capped = 1.5 * np.tanh(hidden[0] @ np.asarray(params["head"]).T / 1.5)
    wanted = np.take_along_axis(np.asarray(jax.nn.log_softmax(capped / 0.5)), targets[0][:, None], axis=1)
    np.testing.assert_allclose(found[0], wanted[:, 0], atol=1e-5)
