"""Episodes of several turns: every fate of a sibling whose tool works, and how an episode goes on."""

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from test_coordinator import finish, make, taken
from test_worker import FirstSiblingIsRight, tasks

from jaxrl_llm.data.curriculum import PassRates
from jaxrl_llm.data.prompts import PromptStream
from jaxrl_llm.envs.turns import answered, extended
from jaxrl_llm.evaluate import mismatch
from jaxrl_llm.rollout.coordinator import Assignment, Cancel, Coordinator
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.lag import LagRule
from jaxrl_llm.rollout.local import LocalSampler
from jaxrl_llm.rollout.play import play
from jaxrl_llm.rollout.requests import HowToSample
from jaxrl_llm.rollout.rows import RowShape
from jaxrl_llm.rollout.statistics import describe_groups, sampled_tokens
from jaxrl_llm.rollout.turns import Tools
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.sampler.serving.rl_grpc import _requests
from jaxrl_llm.types import Completion, Episode, EpisodeGroup, PromptTask, Reward, SampleRequest, Sampling, Turn
from jaxrl_llm.worlds.link import _Life

ANSWER = np.array([90, 91], np.int32)


def turn(*tokens, version=0, end="stop_string"):
    n = len(tokens)
    versions = np.full(n, version, np.int32)
    return Completion(np.array(tokens, np.int32), np.full(n, -0.5, np.float32), versions, np.zeros(n, bool), end)


def asks(coordinator, assignment, sibling, *tokens, version=0, now=1.0):
    """The sibling's turn is there and calls a tool."""
    done = turn(*tokens, version=version)
    assert coordinator.completed(assignment.sampler, assignment.group_id, assignment.attempt, sibling, done, now)
    return coordinator.call()


def answer(coordinator, call, more=5, now=2.0):
    return coordinator.answered(call, Turn(answered(call.completion, ANSWER), more), now)


def with_call(**how):
    """A coordinator whose group 0 has its sibling 0 done and its sibling 1 at a tool; (it, its issuer, the call)."""
    coordinator, issuer = make(**({"mode": "pipeline", "k": 0, "tools": True, "back_off_s": 0.0} | how))
    first, second = coordinator.admit(0.0)
    finish(coordinator, first, siblings=[0])
    call = asks(coordinator, first, 1, 7, 8)
    finish(coordinator, second)
    return coordinator, issuer, call


def test_a_call_waits_for_its_tool_and_the_episode_goes_on_behind_the_answer():
    coordinator, _, call = with_call()
    assert (call.group_id, call.sibling, call.completion.tokens_T.tolist()) == (0, 1, [7, 8])
    assert coordinator.call() is None  # given out once
    assert coordinator.admit(1.5) == []  # nobody's to sample
    assert coordinator.trainer_waits_for() == "tools"
    assert answer(coordinator, call)
    assert coordinator.trainer_waits_for() == "sampling"
    (again,) = coordinator.admit(2.0)
    assert (again.siblings, again.turn.completion.tokens_T.tolist(), again.turn.more) == ((1,), [7, 8, 90, 91], 5)
    assert coordinator.completed("a", 0, again.attempt, 1, turn(9, end="stop"), 3.0)
    group = coordinator.unscored()
    whole = group.completions[1]
    assert whole.tokens_T.tolist() == [7, 8, 90, 91, 9]
    assert whole.forced_T.tolist() == [False, False, True, True, False]
    assert whole.logprobs_T.tolist() == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert (whole.turns, whole.finish) == ((4,), "stop")
    coordinator.scored(EpisodeGroup(0, group.task, group.completions))
    assert taken(coordinator) == [0, 1]


def test_siblings_begin_together_and_go_on_each_by_itself():
    coordinator, _ = make("pipeline", 0, samplers=("a", "b"), slots=1, tools=True)
    first, _ = coordinator.admit(0.0)
    assert first.siblings == (0, 1)
    assert first.turn is None
    for sibling in (0, 1):
        answer(coordinator, asks(coordinator, first, sibling, 4 + sibling))
    # One slot is free, of the sampler that has answered; the other sibling waits for the next one.
    (again,) = coordinator.admit(2.0)
    assert (again.sampler, again.siblings, again.turn.completion.tokens_T[0]) == ("a", (0,), 4)
    coordinator.completed("a", 0, again.attempt, 0, turn(3, end="stop"), 3.0)
    (last,) = coordinator.admit(3.0)
    assert (last.sampler, last.siblings, last.turn.completion.tokens_T[0]) == ("a", (1,), 5)


def test_an_episode_ends_where_its_environment_says_so():
    coordinator, _, call = with_call()
    over = Turn(answered(call.completion, ANSWER))
    assert coordinator.answered(call, over, 2.0)
    assert [len(c.tokens_T) for c in coordinator.unscored().completions] == [1, 4]
    assert coordinator.admit(2.0) == []


