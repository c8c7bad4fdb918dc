"""The planner against runs that can be worked out by hand."""

import json
from dataclasses import replace

import pytest

from jaxrl_llm.pipeline.planner import Costs, Plan, compare_modes, predict, read_costs, splits
from jaxrl_llm.rollout.lag import LagRule
from jaxrl_llm.types import UserError

SYNC, OFF_POLICY, PIPELINE = LagRule("sync"), LagRule("ppo_off_policy", 2), LagRule("pipeline", 4)
# 8 completions of 48 tokens in 8 slots: .48 s. 384 tokens on 2 chips: .192 s.
COSTS = Costs(train_token_chip_s=0.001, decode_step_s=0.01, lengths=(48.0,), push_s=0.1)
PLAN = Plan(SYNC, prompts_per_step=4, group_size=2, slots=8, decode_steps=1)


def test_steps_of_equal_completions_take_what_the_parts_add_up_to():
    sync, off_policy, pipeline = compare_modes([SYNC, OFF_POLICY, PIPELINE], PLAN, COSTS, trainer_chips=2, samplers=1)
    assert sync["step_s"] == pytest.approx(0.48 + 0.192 + 0.1)
    # Two batches one after the other, the first trained while the second is sampled; then the second, then the push.
    assert off_policy["step_s"] == pytest.approx((2 * 0.48 + 0.192 + 0.1) / 2)
    assert pipeline["step_s"] == pytest.approx(0.48)  # training and push are hidden
    assert [row["speed"] for row in (sync, pipeline)] == pytest.approx([1, 0.772 / 0.48])
    assert pipeline["completion_tokens_per_s"] == pytest.approx(384 / 0.48)
    assert pipeline["trainer_idle"] == pytest.approx(1 - 0.192 / 0.48)
    assert sync["sampler_idle"] == pytest.approx(1 - 0.48 / 0.772)
    assert pipeline["sampler_idle"] == pytest.approx(0, abs=1e-9)
    assert (sync["lag_max"], off_policy["lag_max"]) == (0, 1)
    assert off_policy["lag_mean"] == pytest.approx(0.5)
    assert sync["trainer_waits_s"].keys() == {"sampling"}


def test_a_trainer_that_is_the_slower_one_sets_the_pace_of_a_pipeline():
    slow = replace(COSTS, train_token_chip_s=0.01, host_s=0.08)  # 1.92 s on the device, .08 beside it
    found = predict(replace(PLAN, rule=PIPELINE), slow, trainer_chips=2, samplers=1)
    assert found["step_s"] == pytest.approx(2.0)
    assert found["trainer_idle"] == pytest.approx(0, abs=1e-9)
    assert found["sampler_idle"] == pytest.approx(1 - 0.48 / 2.0, abs=0.02)
    assert found["sampler_waits_s"].keys() == {"stock"}  # samples for stock would only grow old
    assert found["lag_max"] <= 2


def test_rewards_prefill_and_a_shared_processor_cost_what_they_cost():
    base = predict(PLAN, COSTS, trainer_chips=2, samplers=1)["step_s"]
    scored = predict(PLAN, replace(COSTS, score_s=0.05), trainer_chips=2, samplers=1)["step_s"]
    assert scored == pytest.approx(base + 4 * 0.05)  # one group after another
    prefilled = predict(PLAN, replace(COSTS, prefill_s=0.03), trainer_chips=2, samplers=1)["step_s"]
    assert prefilled == pytest.approx(base + 4 * 0.03)
    here = replace(PLAN, rule=PIPELINE, local=True)
    shared = predict(here, replace(COSTS, overlap_train=2.0, overlap_sample=2.0), trainer_chips=2, samplers=1)
    assert shared["step_s"] == pytest.approx(0.48 + 0.192, rel=0.05)  # as if one after the other


@pytest.mark.parametrize("rule", [SYNC, OFF_POLICY, PIPELINE], ids=lambda rule: rule.mode)
def test_a_sampler_in_the_trainers_process_keeps_the_time_of_one_that_is_told_at_once(rule):
    # No message takes time here, and nothing is shared: where the sampler lives makes no difference but for the stock.
    apart, here = (
        predict(replace(PLAN, rule=rule, local=local), COSTS, trainer_chips=2, samplers=1)["step_s"]
        for local in (False, True)
    )
    assert here == pytest.approx(apart, rel=0.05)


def test_long_completions_hold_sync_up_more_than_a_pipeline():
    uneven = replace(COSTS, lengths=(12.0, 12.0, 12.0, 48.0))
    sync, pipeline = compare_modes([SYNC, PIPELINE], PLAN, uneven, trainer_chips=2, samplers=1)
    assert sync["step_s"] > 0.3
    assert pipeline["step_s"] == pytest.approx(8 * 21 / 8 * 0.01, rel=0.1)  # the mean length, all slots busy
    first = predict(replace(PLAN, rule=PIPELINE, order="finished"), uneven, trainer_chips=2, samplers=1)
    assert first["step_s"] <= pipeline["step_s"] * 1.01
    assert first["lag_max"] <= 4


def test_the_recommended_split_is_the_fastest_and_balances_both():
    plan = replace(PLAN, rule=PIPELINE, slots=4)
    rows = splits(plan, replace(COSTS, sampler_chips=2), chips=10, steps=24)
    assert {(row["samplers"], row["trainer_chips"]) for row in rows} == {(1, 8), (2, 6), (3, 4), (4, 2)}
    assert [row["step_s"] for row in rows] == sorted(row["step_s"] for row in rows)
    # n samplers of 4 slots make a batch of 8 in .96 / n s, t chips train it in .384 / t.
    assert rows[0]["samplers"] == 4
    many = splits(plan, replace(COSTS, train_token_chip_s=0.01), chips=8, trainer_multiple=2, steps=24)
    assert (many[0]["samplers"], many[0]["trainer_chips"]) == (2, 6)  # .48 s and .64 s; (4, 4): .24 s and .96 s
    with pytest.raises(UserError, match="2 chips hold no trainer of 2 beside a sampler of 1; give more"):
        splits(plan, COSTS, chips=2, trainer_multiple=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a JSON object; it needs decode_step_s, lengths, train_token_chip_s"),
        ({"decode_step": 1}, "has 'decode_step'; it may have"),
        ({"lengths": None}, "lacks 'lengths'"),
        ({"lengths": []}, "lengths is no list of token counts"),
        ({"lengths": [0]}, "lengths is no list of token counts"),
        ({"push_s": -1}, "push_s = -1 is no number of at least 0"),
        ({"overlap_train": 0.5}, "overlap_train = 0.5 is no number of at least 1"),
        ({"decode_step_s": 0}, "a decode step takes no time"),
        ({"sampler_chips": "2"}, "sampler_chips = '2' is no number"),
    ],
)
def test_costs_that_are_none_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "costs.json"
    whole = {"train_token_chip_s": 1e-3, "decode_step_s": 1e-2, "lengths": [4, 8]}
    if isinstance(content, dict):
        content = json.dumps({key: value for key, value in (whole | content).items() if value is not None})
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_costs(path)
