"""The table of names: anchors, constants, products of corrections, and the combinations that are refused."""

import inspect

import numpy as np
import pytest

from jaxrl_llm.losses import importance, objectives
from jaxrl_llm.losses.algorithms import (
    CORRECTIONS,
    OBJECTIVES,
    bind,
    bind_corrections,
    bind_importance,
    check_composition,
)
from jaxrl_llm.types import UserError

LOGPROBS = np.array([[-1.0, -2.0, -0.5]], np.float32)
BEHAVIOR = np.array([[-1.2, -1.5, -0.5]], np.float32)
OLD = np.array([[-1.1, -2.2, -0.1]], np.float32)
ADVANTAGES = np.array([[1.0, -1.0, 1.0]], np.float32)
MASK = np.array([[True, True, False]])
ARRAYS = (LOGPROBS, BEHAVIOR, OLD, ADVANTAGES, MASK)
ONE_UPDATE = (LOGPROBS, BEHAVIOR, None, ADVANTAGES, MASK)


def test_each_objective_reads_its_own_anchor_unless_told_otherwise():
    ppo = objectives.ppo(LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.28)
    np.testing.assert_array_equal(bind("ppo", clip_high=0.28)(*ARRAYS), ppo)
    cispo = objectives.cispo(LOGPROBS, BEHAVIOR, ADVANTAGES, MASK, ratio_cap=5.0)
    np.testing.assert_array_equal(bind("cispo", ratio_cap=5.0)(*ARRAYS), cispo)
    decoupled = bind("cispo", ratio_cap=5.0, anchor="old")(*ARRAYS)
    np.testing.assert_array_equal(decoupled, objectives.cispo(LOGPROBS, OLD, ADVANTAGES, MASK, ratio_cap=5.0))
    bypassed = bind("ppo", anchor="sampler")(*ARRAYS)
    np.testing.assert_array_equal(bypassed, objectives.ppo(LOGPROBS, BEHAVIOR, ADVANTAGES, MASK))


def test_without_old_logprobs_the_ratio_to_old_is_one():
    np.testing.assert_array_equal(bind("ppo")(*ONE_UPDATE), np.where(MASK, ADVANTAGES, 0.0))


def test_token_tis_on_reinforce_is_cispo():
    weighted = bind("reinforce")(*ONE_UPDATE) * bind_importance("tis", cap=1.1)(*ONE_UPDATE)
    np.testing.assert_allclose(weighted, bind("cispo", ratio_cap=1.1)(*ONE_UPDATE), rtol=1e-6)


def test_corrections_compare_old_with_sampler_and_multiply():
    expected = importance.tis(OLD, BEHAVIOR, MASK, cap=2.0)
    np.testing.assert_array_equal(bind_importance("tis")(*ARRAYS), expected)
    drift = importance.off_policy_sequence_mask(LOGPROBS, BEHAVIOR, ADVANTAGES - 1, MASK, delta=0.1)
    rest = (LOGPROBS, BEHAVIOR, OLD, ADVANTAGES - 1, MASK)
    np.testing.assert_array_equal(bind_importance("off_policy_mask", delta=0.1)(*rest), drift)
    both = bind_corrections({"tis": {"cap": 2.0}, "geometric": {"low": 0.5, "high": 2.0}})(*ARRAYS)
    np.testing.assert_array_equal(both, expected)
    gone = bind_corrections({"tis": {"cap": 2.0}, "geometric": {}})(*ARRAYS)
    assert not np.any(gone)
    np.testing.assert_array_equal(bind_corrections({})(*ARRAYS), MASK.astype(np.float32))


def test_reported_bug_importance_correction_in_one_loss_only_or_of_the_wrong_shape():
    """Every correction multiplies every objective, token for token, packed or padded."""
    segments = np.array([[1, 1, 2]])
    mask = np.ones((1, 3), bool)
    for correction in CORRECTIONS:
        constants = {"delta": 0.1} if correction == "off_policy_mask" else {}
        for objective in OBJECTIVES:
            bound = bind(objective, **({"ratio_cap": 5.0} if objective == "cispo" else {}))
            for structure in ((None, None), (segments, 3)):
                arrays = (LOGPROBS, BEHAVIOR, OLD, ADVANTAGES, mask, *structure)
                weight = bind_importance(correction, **constants)(*arrays)
                assert weight.shape == bound(*arrays).shape == mask.shape, (objective, correction)


