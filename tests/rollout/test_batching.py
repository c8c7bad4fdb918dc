import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.data.packing import first_fit, rows_needed
from jaxrl_llm.envs.single_turn import SingleTurn
from jaxrl_llm.losses.advantages import centre, normalise
from jaxrl_llm.losses.aggregate import completion_weights
from jaxrl_llm.rollout.batching import Selection, select, supervised
from jaxrl_llm.rollout.rows import RowShape, pack, row_shape
from jaxrl_llm.rollout.statistics import describe_groups
from jaxrl_llm.types import Completion, Episode, EpisodeGroup, PromptTask, Reach, Reward


def group(group_id, rewards, lengths, *, failed=(), truncated=()):
    """A group whose i-th completion has lengths[i] tokens 10*i+1, 10*i+2, ... and log-probabilities -0.1, -0.2, ..."""
    task = PromptTask(f"task{group_id}", np.array([7, 8, 9], np.int32), "p", "a", "s", "exact")
    episodes = []

    def finish(i):
        return "length" if i in truncated else "stop"

    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        tokens = 10 * i + 1 + np.arange(length, dtype=np.int32)
        completion = Completion(
            tokens, -0.1 * np.arange(1, length + 1), np.zeros(length, np.int32), np.zeros(length, bool), finish(i)
        )
        reason = "judge broke" if i in failed else None
        episodes.append(Episode(completion, np.ones(length, bool), Reward(reward, {"correct": reward > 0}, reason)))
    return EpisodeGroup(group_id, task, tuple(episodes))


def how(*, normalisation="batch_std", aggregation="prompt", zero_variance_filter=True, **rest):
    return Selection(
        advantages=lambda rewards, keep: normalise(centre(rewards, keep), keep, kind=normalisation),
        token_weights=functools.partial(completion_weights, kind=aggregation),
        zero_variance_filter=zero_variance_filter,
        **rest,
    )


SCALERL = how()


def test_prompt_average_and_batch_std_worked_by_hand():
    # Two mixed groups and one of equal rewards; batch std without the constant group is ddof0 .4677071733
    # (rewards [[1,1,0,0],[1,0,0,0],[1,1,1,1]]).
    groups = [
        group(0, [1, 1, 0, 0], [1, 2, 3, 4]),
        group(1, [1, 0, 0, 0], [2, 2, 2, 2]),
        group(2, [1, 1, 1, 1], [5, 5, 5, 5]),
    ]
    step = select(groups, SCALERL)
    assert [g.group_id for g in step.trained] == [0, 1]
    assert step.dropped == {2: "zero_variance"}
    advantages = [d.advantages_C[0] for d in step.documents]
    expected = np.array([0.5, 0.5, -0.5, -0.5, 0.75, -0.25, -0.25, -0.25]) / (0.4677071733 + 1e-6)
    np.testing.assert_allclose(advantages, expected, rtol=1e-9)
    weights = [d.weights_C[0] for d in step.documents]
    np.testing.assert_allclose(weights, [1 / 20] * 4 + [1 / 16] * 4, rtol=1e-12)  # 2 prompts x (10 | 8) tokens
    assert sum(d.weights_C.sum() for d in step.documents) == pytest.approx(1.0)


def test_without_the_filter_constant_groups_stay_in_the_denominators():
    groups = [group(0, [1, 0], [1, 1]), group(1, [1, 1], [3, 3])]
    step = select(groups, how(normalisation="none", aggregation="token", zero_variance_filter=False))
    assert step.dropped == {}
    np.testing.assert_allclose([d.weights_C[0] for d in step.documents], [1 / 8] * 4)
    np.testing.assert_array_equal(np.concatenate([d.advantages_C for d in step.documents[2:]]), 0.0)


def test_a_failed_reward_leaves_its_group_and_is_never_zero():
    step = select([group(0, [1, 0, 0], [2, 2, 2], failed={2})], SCALERL)
    assert len(step.documents) == 2
    np.testing.assert_allclose([d.weights_C[0] for d in step.documents], [1 / 4, 1 / 4])
    step = select([group(0, [1, 0], [2, 2], failed={1}), group(1, [1, 0], [1, 1])], SCALERL)
    assert step.dropped == {0: "reward_failed"}
    assert [g.group_id for g in step.trained] == [1]


