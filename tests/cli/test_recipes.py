"""The recipes: their constants, and that each of them trains."""

import functools
import logging
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import optax
import pytest
from tiny_algorithm import SIZES, Tiny, groups, host, number, weights

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli import training
from jaxrl_llm.cli.algorithm import bind_algorithm, bind_selection, check_algorithm
from jaxrl_llm.cli.training import run_training
from jaxrl_llm.config import AlgorithmConfig, KlConfig, RunConfig, differences, load, validate
from jaxrl_llm.losses import algorithms
from jaxrl_llm.types import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
OFF = {"zero_variance_filter": False, "no_positive_resampling": None}
SCALERL = {
    "objective": "cispo",
    "constants": {"ratio_cap": 5.0, "ratio_floor": 0.0},
    "updates_per_batch": 1,
    "baseline": "group_mean",
    "normalisation": "batch_std",
    "aggregation": "prompt",
    "kl": ("none", "k3", 0.001),
    "entropy": (0.0, None),
    "critic": False,
    "zero_variance_filter": True,
    "no_positive_resampling": 0.9,
    "prompts_per_step": 48,
    "group_size": 16,
    "mode": "pipeline",
    "max_lag": 8,
    "length_penalty": "none",
    "rewards": (1.0, -1.0, {"answer": 1.0}),
    "repetition_limit": 0,
    "lr": 5e-7,
    "warmup_steps": 100,
    "betas_and_eps": (0.9, 0.95, 1e-15),
    "weight_decay": 0.01,
    "interruption": True,
}
SYNCHRONOUS = SCALERL | {"mode": "sync", "prompts_per_step": 32, "interruption": False}
PPO = SYNCHRONOUS | OFF | {"objective": "ppo", "constants": {"clip_low": 0.2, "clip_high": 0.2}}
GRPO = PPO | {
    "normalisation": "prompt_std",
    "aggregation": "sample",
    "kl": ("loss", "k3", 0.04),
    "group_size": 64,
}
ISOCOMPUTE = SYNCHRONOUS | OFF | {"lr": 7.0710678e-7, "warmup_steps": 10}
EXPECTED = {
    "scalerl": SCALERL,
    "pipeline_8": SCALERL,
    "ppo_off_policy_8": SCALERL | {"mode": "ppo_off_policy"},
    "grpo": GRPO,
    "tan_grpo": GRPO,
    "dr_grpo": PPO | {"normalisation": "none", "aggregation": "constant"},
    "dapo": PPO
    | {
        "constants": {"clip_low": 0.2, "clip_high": 0.28},
        "updates_per_batch": 16,
        "normalisation": "prompt_std",
        "aggregation": "token",
        "zero_variance_filter": True,
        "prompts_per_step": 512,
        "length_penalty": ("all", 20480, 4096),
        "lr": 1e-6,
        "warmup_steps": 20,
    },
    "gspo": PPO
    | {
        "objective": "gspo",
        "constants": {"clip_low": 3e-4, "clip_high": 4e-4},
        "normalisation": "prompt_std",
        "aggregation": "sample",
    },
    "cispo_minimax": SYNCHRONOUS
    | {
        "updates_per_batch": 16,
        "normalisation": "prompt_std",
        "no_positive_resampling": None,
        "repetition_limit": 3000,
    },
    "magistral": PPO
    | {
        "constants": {"clip_low": 0.2, "clip_high": 0.28},
        "normalisation": "global",
        "aggregation": "prompt",
        "zero_variance_filter": True,
        "rewards": (1.0, 0.0, {"answer": 0.9, "format": 0.1, "language": 0.1}),
    },
    "ppo": PPO
    | {
        "baseline": "none",
        "normalisation": "none",
        "aggregation": "token",
        "kl": ("reward", "k1", 0.001),
        "critic": True,
    },
    "rloo": SYNCHRONOUS
    | OFF
    | {
        "objective": "reinforce",
        "constants": {},
        "baseline": "leave_one_out",
        "normalisation": "none",
        "aggregation": "sequence_sum",
        "kl": ("reward", "k1", 0.001),
    },
    "reinforce_pp": PPO
    | {"baseline": "none", "normalisation": "global", "aggregation": "token", "kl": ("reward", "k1", 0.001)},
    "isocompute_easy": ISOCOMPUTE | {"kl": ("loss", "k3", 0.001), "entropy": (0.001, None)},
    "isocompute_hard": ISOCOMPUTE,
}