def test_an_id_beyond_num_segments_is_nan_and_never_trains_quietly():
    arrays = (LOGPROBS, BEHAVIOR, OLD, ADVANTAGES, np.ones((1, 3), bool), np.array([[1, 1, 7]]))
    found = bind("gspo")(*arrays, 3)
    assert np.isnan(found).tolist() == [[False, False, True]]
    with pytest.raises(ValueError, match="num_segments is None"):
        bind("gspo")(*arrays)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bind("grpo"), "objective 'grpo' is unknown; choose one of reinforce, ppo"),
        (lambda: bind("ppo", clip_hi=0.28), "no constant 'clip_hi'; it has clip_high, clip_low, dual_clip"),
        (lambda: bind("ppo", segment_ids=0.0), "no constant 'segment_ids'"),
        (lambda: bind("cispo"), "needs the constant 'ratio_cap'"),
        (lambda: bind("ppo", clip_low=1.5), "no interval around 1"),
        (lambda: bind("ppo", dual_clip=1.1), "must exceed 1 \\+ clip_high"),
        (lambda: bind("ppo", anchor="behaviour"), "anchor 'behaviour' is unknown"),
        (lambda: bind_importance("icepops"), "choose one of tis"),
        (lambda: bind_importance("none"), "correction 'none' is unknown; choose one of tis, "),
        (lambda: bind_importance("tis", anchor="old"), "tis takes no anchor"),
        (lambda: bind_importance("off_policy_mask"), "needs the constant 'delta'"),
    ],
)
def test_unknown_names_and_meaningless_constants_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_reported_bug_cispo_cap_read_as_one_plus_eps():
    with pytest.raises(UserError, match=r"ratio_cap 0.28 of cispo is below 1; .* write 1.28"):
        bind("cispo", ratio_cap=0.28)
    # Absolute: a ratio of 1.2 under cap 5 is not touched, one of e under cap 2 is 2 and not 3.
    logprobs, zeros = np.log(np.array([[1.2, np.e]])), np.zeros((1, 2))
    arrays = (logprobs, zeros, None, np.ones((1, 2)), np.ones((1, 2), bool))
    np.testing.assert_allclose(bind("cispo", ratio_cap=5.0)(*arrays) / logprobs, [[1.2, np.e]], rtol=1e-6)
    np.testing.assert_allclose(bind("cispo", ratio_cap=2.0)(*arrays) / logprobs, [[1.2, 2.0]], rtol=1e-6)