def test_without_tools_a_stop_string_ends_a_completion():
    coordinator, _ = make("pipeline", 0)
    first, _ = coordinator.admit(0.0)
    assert asks(coordinator, first, 0, 7) is None
    assert asks(coordinator, first, 1, 7) is None
    assert coordinator.unscored() is not None


def test_an_attempt_that_fails_goes_on_from_the_last_answer():
    coordinator, _, call = with_call(samplers=("a", "b"))
    answer(coordinator, call)
    (second,) = coordinator.admit(2.0)
    coordinator.failed(second.sampler, 0, second.attempt, "cut", 3.0)
    (third,) = coordinator.admit(3.0)
    assert third.sampler != second.sampler
    assert third.turn is second.turn
    coordinator.leave(third.sampler, "killed", 3.5)
    (fourth,) = coordinator.admit(4.0)
    call = asks(coordinator, fourth, 1, 6)
    assert call.completion.tokens_T.tolist() == [7, 8, 90, 91, 6]
    assert call.completion.turns == (4,)
    # What a sampler that was given up still says is not taken.
    assert not coordinator.completed(second.sampler, 0, second.attempt, 1, turn(1, end="stop"), 5.0)


def test_answers_and_turns_that_come_twice_or_late_change_nothing():
    coordinator, _, call = with_call()
    assert answer(coordinator, call)
    assert not answer(coordinator, call)
    (again,) = coordinator.admit(2.0)
    assert not coordinator.completed("a", 0, 0, 1, turn(7, 8), 2.0)  # the first turn once more
    coordinator.completed("a", 0, again.attempt, 1, turn(9, end="stop"), 3.0)
    assert not coordinator.completed("a", 0, again.attempt, 1, turn(9, end="stop"), 3.0)
    assert not answer(coordinator, call)
    assert len(coordinator.unscored().completions[1].tokens_T) == 5
    assert coordinator.unscored() is None
    assert (coordinator.counts["duplicates"], coordinator.counts["late"]) == (1, 3)


def test_the_answer_to_an_earlier_call_is_not_the_answer_to_the_next():
    coordinator, _, call = with_call()
    answer(coordinator, call)
    (again,) = coordinator.admit(2.0)
    second = asks(coordinator, again, 1, 9)
    assert not answer(coordinator, call)
    assert coordinator.admit(3.0) == []
    assert answer(coordinator, second)
    assert coordinator.admit(3.0)[0].turn.completion.turns == (4, 7)


def test_a_call_without_a_token_is_no_call():
    coordinator, _ = make("pipeline", 0, tools=True, back_off_s=0.0)
    first, _ = coordinator.admit(0.0)
    assert not coordinator.completed("a", 0, first.attempt, 1, turn(), 1.0)
    assert coordinator.call() is None
    assert coordinator.admit(1.0)[0].siblings == (0, 1)


def test_a_turn_goes_only_where_no_token_is_older_than_those_before_it():
    coordinator, _ = make("pipeline", 1, samplers=("a", "b", "c"), slots=2, tools=True)
    first = {a.group_id: a for a in coordinator.admit(0.0)}
    assert first[0].sampler == "a"
    coordinator.published(1)
    coordinator.holds("a", 1)
    call = asks(coordinator, first[0], 0, 5, version=1)
    answer(coordinator, call)
    for group_id, name in ((1, "b"), (2, "c")):  # their slots are free, but they hold 0, and the last token is of 1
        assert first[group_id].sampler == name
        finish(coordinator, first[group_id])
    assert [(a.sampler, a.group_id) for a in coordinator.admit(2.0) if a.turn] == [("a", 0)]
    coordinator.leave("a", "killed", 3.0)
    assert [a for a in coordinator.admit(9.0) if a.turn] == []
    coordinator.holds("c", 1)
    assert [(a.sampler, a.group_id) for a in coordinator.admit(9.0) if a.turn] == [("c", 0)]


@pytest.mark.parametrize("fate", ["drop", "train", "reissue"])
def test_a_straggler_beside_a_sibling_at_a_tool_has_its_fate(fate):
    how = {"straggler": fate, "straggler_timeout_s": 10.0, "smallest_group": 1}
    coordinator, issuer = make("pipeline", 0, tools=True, **how)
    slow, quick = coordinator.admit(0.0)
    finish(coordinator, quick)
    call = asks(coordinator, slow, 0, 7)
    assert coordinator.overdue(10.0) == [Cancel("a", 0, 0, (1,))]
    # Nothing is done that could train.
    assert issuer.dropped == ({} if fate == "reissue" else {0: "straggler"})
    assert answer(coordinator, call) == (fate == "reissue")
    coordinator.heard("a", 11.0)
    again = [a for a in coordinator.admit(11.0) if a.group_id == 0]
    assert [(a.siblings, a.turn is not None) for a in again] == (
        [((1,), False), ((0,), True)] if fate == "reissue" else []
    )