def resolved(config: RunConfig) -> dict:
    algorithm, rollout, optimizer = config.algorithm, config.rollout, config.optimizer
    assert (algorithm.importance, algorithm.anchor, algorithm.overlong_filter) == ({}, None, False)
    assert rollout.temperature == 1.0
    assert (optimizer.decay_steps, optimizer.clip_norm) == (0, None)
    shaping = (rollout.length_penalty, rollout.length_limit, rollout.length_cache)
    same = {"objective", "updates_per_batch", "baseline", "normalisation", "aggregation"}
    return {
        **{name: getattr(algorithm, name) for name in {*same, "zero_variance_filter", "no_positive_resampling"}},
        "constants": algorithm.constants,
        "kl": (algorithm.kl.place, algorithm.kl.estimator, algorithm.kl.coefficient),
        "entropy": (algorithm.entropy.coefficient, algorithm.entropy.target),
        "critic": algorithm.critic.enabled,
        **{name: getattr(rollout, name) for name in ("prompts_per_step", "group_size", "mode", "max_lag")},
        "rewards": (rollout.reward_correct, rollout.reward_wrong, rollout.rewards),
        "repetition_limit": rollout.repetition_limit,
        "length_penalty": "none" if rollout.length_penalty == "none" else shaping,
        "lr": optimizer.lr,
        "warmup_steps": optimizer.warmup_steps,
        "betas_and_eps": (optimizer.b1, optimizer.b2, optimizer.eps),
        "weight_decay": optimizer.weight_decay,
        "interruption": rollout.interruption.enabled,
    }


def test_every_recipe_file_is_in_the_table():
    assert {path.stem for path in (CONFIGS / "recipes").glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_resolved_constants(name):
    config = load(CONFIGS / "recipes" / f"{name}.yaml")
    assert resolved(config) == EXPECTED[name]
    check_algorithm(config)


@pytest.mark.parametrize("name", EXPECTED)
def test_recipes_say_their_name_and_keep_their_float32_head(name):
    path = CONFIGS / "recipes" / f"{name}.yaml"
    assert load(path).recipe == name
    with pytest.raises(UserError, match=rf"head_dtype = bfloat16 is an ablation, and recipe {name} has a float32 head"):
        load(path, ["model.head_dtype=bfloat16"])
    assert load(path, ["model.head_dtype=bfloat16", "recipe=null"]).model.head_dtype == "bfloat16"


def test_the_defaults_are_scalerl():
    defaults, scalerl = RunConfig(), load(CONFIGS / "recipes" / "scalerl.yaml")
    assert defaults.algorithm == scalerl.algorithm
    assert defaults.optimizer == scalerl.optimizer


def test_interruption_constants():
    how = load(CONFIGS / "recipes" / "scalerl.yaml").rollout.interruption
    assert (how.lowest, how.highest, how.answer_tokens) == (10_000, 12_000, 2_048)
    assert how.phrase == "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"


def test_ppo_critic_constants():
    critic = load(CONFIGS / "recipes" / "ppo.yaml").algorithm.critic
    assert (critic.gamma, critic.lam, critic.clip, critic.coefficient, critic.lr) == (1.0, 1.0, 0.2, 0.1, 1e-5)


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("dr_grpo", [[1.0], [1.0]]),
        ("grpo", [[1.0 + 1e-6], [np.sqrt(4 / 3) + 1e-6]]),  # the group's, ddof 1
        ("scalerl", [[np.sqrt(7 / 8) + 1e-6]] * 2),  # the batch's, ddof 0
        ("magistral", [[np.sqrt(7 / 8) + 1e-6]] * 2),
    ],
)
def test_advantages_are_normalised_once(name, deviation):
    """Reported of other stacks: twice, by the algorithm and by the trainer. Rewards -+1 of two groups of four."""
    rewards = np.array([[1.0, -1, -1, -1], [1, 1, -1, -1]])
    found = bind_selection(load(CONFIGS / "recipes" / f"{name}.yaml")).advantages(rewards, np.ones((2, 4), bool))
    centred = np.array([[1.5, -0.5, -0.5, -0.5], [1, 1, -1, -1]])
    np.testing.assert_allclose(found, centred / np.array(deviation), rtol=1e-12)


def test_dr_grpo_divides_by_the_generation_budget():
    config = load(CONFIGS / "recipes" / "dr_grpo.yaml", ["model.max_context=64", "rollout.max_new_tokens=32"])
    weights_N = bind_selection(config).token_weights(np.array([3, 2]), np.zeros(2, int), np.ones(2, bool))
    np.testing.assert_allclose(weights_N, 1 / (2 * 32))


def choices(section, name):
    return set(get_args(section.model_fields[name].annotation))


