"""Loss-level bugs reported of other stacks, and the tests here that fail when they are put in."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.cli.algorithm import bind_selection
from jaxrl_llm.config import RunConfig
from jaxrl_llm.envs.single_turn import SingleTurn
from jaxrl_llm.rewards.exact import exact_match
from jaxrl_llm.rollout.batching import select
from jaxrl_llm.rollout.rows import RowShape, pack
from jaxrl_llm.text.sentencepiece import build_sentencepiece
from jaxrl_llm.types import Completion, EpisodeGroup, PromptTask

LOSSES, STEPS = "losses/test_reported_loss_bugs.py", "cli/test_algorithm_steps.py"
COVERED = {
    "1 token mean per microbatch, or per data shard": [
        f"{LOSSES}::test_token_mean_per_microbatch",
        f"{STEPS}::test_order_packing_and_microbatches_change_nothing",
        f"{STEPS}::test_a_mesh_changes_nothing",
    ],
    "2 global loss divided again by the accumulation steps": [
        f"{LOSSES}::test_global_loss_divided_again_by_the_number_of_microbatches",
        "train/test_step.py::test_any_split_and_packing_give_the_same_gradient",
    ],
    "3 Dr. GRPO's divisor is the padded length": [
        f"{LOSSES}::test_dr_grpo_divisor_is_the_constant_and_not_the_padded_length",
        "cli/test_recipes.py::test_the_constant_divisor_is_the_generation_budget_unless_it_is_given",
    ],
    "4 masked truncated tokens left in the denominator": [
        f"{LOSSES}::test_masked_truncated_tokens_left_in_the_denominator",
        "rollout/test_batching.py::test_truncated_completions_leave_loss_denominators_and_baseline",
    ],
    "5 temperature on one side only": [
        f"{LOSSES}::test_temperature_applied_on_one_side_only",
        "sampler/test_parity.py::test_logprobs_equal_the_teacher_forced_forward",
        "cli/test_train.py::test_a_frozen_policy_never_drifts_from_its_sampler",
    ],
    "6 renormalised top-p log-probabilities": [
        f"{LOSSES}::test_renormalised_logprobs_against_a_full_vocabulary_trainer_are_refused",
        "sampler/test_sampling.py::test_logprob_is_the_full_vocabulary_log_softmax_after_temperature",
    ],
    "7 GSPO weighted by length": [f"{LOSSES}::test_gspo_term_broadcast_against_the_mask_weights_by_length"],
    "8 CISPO without logp": [f"{LOSSES}::test_cispo_without_logp_has_no_gradient"],
    "9 CISPO's cap read as 1 + eps": [
        "losses/test_algorithm_table.py::test_reported_bug_cispo_cap_read_as_one_plus_eps"
    ],
    "10 CISPO anchored on recomputed log-probabilities": [
        f"{LOSSES}::test_cispo_anchored_on_recomputed_logprobs_is_inert_when_asynchronous",
        "train/test_step.py::test_gradient_is_that_of_the_written_formula",
        "cli/test_recipes.py::test_the_policy_is_scored_before_the_step_only_where_somebody_reads_it",
    ],
    "11 gradients of k1 and k3": [
        "losses/test_kl_and_entropy.py::test_reported_bug_k1_and_k3_gradients_are_not_that_of_the_reverse_kl",
        "losses/test_kl_and_entropy.py::test_derivatives_are_one_delta_and_one_minus_exp_minus_delta",
    ],
    "12 equal non-dyadic rewards leave a residue": [
        f"{LOSSES}::test_equal_non_dyadic_rewards_leave_a_residue_that_normalisation_blows_up",
        f"{STEPS}::test_a_group_of_equal_rewards_is_as_if_its_rewards_had_failed",
    ],
    "13 zero-variance groups in KL or denominators": [
        f"{LOSSES}::test_zero_variance_groups_receive_kl_or_stay_in_denominators",
        f"{STEPS}::test_a_group_of_equal_rewards_is_as_if_its_rewards_had_failed",
    ],
    "14 completions decoded and tokenised again": ["test_reported_bugs.py::test_the_sampled_ids_are_trained"],
    "15 prefix cache reused after a weight update": [
        "sampler/test_parity.py::test_nothing_prefilled_by_old_weights_serves_a_new_prompt"
    ],
    "16 float32 head on one side, stale copy, tied embedding forgotten": [
        "train/test_step.py::test_the_head_is_a_float32_product_at_highest_precision",
        "sampler/test_float32_head.py::test_the_samplers_head_is_float32_at_the_highest_precision_whatever_its_dtype",
        "sampler/test_parity.py::test_a_tied_head_follows_the_embedding_through_a_push",
        "sampler/test_parity.py::test_sequences_in_flight_through_swaps_keep_their_old_keys",
    ],
    "17 overlong penalty below -1, or silently skipped": [
        "rewards/test_length.py::test_soft_overlong_worked_numbers",
        "rewards/test_length.py::test_an_environment_adds_the_penalty_and_shows_it",
        "cli/test_assemble.py::test_length_penalty_reaches_the_reward",
    ],
    "18 TIS in one loss only, or of the wrong shape": [
        "losses/test_algorithm_table.py::test_reported_bug_importance_correction_in_one_loss_only_or_of_the_wrong_shape",
        f"{STEPS}::test_rloo_with_kl_in_the_reward_compares_whole_completions",
    ],
    "19 ratio metric after truncation": [
        "losses/test_loss_metrics.py::test_reported_bug_ratio_metrics_are_taken_before_truncation",
        "train/test_step.py::test_metrics_are_means_and_maxima_over_trained_tokens",
    ],
    "20 advantages normalised twice": [
        f"{LOSSES}::test_advantages_normalised_twice_are_refused",
        "cli/test_recipes.py::test_advantages_are_normalised_once",
    ],
    "21 token mean of the group confused with that of the batch": [
        f"{LOSSES}::test_token_mean_within_the_group_confused_with_that_within_the_batch",
        "rollout/test_batching.py::test_prompt_average_and_batch_std_worked_by_hand",
    ],
    "22 end of sequence not trained on, or trained on after a truncation": [
        "test_reported_bugs.py::test_the_end_of_sequence_trains_where_it_was_sampled_and_nowhere_else",
        "sampler/test_parity.py::test_end_of_sequence_is_part_of_a_stopped_completion_only",
    ],
    "23 chat template twice, BOS doubled": [
        "text/test_chat.py::test_the_begin_of_sequence_token_comes_once",
        "test_reported_bugs.py::test_a_prompt_is_rendered_once_on_its_way_to_sampler_and_trainer",
    ],
}


def test_every_number_of_the_list_is_here():
    assert [int(bug.split()[0]) for bug in COVERED] == list(range(1, 24))


@pytest.mark.parametrize("bug", COVERED)
def test_the_tests_that_cover_a_reported_bug_exist(bug):
    for test in COVERED[bug]:
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (Path(__file__).parent / path).read_text(), re.MULTILINE), test


def group_of(tokenizer, task, completions, finishes):
    """The scored group of some completions (ids, the end of sequence included where they stopped)."""
    environment = SingleTurn(decode=tokenizer.decode, score=partial(exact_match, correct=1.0, wrong=-1.0))
    made = []
    for ids, finish in zip(completions, finishes, strict=True):
        tokens = np.array(ids, np.int32)
        made.append(
            Completion(
                tokens,
                np.full(len(ids), -1.0, np.float32),
                np.zeros(len(ids), np.int32),
                np.zeros(len(ids), bool),
                finish,
            )
        )
    return EpisodeGroup(0, task, tuple(environment.episodes(task, made)))


def trained_targets(group):
    """(targets that are trained, all the batch's targets) as one update would see them."""
    batch = pack(select([group], bind_selection(RunConfig())).documents, RowShape(1, 1, 32))
    return batch.targets[batch.token_weights != 0].tolist(), batch.targets[batch.segment_ids != 0].tolist()


def test_the_sampled_ids_are_trained():
    """A policy may spell 'abab' as ab ab or letter by letter; decoded and encoded again, both would be one piece."""
    tokenizer = build_sentencepiece(["abab ab ba a b"] * 20, vocab_size=8, model_type="bpe")
    letters = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) in ("a", "b")]
    spelt = [*letters, *letters]
    assert tokenizer.encode(tokenizer.decode(spelt)) != spelt
    task = PromptTask("t", np.array([3], np.int32), "p", tokenizer.decode(spelt), "s", "exact")
    other = [letters[0], tokenizer.eos_id]
    group = group_of(tokenizer, task, [[*spelt, tokenizer.eos_id], other], ["stop", "stop"])
    assert [e.reward.parts["correct"] for e in group.episodes] == [1.0, 0.0]  # the text is what is scored
    assert trained_targets(group)[0] == [*spelt, tokenizer.eos_id, *other]


