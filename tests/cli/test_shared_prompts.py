"""Prompts shared by their completions in training: the same step as with a prompt for each, whatever the algorithm."""

import jax
import numpy as np
import pytest
from tiny_algorithm import Tiny, configured, groups, host, number, weights

from jaxrl_llm.cli.join import packed_shape
from jaxrl_llm.types import Reach

PROMPT = 6
ALGORITHMS = {
    # One product of ratios over a whole completion, which must not reach into a sibling's or the prompt's tokens.
    "sequence ratios": {"objective": "gspo", "aggregation": "sample"},
    "critic": {
        "objective": "ppo",
        "updates_per_batch": 2,
        "baseline": "none",
        "normalisation": "global",
        "aggregation": "token",
        "kl": {"place": "reward", "estimator": "k1", "coefficient": 0.2},
        "critic": {"enabled": True, "gamma": 0.9, "lam": 0.8},
        "zero_variance_filter": False,
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shared_prompts_change_no_step(name):
    config = configured(ALGORITHMS[name], max_prompt_tokens=PROMPT)
    shared = config.model_copy(update={"train": config.train.model_copy(update={"share_prompts": True})})
    given = groups(config, seed=3, prompt=PROMPT)
    start, reference = weights(config), weights(config, seed=1) if name == "critic" else None
    results, tokens = [], []
    # Pieces of four tokens: shared prompts, ratios and credit of a completion lie across them.
    for each, axes in ((config, {"fsdp": 2}), (shared, {"fsdp": 2, "context": 4})):
        tiny = Tiny(each, rate=0.5, reference=reference, axes=axes)
        state, metrics = tiny(tiny.state(start), given)
        results.append((host(state.params), {key: number(value) for key, value in metrics.items()}))
        tokens.append(np.count_nonzero(tiny.batch(given).segment_ids))
    for (path, a), b, c in zip(
        jax.tree.leaves_with_path(results[0][0]), jax.tree.leaves(results[1][0]), jax.tree.leaves(start), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=jax.tree_util.keystr(path))
        assert np.abs(a - c).max() > 1e-4, path
    assert results[0][1].keys() == results[1][1].keys()
    for key, value in results[0][1].items():
        assert results[1][1][key] == pytest.approx(value, rel=2e-5, abs=1e-6), key
    assert tokens[1] < 0.7 * tokens[0]


def test_rows_are_told_how_far_their_documents_reach():
    config = configured(ALGORITHMS["sequence ratios"], max_prompt_tokens=PROMPT)
    new = config.rollout.max_new_tokens
    assert packed_shape(config, 8).reach == Reach(PROMPT + new - 1)
    shared = config.model_copy(update={"train": config.train.model_copy(update={"share_prompts": True})})
    assert packed_shape(shared, 8).reach == Reach(new, PROMPT - 1)