def test_the_config_offers_exactly_what_the_losses_have():
    """The config cannot import the table of names, so it repeats it."""
    assert choices(AlgorithmConfig, "objective") == set(algorithms.OBJECTIVES)
    assert choices(AlgorithmConfig, "baseline") == set(algorithms.BASELINES)
    assert choices(AlgorithmConfig, "normalisation") == set(algorithms.NORMALISATIONS)
    assert choices(AlgorithmConfig, "aggregation") == set(algorithms.AGGREGATIONS)
    assert choices(KlConfig, "estimator") == set(algorithms.KL_ESTIMATORS)
    for name in algorithms.OBJECTIVES:
        constants = AlgorithmConfig(objective=name).constants
        plain = algorithms.bind(name) if name != "cispo" else algorithms.bind(name, ratio_cap=5.0)
        rng = np.random.default_rng(0)
        logp, gen, old, a = (rng.normal(size=(2, 3)) for _ in range(4))
        arrays = (logp, gen, old, a, np.ones((2, 3), bool))
        np.testing.assert_array_equal(algorithms.bind(name, **constants)(*arrays), plain(*arrays))


@pytest.mark.parametrize(
    ("algorithm", "rollout", "message"),
    [
        ({"objective": "ppo", "importance": {"tis": {}, "icepop": {}}}, {}, "which squares it"),
        ({"objective": "gspo", "aggregation": "sample", "importance": {"tis": {}}}, {}, "one ratio per sequence"),
        ({"objective": "gspo"}, {}, "would weight it by length"),
        ({"importance": {"tis": {}}}, {}, "tis would apply it twice"),
        ({"objective": "ppo", "anchor": "sampler", "importance": {"mis": {}}}, {}, "bypassed"),
        ({"importance": {"tis2": {}}}, {}, "correction 'tis2' is unknown; choose one of"),
        ({"objective": "ppo", "importance": {"tis": {"caps": 2}}}, {}, "tis has no constant 'caps'; it has cap"),
        ({"objective": "ppo", "importance": {"off_policy_mask": {}}}, {}, "needs the constant 'delta'"),
        ({"ratio_cap": 0.2}, {}, "write 1.2 if 1 \\+ eps was meant"),
        ({"objective": "ppo", "dual_clip": 1.1}, {}, "must exceed 1 \\+ clip_high"),
        ({"objective": "ppo", "ratio_cap": 5}, {}, "is not a constant of objective ppo, which takes clip_low"),
        ({"objective": "reinforce", "anchor": "old"}, {}, "does nothing for objective reinforce"),
        ({"max_tokens": 100}, {}, "only it, needs the divisor"),
        ({"critic": {"enabled": True}}, {}, "use baseline none"),
        ({"baseline": "none"}, {}, "equal rewards, whose deviation is 0, would become enormous"),
        ({"entropy": {"target": 0.2, "coefficient": 0.1}}, {}, "both a fixed coefficient and a target"),
        ({}, {"group_size": 1}, "use at least 2"),
        ({"updates_per_batch": 3}, {}, "does not divide into algorithm.updates_per_batch = 3 equal parts"),
    ],
)
def test_what_means_nothing_is_refused_with_the_reason(algorithm, rollout, message):
    with pytest.raises(UserError, match=message) as error:
        check_algorithm(validate({"algorithm": algorithm, "rollout": rollout}, "test"))
    assert "\n" not in str(error.value)


def test_the_constant_divisor_is_the_generation_budget_unless_it_is_given():
    tree = {"objective": "ppo", "aggregation": "constant", "normalisation": "none"}
    for given, divisor in (({}, 8), ({"max_tokens": 100}, 100)):
        weights = bind_selection(validate({"algorithm": tree | given}, "test")).token_weights
        np.testing.assert_allclose(weights(np.array([3, 2]), np.zeros(2, int), np.ones(2, bool)), 1 / (2 * divisor))


@pytest.mark.parametrize(
    ("algorithm", "reads", "looks"),
    [
        ({}, False, False),
        ({"updates_per_batch": 2}, False, False),  # anchored on the sampler alone
        ({"updates_per_batch": 2, "anchor": "old"}, True, True),
        ({"objective": "ppo"}, False, False),  # one update: old is the present policy
        ({"objective": "ppo", "updates_per_batch": 2}, True, True),
        ({"objective": "ppo", "updates_per_batch": 2, "anchor": "sampler"}, False, False),
        ({"objective": "reinforce", "updates_per_batch": 2}, False, False),
        ({"objective": "reinforce", "updates_per_batch": 2, "importance": {"tis": {}}}, True, True),
        ({"updates_per_batch": 2, "importance": {"off_policy_mask": {"delta": 1.0}}}, False, False),
        ({"updates_per_batch": 2, "importance": {"off_policy_mask": {"delta": 1.0, "anchor": "old"}}}, True, True),
        ({"kl": {"place": "reward"}}, True, True),
        ({"kl": {"place": "loss"}}, False, False),
        ({"baseline": "none", "normalisation": "none", "critic": {"enabled": True}}, False, True),
    ],
)
def test_the_policy_is_scored_before_the_step_only_where_somebody_reads_it(algorithm, reads, looks):
    bound = bind_algorithm(validate({"algorithm": algorithm}, "test"), num_segments=3)
    assert (bound.reads_old, bound.looks_back) == (reads, looks)