def test_a_group_that_goes_on_without_stragglers_does_not_wait_for_their_tools():
    coordinator, _ = make("pipeline", 0, tools=True, straggler="train", straggler_timeout_s=10.0, smallest_group=1)
    coordinator._group_size = 3  # siblings: one done, one at a tool, one late
    slow, _ = coordinator.admit(0.0)
    finish(coordinator, slow, siblings=[0])
    call = asks(coordinator, slow, 1, 7)
    coordinator.overdue(10.0)
    assert len(coordinator.unscored().completions) == 1
    assert not answer(coordinator, call)


def test_a_dropped_groups_call_is_neither_given_out_nor_awaited():
    coordinator, issuer = make("pipeline", 0, retries=0, tools=True)
    first, _ = coordinator.admit(0.0)
    coordinator.completed("a", 0, first.attempt, 0, turn(7), 1.0)
    coordinator.failed("a", 0, first.attempt, "out of memory", 1.0)
    assert issuer.dropped == {0: "sampler_failed"}
    assert coordinator.call() is None
    assert coordinator.admit(2.0)[0].group_id == 2


def test_an_evaluations_turns_stay_on_their_version():
    coordinator, _ = make("pipeline", 3, samplers=("a", "b"), tools=True)
    coordinator.published(1)
    coordinator.holds("b", 1)
    pinned = coordinator.pin(1, [PromptTask("e", np.ones(1, np.int32), "", "", "s", "exact")], 1)
    (first,) = [a for a in coordinator.admit(0.0) if a.pinned == 1]
    call = asks(coordinator, first, 0, 5, version=1)
    assert not coordinator.may_swap("b")  # nothing of it runs there, and yet it must be sampled on by 1
    assert coordinator.may_swap("a")
    answer(coordinator, call)
    assert not coordinator.may_swap("b")
    (again,) = [a for a in coordinator.admit(1.0) if a.pinned == 1]
    assert (again.sampler, again.turn.more) == ("b", 5)
    coordinator.completed("b", again.group_id, again.attempt, 0, turn(2, version=1, end="stop"), 2.0)
    ((completion,),) = coordinator.take_pinned(pinned)
    assert completion.tokens_T.tolist() == [5, 90, 91, 2]
    assert completion.versions_T.tolist() == [1] * 4


def test_an_evaluation_that_fails_forgets_its_calls():
    coordinator, _ = make("pipeline", 0, retries=0, tools=True, slots=2)
    coordinator.pin(0, [PromptTask("e", np.ones(1, np.int32), "", "", "s", "exact")], 2)
    first = coordinator.admit(0.0)[0]
    call = asks(coordinator, first, 0, 5)
    coordinator.failed("a", first.group_id, first.attempt, "out of memory", 1.0)
    assert not answer(coordinator, call)
    assert coordinator.may_swap("a")
    assert all(a.pinned is None for a in coordinator.admit(2.0))


def test_idle_samplers_wait_for_tools():
    coordinator, _, call = with_call()
    coordinator.admit(1.0)
    assert coordinator.take_waits(4.0).empty_s == {"tools": 3.0}
    answer(coordinator, call, now=4.0)


def test_the_next_request_asks_for_the_same_ids_and_the_keys_after_them():
    how = HowToSample(Sampling(6, 1.0, stop_strings=("]",)), 11, Sampling(5), 12)
    task = PromptTask("t", np.array([1, 2], np.int32), "", "", "s", "exact")
    so_far = answered(turn(7, 8), ANSWER)
    assignment = Assignment("a", 3, 0, task, (4,), 9, None, Turn(so_far, 2))
    (request,) = how.requests(assignment)
    assert request.tokens_T.tolist() == [1, 2, 7, 8, 90, 91]
    assert (request.first, request.sampling) == (4, Sampling(2, 1.0, stop_strings=("]",)))
    assert (request.seed, request.stream, request.sibling) == (11, 9, 4)
    # The same over the wire to a sampler in another process.
    sent = _Life._request(SimpleNamespace(_how=how), assignment, ["3.0.4"])
    (arrived,) = _requests(type(sent).FromString(sent.SerializeToString()))
    assert arrived.tokens_T.tolist() == request.tokens_T.tolist()
    names = ("first", "sampling", "seed", "stream", "sibling")
    assert [getattr(arrived, name) for name in names] == [getattr(request, name) for name in names]


