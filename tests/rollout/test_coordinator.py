"""The coordinator's rules, one by one and by hand."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.rollout.coordinator import Cancel, Coordinator
from jaxrl_llm.rollout.lag import LagRule
from jaxrl_llm.types import Completion, EpisodeGroup, PromptTask, RunFailedError

P, G = 2, 2


@dataclass
class Issuer:
    left: int = 1000
    issued: int = 0
    dropped: dict = field(default_factory=dict)

    def take(self):
        if self.issued == self.left:
            return None
        self.issued += 1
        return self.issued - 1, PromptTask(f"t{self.issued}", np.ones(1, np.int32), "", "", "s", "exact")

    def drop(self, group_id, reason):
        assert group_id not in self.dropped
        self.dropped[group_id] = reason


def make(mode="pipeline", k=1, *, samplers=("a",), slots=100, left=1000, **how):
    issuer = Issuer(left)
    coordinator = Coordinator(issuer, LagRule(mode, k), prompts_per_step=P, group_size=G, **how)
    for name in samplers:
        coordinator.join(name, 0, slots, 0.0)
    return coordinator, issuer


def tokens(*versions):
    n = len(versions)
    return Completion(np.zeros(n, np.int32), np.zeros(n), np.array(versions, np.int32), np.zeros(n, bool), "stop")


def finish(coordinator, assignment, *, now=1.0, version=0, siblings=None):
    for sibling in assignment.siblings if siblings is None else siblings:
        assert coordinator.completed(
            assignment.sampler, assignment.group_id, assignment.attempt, sibling, tokens(version), now
        )
    while group := coordinator.unscored():
        coordinator.scored(EpisodeGroup(group.group_id, group.task, tuple(group.completions)))


def ids(assignments):
    return [assignment.group_id for assignment in assignments]


def taken(coordinator, now=2.0):
    groups = coordinator.take(now)
    return None if groups is None else [group.group_id for group in groups]


@pytest.mark.parametrize(
    ("mode", "k", "out"), [("sync", 8, 1), ("pipeline", 0, 1), ("pipeline", 2, 3), ("ppo_off_policy", 2, 2)]
)
def test_as_many_groups_are_out_as_the_mode_allows(mode, k, out):
    coordinator, _ = make(mode, k)
    assert ids(coordinator.admit(0.0)) == list(range(out * P))
    assert coordinator.admit(1.0) == []


def test_off_policy_samples_k_batches_with_one_version_and_nothing_before_they_are_trained():
    coordinator, _ = make("ppo_off_policy", 2)
    for assignment in coordinator.admit(0.0):
        finish(coordinator, assignment)
    assert taken(coordinator) == [0, 1]
    assert not coordinator.publishes(1)  # no sampler gets what was made between
    assert coordinator.admit(2.0) == []
    assert taken(coordinator) == [2, 3]
    assert coordinator.admit(3.0) == []
    assert coordinator.publishes(2)
    coordinator.published(2)
    assert coordinator.admit(3.0) == []  # published is not yet held
    coordinator.holds("a", 2)
    assert ids(coordinator.admit(4.0)) == [4, 5, 6, 7]


def test_a_sampler_that_fell_behind_gets_only_groups_that_it_samples_in_time():
    coordinator, _ = make("pipeline", 1, samplers=("a", "b"), slots=4)
    first = coordinator.admit(0.0)
    assert [(a.sampler, a.group_id) for a in first] == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    for assignment in first:
        finish(coordinator, assignment)
    assert taken(coordinator) == [0, 1]
    coordinator.published(1)
    coordinator.holds("a", 1)
    assert [(a.sampler, a.group_id) for a in coordinator.admit(2.0)] == [("a", 4), ("a", 5)]  # b: trained at 2, held 0
    assert taken(coordinator) == [2, 3]
    coordinator.published(2)
    coordinator.holds("b", 2)
    assert [(a.sampler, a.group_id) for a in coordinator.admit(3.0)] == [("b", 6), ("b", 7)]


def test_issue_order_waits_for_the_head_and_finished_order_for_what_is_due():
    for order, expected in (("issue", [None, None, [0, 1]]), ("finished", [[2, 3], None, [1, 0]])):
        coordinator, _ = make("pipeline", 1, order=order)
        by_id = {a.group_id: a for a in coordinator.admit(0.0)}
        for group_id in (2, 3):
            finish(coordinator, by_id[group_id])
        seen = [taken(coordinator)]
        # 0 and 1 started under version 0 and may be trained at 1 at the latest.
        finish(coordinator, by_id[1])
        seen.append(taken(coordinator))
        finish(coordinator, by_id[0])
        seen.append(taken(coordinator))
        assert seen == expected, order


def test_what_is_due_now_goes_before_what_finished_first():
    coordinator, _ = make("pipeline", 1, order="finished", slots=8)
    old = {a.group_id: a for a in coordinator.admit(0.0)}
    finish(coordinator, old[3])
    finish(coordinator, old[2])
    assert taken(coordinator) == [3, 2]
    coordinator.published(1)
    coordinator.holds("a", 1)
    new = coordinator.admit(2.0)
    assert ids(new) == [4, 5]
    for assignment in (*new, old[0], old[1]):
        finish(coordinator, assignment, version=assignment.group_id // 4)
    assert taken(coordinator) == [0, 1]  # at version 1, their last; 4 and 5 finished before them and can wait


def test_a_retry_keeps_the_id_and_what_is_there_and_only_goes_where_it_is_young_enough():
    coordinator, _ = make("pipeline", 2, samplers=("a", "b"), back_off_s=0.5, order="finished")
    first = {a.group_id: a for a in coordinator.admit(0.0)}
    finish(coordinator, first[0], siblings=[1])
    for group_id in (1, 3, 2, 5):
        finish(coordinator, first[group_id])
    assert [taken(coordinator), taken(coordinator)] == [[1, 3], [2, 5]]
    for version in (1, 2):
        coordinator.published(version)
    coordinator.holds("a", 1)
    coordinator.holds("b", 2)
    assert [a.sampler for a in coordinator.admit(2.0) if a.group_id == 6] == ["b"]
    coordinator.failed("a", 0, 0, "cut", 3.0)
    coordinator.leave("b", "killed", 3.0)
    assert coordinator.admit(3.4) == []  # backing off
    assert coordinator.next_event(3.4) == pytest.approx(0.1)
    # 0 was begun under version 0, of which a is ahead; 6 under 2, so that it may be trained at 4: a must hold 2 for it.
    again = coordinator.admit(3.5)
    assert [(a.sampler, a.group_id, a.attempt, a.siblings) for a in again] == [("a", 0, 1, (0,))]
    coordinator.holds("a", 2)
    assert ids(coordinator.admit(3.6))[0] == 6


def test_duplicates_and_late_replies_change_nothing_and_are_counted():
    coordinator, _ = make("pipeline", 0, samplers=("a", "b"), back_off_s=0.0)
    first = {a.group_id: a for a in coordinator.admit(0.0)}
    assert coordinator.completed("a", 0, 0, 0, tokens(0), 1.0)
    assert not coordinator.completed("a", 0, 0, 0, tokens(0), 1.0)  # twice
    coordinator.failed("a", 0, 0, "cut", 1.0)
    assert not coordinator.completed("a", 0, 0, 1, tokens(0), 1.0)  # of an attempt given up
    coordinator.failed("a", 0, 0, "cut", 1.0)
    (again,) = coordinator.admit(1.0)
    assert (again.sampler, again.attempt, again.siblings) == ("b", 1, (1,))  # a failed: another one first
    assert not coordinator.completed("a", 0, 1, 1, tokens(0), 1.0)  # by whom it was not asked of
    finish(coordinator, again)
    finish(coordinator, first[1])
    assert taken(coordinator) == [0, 1]
    assert not coordinator.completed("b", 0, 1, 1, tokens(0), 3.0)  # of a group that is trained
    assert coordinator.counts == {"duplicates": 1, "late": 4, "wrong_versions": 0, "retries": 1, "stragglers": 0}


@pytest.mark.parametrize("versions", [(0,), (3,), (2, 1)])
def test_tokens_of_weights_that_cannot_be_are_refused_and_asked_for_again(versions):
    coordinator, _ = make("pipeline", 2)
    coordinator.published(1)
    coordinator.published(2)
    coordinator.holds("a", 1)
    first = coordinator.admit(0.0)[0]
    assert not coordinator.completed("a", first.group_id, 0, 0, tokens(*versions), 1.0)
    assert coordinator.counts["wrong_versions"] == 1
    assert ids(coordinator.admit(2.0))[0] == first.group_id
    assert coordinator.completed("a", first.group_id, 1, 0, tokens(1, 2), 2.0)


def test_a_group_that_fails_too_often_is_dropped_once_and_its_pauses_grow():
    coordinator, issuer = make("pipeline", 0, retries=3, back_off_s=1.0, longest_back_off_s=3.0)
    now, pauses = 0.0, []
    for attempt in range(4):
        assert ids(coordinator.admit(now))[0] == 0
        coordinator.failed("a", 0, attempt, "out of memory", now)
        if attempt < 3:
            pauses.append(coordinator.next_event(now))
            now += pauses[-1]
    assert pauses == [1.0, 2.0, 3.0]
    assert issuer.dropped == {0: "sampler_failed"}
    assert ids(coordinator.admit(now)) == [2]  # its place is free


@pytest.mark.parametrize("fate", ["drop", "train", "reissue"])
def test_a_straggler_has_its_declared_fate(fate):
    coordinator, issuer = make(
        "pipeline", 0, samplers=("a", "b"), slots=2, straggler=fate, straggler_timeout_s=10.0, smallest_group=1
    )
    slow, quick = coordinator.admit(0.0)
    finish(coordinator, quick)
    finish(coordinator, slow, siblings=[0])
    assert coordinator.overdue(9.9) == []
    assert coordinator.next_event(9.0) == pytest.approx(1.0)
    assert coordinator.overdue(10.0) == [Cancel("a", 0, 0, (1,))]
    next_ones = coordinator.admit(10.0)
    if fate == "drop":
        assert issuer.dropped == {0: "straggler"}
        assert [(a.sampler, a.group_id) for a in next_ones] == [("b", 2)]  # a is silent
    elif fate == "train":
        assert next_ones == []
        (group,) = [coordinator.unscored()]
        assert (group.group_id, len(group.completions)) == (0, 1)
        coordinator.scored(EpisodeGroup(0, group.task, group.completions))
        assert taken(coordinator) == [0, 1]
    else:
        assert [(a.sampler, a.group_id, a.attempt, a.siblings) for a in next_ones] == [("b", 0, 1, (1,))]
        finish(coordinator, next_ones[0], now=11.0)
        assert taken(coordinator) == [0, 1]
    assert not coordinator.completed("a", 0, 0, 1, tokens(0), 12.0)  # when it wakes up; which ends its silence
    assert [e.kind for e in coordinator.take_events()][-1] == "heard"


def test_a_straggler_with_too_few_siblings_is_dropped_and_all_its_attempts_are_called_off():
    coordinator, issuer = make("pipeline", 0, straggler="train", straggler_timeout_s=5.0)
    slow = coordinator.admit(0.0)[0]
    finish(coordinator, slow, siblings=[0])
    assert len(coordinator.overdue(6.0)) == 2
    assert issuer.dropped == {0: "straggler", 1: "straggler"}


def test_an_evaluation_runs_on_its_version_alone_and_holds_the_next_one_off():
    coordinator, _ = make("pipeline", 3, samplers=("a", "b"), slots=4)
    coordinator.published(1)
    coordinator.holds("b", 1)
    tasks = [PromptTask(f"e{i}", np.ones(1, np.int32), "", "", "s", "exact") for i in range(2)]
    pinned = coordinator.pin(1, tasks, 2, first_stream=70)
    given = coordinator.admit(0.0)
    evaluation = [a for a in given if a.pinned == 1]
    assert [(a.sampler, a.stream) for a in evaluation] == [("b", 70), ("b", 71)]  # first, and only where 1 is held
    assert {a.sampler for a in given if a.pinned is None} == {"a"}
    assert (coordinator.may_swap("a"), coordinator.may_swap("b")) == (True, False)
    one, other = evaluation
    assert not coordinator.completed("b", one.group_id, 0, 0, tokens(1, 2), 1.0)  # it swapped nevertheless
    finish(coordinator, other, version=1)
    assert coordinator.take_pinned(pinned) is None
    (again,) = [a for a in coordinator.admit(3.0) if a.pinned]
    finish(coordinator, again, version=1)
    assert coordinator.may_swap("b")
    assert [len(completions) for completions in coordinator.take_pinned(pinned)] == [2, 2]


def test_training_may_have_priority_over_evaluation():
    coordinator, _ = make("pipeline", 0, slots=5, priority="training")
    coordinator.pin(0, [PromptTask("e", np.ones(1, np.int32), "", "", "s", "exact")], 2)
    assert ids(coordinator.admit(0.0)) == [0, 1, -1]


def test_an_evaluation_that_cannot_be_sampled_fails_loudly():
    coordinator, _ = make("pipeline", 0, retries=0)
    pinned = coordinator.pin(0, [PromptTask("e", np.ones(1, np.int32), "", "", "s", "exact")], 2)
    coordinator.failed("a", coordinator.admit(0.0)[0].group_id, 0, "out of memory", 1.0)
    with pytest.raises(RunFailedError, match="evaluation of version 0 gave up: after 1 failed attempts, the last: out"):
        coordinator.take_pinned(pinned)


def test_waits_are_booked_to_their_reasons():
    coordinator, _ = make("pipeline", 0, slots=4)
    first = coordinator.admit(0.0)
    for assignment in first:
        finish(coordinator, assignment, now=3.0)
    coordinator.admit(3.0)
    waits = coordinator.take_waits(5.0)
    assert waits.empty_s == {"trainer": 2.0}  # both groups wait for the step that makes version 1
    assert waits.idle_share == pytest.approx(2 / 5)
    assert waits.samplers == 1
    assert taken(coordinator, 5.0) == [0, 1]
    assert coordinator.ages_s == {0: 5.0, 1: 5.0}
    coordinator.published(1)
    coordinator.admit(5.0)
    assert coordinator.take_waits(6.0).empty_s == {"weights": 1.0}  # it would start with those on their way
    coordinator.holds("a", 1)
    coordinator.admit(6.0)
    assert coordinator.take_waits(7.0).empty_s == {}


def test_a_name_lives_once_and_no_sampler_is_ahead_of_the_trainer():
    coordinator, _ = make()
    with pytest.raises(ValueError, match="sampler a has joined before"):
        coordinator.join("a", 0, 4, 1.0)
    with pytest.raises(ValueError, match="sampler b says it holds version 1; the newest published is 0"):
        coordinator.join("b", 1, 4, 1.0)
    with pytest.raises(ValueError, match="version 0 published after version 0"):
        coordinator.published(0)


def test_the_last_batch_is_what_is_left():
    coordinator, _ = make("pipeline", 1, left=3)
    for assignment in coordinator.admit(0.0):
        finish(coordinator, assignment)
    coordinator.admit(1.0)
    assert [taken(coordinator), taken(coordinator), taken(coordinator)] == [[0, 1], [2], []]


@given(st.sampled_from(["issue", "finished"]), st.integers(0, 3), st.data())
def test_lag_stays_within_the_bound_over_random_moves(order, k, data):
    """Admission on two samplers of different versions, finishing, hand-over and push in any order."""
    coordinator, _ = make("pipeline", k, samplers=("a", "b"), slots=6, order=order)
    begun, out, newest = {}, [], 0
    for move in data.draw(st.lists(st.integers(0, 4), min_size=20, max_size=60)):
        if move == 0:
            for assignment in coordinator.admit(0.0):
                begun[assignment.group_id] = coordinator.samplers[assignment.sampler]
                out.append(assignment)
        elif move == 1 and out:
            assignment = out.pop(data.draw(st.integers(0, len(out) - 1)))
            finish(coordinator, assignment, version=begun[assignment.group_id])
        elif move == 2 and (groups := taken(coordinator)) is not None:
            assert all(0 <= newest - begun[group_id] <= k for group_id in groups)
            newest += 1
            coordinator.published(newest)
        elif move > 2:
            coordinator.holds("ab"[move - 3], newest)


def test_refused_groups_make_room_for_others_however_many_there_are():
    coordinator, _ = make("pipeline", 1, max_ready=P, refuse=lambda group: group.group_id < 10)
    for _ in range(20):
        for assignment in coordinator.admit(0.0):
            finish(coordinator, assignment)
    assert taken(coordinator) == [10, 11]