SOUND = {
    "scalerl": {
        "objective": "cispo",
        "aggregation": "prompt",
        "baseline": "group_mean",
        "normalisations": ["batch_std"],
        "zero_variance_filter": True,
    },
    "grpo": {
        "objective": "ppo",
        "aggregation": "sample",
        "baseline": "group_mean",
        "normalisations": ["prompt_std"],
        "kl_in_loss": "k3",
    },
    "dr_grpo": {"objective": "ppo", "aggregation": "constant", "baseline": "group_mean", "max_tokens": 4096},
    "dapo": {
        "objective": "ppo",
        "aggregation": "token",
        "baseline": "group_mean",
        "normalisations": ["prompt_std"],
        "importance": ["tis"],
    },
    "gspo": {
        "objective": "gspo",
        "aggregation": "sample",
        "baseline": "group_mean",
        "normalisations": ["prompt_std"],
        "importance": ["seq_mis", "geometric"],
    },
    "magistral": {"objective": "ppo", "aggregation": "prompt", "baseline": "group_mean", "normalisations": ["global"]},
    "rloo": {
        "objective": "reinforce",
        "aggregation": "sequence_sum",
        "baseline": "leave_one_out",
        "importance": ["tis_sequence"],
        "kl_in_reward": "k1",
    },
    "ppo": {
        "objective": "ppo",
        "aggregation": "token",
        "baseline": "none",
        "critic": True,
        "group_size": 1,
        "normalisations": ["global"],
        "kl_in_reward": "k1",
    },
    "reinforce_pp": {
        "objective": "ppo",
        "aggregation": "token",
        "baseline": "none",
        "normalisations": ["global"],
        "group_size": 1,
        "kl_in_reward": "k1",
    },
    "icepop": {
        "objective": "ppo",
        "aggregation": "sample",
        "baseline": "group_mean",
        "importance": ["icepop", "off_policy_mask"],
    },
    "bypass": {
        "objective": "ppo",
        "anchor": "sampler",
        "aggregation": "token",
        "baseline": "group_mean",
        "importance": ["geometric"],
    },
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_compositions_pass(name):
    check_composition(**SOUND[name])


@pytest.mark.parametrize(
    ("start", "change", "reason"),
    [
        ("gspo", {"importance": ["tis"]}, "one ratio per sequence and tis one per token"),
        ("gspo", {"importance": ["tis", "tis"]}, "which squares it"),
        ("gspo", {"importance": ["tis_sequence", "icepop"]}, "which squares it"),
        ("gspo", {"aggregation": "token"}, "would weight it by length"),
        ("dapo", {"renormalised_logprobs": True}, "tis compares the trainer's full-vocabulary"),
        ("scalerl", {"renormalised_logprobs": True}, "cispo compares the trainer's full-vocabulary"),
        ("icepop", {"renormalised_logprobs": True, "importance": ["off_policy_mask"], "anchor": "sampler"}, "ppo comp"),
        ("scalerl", {"normalisations": ["batch_std", "global"]}, "normalised by batch_std and then global"),
        ("scalerl", {"importance": ["tis"]}, "tis would apply it twice"),
        ("dapo", {"anchor": "sampler"}, r"\(old log-probabilities bypassed\)"),
        ("scalerl", {"group_size": 1}, "group size 1 leaves nothing to compare"),
        ("dr_grpo", {"max_tokens": None}, "constant, and only it, needs the divisor"),
        ("grpo", {"max_tokens": 4096}, "only it, needs the divisor"),
        ("ppo", {"baseline": "group_mean", "group_size": 4}, "come from a critic"),
        ("ppo", {"normalisations": ["batch_std"]}, "batch_std divides by a standard deviation and subtracts nothing"),
        ("grpo", {"baseline": "none"}, "prompt_std divides by a standard deviation and subtracts nothing"),
        ("grpo", {"kl_in_reward": "k1"}, "counts twice"),
        ("grpo", {"kl_in_loss": "k4"}, "KL estimator 'k4' is unknown"),
        ("grpo", {"aggregation": "mean"}, "aggregation 'mean' is unknown"),
        ("grpo", {"normalisations": ["std"]}, "advantage normalisation 'std' is unknown"),
        ("grpo", {"baseline": "mean"}, "baseline 'mean' is unknown"),
    ],
)
def test_meaningless_compositions_are_refused_with_the_reason(start, change, reason):
    with pytest.raises(UserError, match=reason):
        check_composition(**{**SOUND[start], **change})


def test_rejection_alone_may_follow_bypassed_old_logprobs():
    # It only drops sequences, so no ratio is applied twice.
    check_composition(**{**SOUND["scalerl"], "importance": ["geometric", "off_policy_mask"]})


def test_corrections_have_their_sources_constants():
    """Those that a config leaves out."""
    constants = {
        name: {
            k: p.default for k, p in inspect.signature(entry.function).parameters.items() if k in ("cap", "low", "high")
        }
        for name, entry in CORRECTIONS.items()
    }
    assert constants == {
        "tis": {"cap": 2.0},
        "tis_sequence": {"cap": 2.0},
        "mis": {"low": 0.0, "high": 2.0},
        "seq_mis": {"low": 0.0, "high": 2.0},
        "icepop": {"low": 0.5, "high": 5.0},
        "geometric": {"low": 0.999, "high": 1.001},
        "off_policy_mask": {},
    }