def test_everything_filtered_gives_an_empty_batch():
    step = select([group(0, [1, 1], [2, 2])], SCALERL)
    batch = pack(step.documents, RowShape(2, 2, 8))
    assert int(batch.microbatches) == 0
    assert not batch.token_weights.any()
    assert select([], SCALERL).documents == []


def test_pack_shifts_once_and_speaks_about_targets():
    step = select([group(0, [1, 0], [2, 1])], SCALERL)
    batch = pack(step.documents, RowShape(1, 2, 8))
    # documents 7 8 9 | 1 2 and 7 8 9 | 11, in one row of 8
    np.testing.assert_array_equal(batch.tokens[0, 0], [7, 8, 9, 1, 7, 8, 9, 0])
    np.testing.assert_array_equal(batch.targets[0, 0], [8, 9, 1, 2, 8, 9, 11, 0])
    np.testing.assert_array_equal(batch.positions[0, 0], [0, 1, 2, 3, 0, 1, 2, 0])
    np.testing.assert_array_equal(batch.segment_ids[0, 0], [1, 1, 1, 1, 2, 2, 2, 0])
    np.testing.assert_allclose(batch.token_weights[0, 0], np.array([0, 0, 1, 1, 0, 0, 1, 0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(batch.behavior_logprobs[0, 0], [0, 0, -0.1, -0.2, 0, 0, -0.1, 0], rtol=1e-6)
    assert int(batch.microbatches) == 1


def test_untrainable_tokens_are_inputs_without_weight():
    # Tokens the system wrote (a forced phrase) condition the policy but are not trained on, nor counted.
    one = group(0, [1, 0], [3, 1])
    episode = one.episodes[0]
    forced = Episode(episode.completion, np.array([True, False, True]), episode.reward)
    step = select([EpisodeGroup(0, one.task, (forced, one.episodes[1]))], SCALERL)
    np.testing.assert_allclose(step.documents[0].weights_C, [1 / 3, 0, 1 / 3])


def test_forced_tokens_are_read_and_never_trained():
    # An interruption's phrase: in the row, with no weight, and in no denominator.
    groups = [group(0, [1, 0], [4, 2])]
    environment = SingleTurn(
        decode=lambda ids: "x", score=lambda texts, task, finished: [Reward(1.0, {"correct": 1.0})]
    )
    forced = replace(groups[0].episodes[0].completion, forced_T=np.array([False, True, True, False]))
    episode = replace(environment.episodes(groups[0].task, [forced])[0], reward=groups[0].episodes[0].reward)
    groups = [replace(groups[0], episodes=(episode, groups[0].episodes[1]))]
    documents = select(groups, SCALERL).documents
    np.testing.assert_allclose(documents[0].weights_C, [1 / 4, 0, 0, 1 / 4])  # 2 + 2 trained tokens of one prompt
    np.testing.assert_allclose(documents[1].weights_C, [1 / 4, 1 / 4])
    np.testing.assert_array_equal(documents[0].completion_C, forced.tokens_T)
    assert describe_groups(groups)["interruption_rate"] == 0.5


def test_zero_variance_is_counted_whether_or_not_it_is_filtered():
    groups = [group(0, [1, 0], [1, 1]), group(1, [0.1, 0.1], [3, 3]), group(2, [1, 0], [1, 1], failed={0})]
    assert select(groups, SCALERL).equal_groups == 1  # a group that lost its rewards has nothing to compare
    assert select(groups, how(zero_variance_filter=False)).equal_groups == 1


def test_truncated_completions_leave_loss_denominators_and_baseline():
    # Rewards 1, 0 and a truncated -1: as if the third had never been sampled, whatever its length.
    cut = select([group(0, [1, 0, -1], [2, 2, 9], truncated={2})], how(overlong_filter=True))
    without = select([group(0, [1, 0], [2, 2])], SCALERL)
    for got, want in zip(cut.documents, without.documents, strict=True):
        np.testing.assert_array_equal(got.weights_C, want.weights_C)
        np.testing.assert_array_equal(got.advantages_C, want.advantages_C)
    kept = select([group(0, [1, 0, -1], [2, 2, 9], truncated={2})], SCALERL)
    assert len(kept.documents) == 3
    step = select([group(0, [1, 0], [2, 9], truncated={1}), group(1, [1, 0], [1, 1])], how(overlong_filter=True))
    assert step.dropped == {0: "overlong"}


def test_a_lone_sibling_trains_where_nothing_is_compared():
    alone = how(normalisation="none", aggregation="token", zero_variance_filter=False, smallest_group=1)
    assert len(select([group(0, [1], [2])], alone).documents) == 1
    assert select([group(0, [1], [2])], how(zero_variance_filter=False)).dropped == {0: "reward_failed"}


def test_each_update_is_an_optimizer_batch_of_its_own():
    groups = [group(i, [1, 0], [1 + i, 2]) for i in range(4)]
    step = select(groups, how(normalisation="none", prompts_per_update=2))
    assert [d.update for d in step.documents] == [0] * 4 + [1] * 4
    for update in range(2):
        alone = select(groups[2 * update : 2 * update + 2], how(normalisation="none"))
        mine = [d for d in step.documents if d.update == update]
        for got, want in zip(mine, alone.documents, strict=True):
            np.testing.assert_array_equal(got.weights_C, want.weights_C)
    # The last step of a run may have too few groups: the updates that get none have nothing to train.
    short = pack(select(groups[:2], how(prompts_per_update=2)).documents, RowShape(2, 2, 8, updates=2))
    assert short.microbatches.tolist() == [1, 0]
    packed, alone = pack(step.documents, RowShape(2, 2, 8, updates=2)), pack(mine, RowShape(2, 2, 8))
    assert packed.tokens.shape == (2, 2, 2, 8)
    for name in ("tokens", "token_weights", "scores", "completions", "microbatches"):
        np.testing.assert_array_equal(getattr(packed, name)[1], getattr(alone, name))


def test_every_trained_token_knows_its_reward_and_its_place_in_the_group():
    step = select([group(0, [1, 0], [2, 1]), group(1, [0, 1], [1, 1])], SCALERL)
    batch = pack(step.documents, RowShape(1, 2, 16))
    # rows: 789|12 789|11 789|1 789|11 -> groups of 2: numbers 1, 2, 3, 4
    trained = batch.token_weights[0, 0] != 0
    np.testing.assert_array_equal(batch.completions[0, 0][trained], [1, 1, 2, 3, 4])
    np.testing.assert_array_equal(batch.scores[0, 0][trained], [1, 1, 0, 0, 1])
    assert not batch.completions[0, 0][~trained].any()


def test_supervised_documents_average_over_tokens():
    documents = supervised([np.array([1, 2])] * 2, [np.array([3]), np.array([4, 5, 6])])
    np.testing.assert_allclose(np.concatenate([d.weights_C for d in documents]), [0.25] * 4)
    assert {float(a) for d in documents for a in d.advantages_C} == {1.0}


@given(st.lists(st.integers(1, 11), min_size=1, max_size=60), st.integers(11, 40))
def test_first_fit_overlaps_nothing_and_keeps_its_bound(lengths, row_length):
    places = first_fit(lengths, row_length)
    taken = np.zeros((len(lengths), row_length), int)
    for length, (row, start) in zip(lengths, places, strict=True):
        assert start + length <= row_length
        taken[row, start : start + length] += 1
    assert taken.max() == 1
    assert max(row for row, _ in places) + 1 <= rows_needed(len(lengths), 11, row_length)


def test_row_shape_rounds_up_to_whole_microbatches():
    shape = row_shape(documents=512, prompt=7, completion=4, length=64, rows=16)
    assert shape == RowShape(6, 16, 64, reach=Reach(10))  # 86 rows -> 6 x 16


def test_a_document_that_fits_no_row_is_refused():
    with pytest.raises(ValueError, match="12 tokens does not fit a row of 11"):
        first_fit([3, 12], 11)