FILTERS = {"zero_variance_filter", "overlong_filter", "no_positive_resampling", "aggregation", "max_tokens"}


@pytest.fixture(scope="module")
def tiny_of():
    """The step of a recipe on a tiny policy; recipes that differ on the host alone share one."""

    @functools.cache
    def build(key):
        config = sized(RunConfig.model_validate_json(key))
        reference = weights(config) if config.algorithm.kl.place != "none" else None
        return Tiny(config, rate=0.0, optimizer=optax.adamw(1e-3), reference=reference)

    def get(config):
        return build(config.model_dump_json(include={"algorithm": config.algorithm.model_dump().keys() - FILTERS}))

    return get


def sized(config: RunConfig) -> RunConfig:
    rollout = SIZES["rollout"] | {"prompts_per_step": 2 * config.algorithm.updates_per_batch}
    return validate(config.model_dump() | SIZES | {"rollout": rollout}, "test")


@pytest.mark.parametrize("name", EXPECTED)
def test_every_recipe_trains(name, tiny_of):
    """Two steps on a tiny policy, a warning being an error; 20 steps of the quickstart policy are below."""
    config = load(CONFIGS / "recipes" / f"{name}.yaml")
    tiny, config = tiny_of(config), sized(config)
    tiny.config = config
    start = weights(config)
    state = tiny.state(start)
    for seed in range(2):
        state, metrics = tiny(state, groups(config, seed))
        assert np.isfinite(number(metrics["loss"]))
        assert number(metrics["skipped"]) == 0
        assert number(metrics["grad_norm"]) > 0
        assert number(metrics["tokens_trained"]) > 0
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), host(state.params), start)
    assert max(jax.tree.leaves(moved)) > 1e-4
    assert ("kl_reference_k3" in metrics) == (config.algorithm.kl.place != "none")
    assert ("value_loss" in metrics) == config.algorithm.critic.enabled


QUICKSTART = CONFIGS / "quickstart.yaml"
# What the policy decides and no recipe. A rate of 5e-7 would leave 100 thousand weights where they are.
OF_THE_POLICY = ("model.", "tokenizer.", "data.", "sampler.", "train.", "sft.", "eval.", "checkpoint.", "device.")
OF_THE_POLICY += ("rollout.max_prompt_tokens:", "rollout.max_new_tokens:", "optimizer.lr:", "optimizer.warmup_steps:")
OF_THE_POLICY += ("rollout.interruption.enabled:",)  # it does not think
# Twenty steps and nothing after them; the devices are those that the tests run on.
TWENTY = ["train.steps=20", "optimizer.decay_steps=0", "eval.every=20", "checkpoint.every=20", "device.cpu_devices=8"]


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory):
    """The quickstart policy after its supervised warm-up, the same for every recipe and so done once for all."""
    run_dir = tmp_path_factory.mktemp("warm_up")
    assert run_training(load(QUICKSTART, TWENTY), run_dir, reinforce=False) == "finished"
    return CheckpointStore(run_dir / "checkpoints", keep=1).read_params(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_every_recipe_trains_the_quickstart_policy(name, warmed_up, jaxrl, records, tmp_path, monkeypatch, caplog):
    recipe = load(CONFIGS / "recipes" / f"{name}.yaml")
    # The recipe's own number of prompts where it is of the quickstart's order; 512 of 16 would take minutes here.
    prompts = recipe.rollout.prompts_per_step if recipe.rollout.prompts_per_step <= 64 else 32
    # The policy's rate is that of one update of its 512 completions; several updates share them and it.
    rate = load(QUICKSTART).optimizer.lr / recipe.algorithm.updates_per_batch
    options = [f"extends=recipes/{name}.yaml", f"rollout.prompts_per_step={prompts}", f"optimizer.lr={rate}", *TWENTY]
    config = load(QUICKSTART, options)
    changed = [c for c in differences(recipe, config) if not c.startswith(OF_THE_POLICY)]
    assert [c for c in changed if not c.startswith("rollout.prompts_per_step: ")] == []
    assert config.optimizer == load(QUICKSTART, options[2:]).optimizer  # or its warm-up would be another
    monkeypatch.setattr(training, "warm_up", lambda *_: warmed_up)
    run = tmp_path / "run"
    status, _, err = jaxrl("train", QUICKSTART, *options, "--run-dir", run)
    assert status == 0, err
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    steps, evaluations = records(run, "metrics"), records(run, "eval")
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert all(record["skipped"] == 0 for record in steps)
    assert all(np.isfinite([record["loss"], record["grad_norm"]]).all() for record in steps)
    assert all(record["tokens_trained"] > 0 for record in steps)
    assert [record["step"] for record in evaluations] == [0, 20]
    assert evaluations[1]["value"] > evaluations[0]["value"]