def two_turns():
    """[5 6 | 90 91 | 4 | 90 91 | 3 eos]"""
    first = answered(turn(5, 6), ANSWER)
    return extended(answered(extended(first, turn(4)), ANSWER), turn(3, 1, end="stop"))


def group_of(*completions):
    task = PromptTask("t", np.array([1, 2, 3], np.int32), "", "", "s", "exact")
    return EpisodeGroup(0, task, tuple(Episode(c, ~c.forced_T, Reward(1.0, {"correct": 1.0})) for c in completions))


def test_what_a_tool_said_is_prefilled_and_not_sampled():
    group = group_of(two_turns(), turn(8, end="stop"))
    assert two_turns().turns == (4, 7)
    # The prompt once, then prompt and all before it for the second and the third turn.
    assert sampled_tokens([group]) == (3 + (3 + 4) + (3 + 7), 5 + 1)
    found = describe_groups([group])
    assert (found["tool_calls_mean"], found["interruption_rate"]) == (1.0, 0.0)


def test_mismatch_looks_at_sampled_tokens_alone():
    def score(params, tokens, targets, positions, segments):
        return np.where(targets >= 90, -7.0, -0.25)

    # Tools' tokens have the log-probability 0, which is nobody's.
    assert mismatch([group_of(two_turns())], score, None, RowShape(1, 1, 20)) == (0.25, 0.25)


class Talker:
    """Calls a tool in every request's first two turns: its tokens say how many it was given, and from where on."""

    def __init__(self, version=0):
        self.queue, self.version, self.submitted = [], version, []

    def submit(self, requests):
        begin = len(self.submitted)
        self.submitted += requests
        self.queue += range(begin, len(self.submitted))
        return list(range(begin, len(self.submitted)))

    def step(self, between=None):
        if between is not None:
            between()
        if not self.queue:
            return []
        number = self.queue.pop()
        request = self.submitted[number]
        calls = int((request.tokens_T >= 90).sum()) // 2
        end = "stop_string" if calls < 2 else "stop"
        return [(number, turn(request.sibling, request.first, version=self.version, end=end))]

    def swap(self, params, version):
        self.version = version

    @property
    def in_flight(self):
        return len(self.queue)

    @property
    def idle(self):
        return not self.queue


def slow_tool(task, completion):
    return Turn(answered(completion, ANSWER), more=3)


def test_turns_are_played_to_their_end():
    prompts = tasks(2)
    requests = [SampleRequest(task.tokens_T, Sampling(4), 5, place) for place, task in enumerate(prompts)]
    scheduler = Talker()
    found = play(scheduler, requests, prompts, Tools(slow_tool, 2))
    assert [c.tokens_T.tolist() for c in found] == [[0, 0, 90, 91, 0, 4, 90, 91, 0, 8]] * 2
    assert sorted(r.sampling.max_new_tokens for r in scheduler.submitted) == [3] * 4 + [4] * 2
    assert {(r.seed, r.stream) for r in scheduler.submitted} == {(5, 0), (5, 1)}


class Board:
    def publish(self, weights):
        pass

    def newer_than(self, version):
        return None


def make_run(next_turn, *, at_once=1):
    issuer = GroupIssuer(PromptStream(tasks(20), seed=1), PassRates(retire_at=None))
    rule = LagRule("pipeline", 0)
    coordinator = Coordinator(issuer, rule, prompts_per_step=2, group_size=3, smallest_group=1, tools=True)
    sampler = LocalSampler(Talker(), Board(), HowToSample(Sampling(4), 5, Sampling(4), 6), slots=100)
    tools = Tools(next_turn, at_once)
    return RolloutWorker(coordinator, FirstSiblingIsRight(), [sampler], Board(), tools=tools)


def test_a_tool_that_raises_ends_the_run():
    def broken(task, completion):
        raise FloatingPointError("tool on fire")

    task = tasks(1)
    with pytest.raises(FloatingPointError, match="tool on fire"):
        play(Talker(), [SampleRequest(task[0].tokens_T, Sampling(4))], task, Tools(broken, 1))
    worker = make_run(broken)
    worker.start()
    with pytest.raises(RuntimeError, match="tools thread failed"):
        worker.next_groups()
    worker.stop()


def test_groups_come_with_all_their_turns_and_tools_work_beside_each_other():
    meeting, calls = threading.Barrier(2, timeout=10), itertools.count()

    def meets(task, completion):
        if next(calls) < 2:
            meeting.wait()
        return slow_tool(task, completion)

    worker = make_run(meets, at_once=2)
    worker.start()
    groups = worker.next_groups()
    worker.stop()
    assert [group.group_id for group in groups] == [0, 1]
    for group in groups:
        for sibling, episode in enumerate(group.episodes):
            assert episode.completion.tokens_T.tolist() == [sibling, 0, 90, 91, sibling, 4, 90, 91, sibling, 8]
