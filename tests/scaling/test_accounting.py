"""Compute accounting: worked numbers."""

import pytest

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.flops import matmul_params, sample_flops, train_flops
from jaxrl_llm.scaling.accounting import device_hours, pretraining_flops, rl_step
from jaxrl_llm.types import UserError


def test_pretraining_is_6ND():
    # Chinchilla's own model: 70e9 parameters and 1.4e12 tokens.
    assert pretraining_flops(70e9, 1.4e12) == pytest.approx(5.88e23)


def test_an_rl_step_by_hand():
    # 4 prompts of 10 tokens, 8 completions of 100 each: 3,200 generated; rows 3,200 + 4 x 8 x 10 = 3,520 tokens.
    cost = rl_step(1e6, prompts=4, rollouts=8, prompt_tokens=10, completion_tokens=100, scoring_passes=1)
    assert cost.training == 6e6 * 3520
    assert cost.sampling == 2e6 * (3200 + 40)
    assert cost.scoring == 2e6 * 3520
    assert cost.tokens == 3200
    assert cost.total == cost.training + cost.sampling + cost.scoring
    shared = rl_step(1e6, prompts=4, rollouts=8, prompt_tokens=10, completion_tokens=100, share_prompts=True)
    assert (shared.training, shared.scoring) == (6e6 * 3240, 0.0)


def test_the_rule_is_that_of_the_runs():
    model = ModelConfig(layers=2, d_model=64, heads=4, kv_heads=4, head_dim=16, d_ff=256, max_context=16, vocab_size=32)
    N = matmul_params(model)
    cost = rl_step(N, prompts=4, rollouts=8, prompt_tokens=10, completion_tokens=100)
    assert cost.training == train_flops(model, 3520)
    assert cost.sampling == sample_flops(model, 3240)


def test_device_hours():
    # 1e18 FLOPs at 1e15 FLOP/s and 50 %: 2,000 s.
    assert device_hours(1e18, peak=1e15, utilisation=0.5) == pytest.approx(2000 / 3600)
    with pytest.raises(UserError, match="utilisation is 40"):
        device_hours(1.0, peak=1.0, utilisation=40)
    with pytest.raises(UserError, match="peak of 0"):
        device_hours(1.0, peak=0.0, utilisation=0.5)
    with pytest.raises(UserError, match="rollouts is 0"):
        rl_step(1e6, prompts=4, rollouts=0, prompt_tokens=10, completion_tokens=100)