def test_the_end_of_sequence_trains_where_it_was_sampled_and_nowhere_else():
    tokenizer = build_sentencepiece(["abab"] * 20, vocab_size=16)
    (a,) = (i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "a")
    eos = tokenizer.eos_id
    task = PromptTask("t", np.array([a, a], np.int32), "p", "a", "s", "exact")
    stopped, truncated = [a, eos], [a, a, a]
    trained, everything = trained_targets(group_of(tokenizer, task, [stopped, truncated], ["stop", "length"]))
    assert trained == [*stopped, *truncated]
    assert everything == [a, *stopped, a, *truncated]  # nothing was put behind the truncated one


def test_a_prompt_is_rendered_once_on_its_way_to_sampler_and_trainer():
    """What the sampler is asked and what the trainer conditions on are the task's ids, with nothing before them."""
    tokenizer = build_sentencepiece(["12+34=46"] * 20, vocab_size=24)
    prompt = np.array(tokenizer.encode("12+34="), np.int32)
    task = PromptTask("t", prompt, "12+34=", "46", "s", "exact")
    answers = [[*tokenizer.encode("46"), tokenizer.eos_id], [*tokenizer.encode("4"), tokenizer.eos_id]]
    batch = pack(
        select([group_of(tokenizer, task, answers, ["stop", "stop"])], bind_selection(RunConfig())).documents,
        RowShape(1, 2, 32),
    )
    for segment in (1, 2):
        document = batch.segment_ids[0, 0] == segment
        np.testing.assert_array_equal(batch.tokens[0, 0][document][: len(prompt)], prompt)
        assert batch.positions[0, 0][document][0] == 0
