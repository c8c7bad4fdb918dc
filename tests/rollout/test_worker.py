"""The sampling thread with a scripted scheduler: no model, no engine."""

import threading
import time
from collections import Counter

import numpy as np
import pytest

from jaxrl_llm.data.curriculum import PassRates
from jaxrl_llm.data.prompts import PromptStream, fingerprint
from jaxrl_llm.rollout.coordinator import Coordinator
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.lag import LagRule
from jaxrl_llm.rollout.local import LocalSampler
from jaxrl_llm.rollout.requests import HowToSample
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.types import Completion, Episode, PolicyWeights, PromptTask, Reward, Sampling
from jaxrl_llm.weights import WeightBoard, digest

P, G = 2, 3


def tasks(n):
    return [PromptTask(f"t{i}", np.array([i], np.int32), str(i), str(i), "s", "exact") for i in range(n)]


class ScriptedScheduler:
    """Finishes one request per step, the newest first unless told, so that groups come back out of order."""

    def __init__(self, break_at=None, version=0, oldest_first=False):
        self.queue, self.version, self.submitted, self.break_at = [], version, [], break_at
        self.next = 0 if oldest_first else -1

    def submit(self, requests):
        ids = list(range(len(self.submitted), len(self.submitted) + len(requests)))
        self.submitted += requests
        self.queue += ids
        return ids

    def step(self, between=None):
        if between is not None:
            between()
        if self.break_at is not None and len(self.submitted) >= self.break_at:
            raise FloatingPointError("device on fire")
        if not self.queue:
            return []
        request = self.queue.pop(self.next)
        tokens = np.array([self.submitted[request].sibling], np.int32)
        versions = np.array([self.version], np.int32)
        return [(request, Completion(tokens, np.array([-0.5], np.float32), versions, np.zeros(1, bool), "stop"))]

    def swap(self, params, version):
        assert version > self.version
        self.version = version

    @property
    def in_flight(self):
        return len(self.queue)

    @property
    def idle(self):
        return not self.queue


class FirstSiblingIsRight:
    def episodes(self, task, completions):
        rights = [float(completion.tokens_T[0] == 0) for completion in completions]
        return [
            Episode(c, np.ones(1, bool), Reward(right, {"correct": right}))
            for c, right in zip(completions, rights, strict=True)
        ]


def make(
    *,
    max_lag,
    n=20,
    scheduler=None,
    retire_at=None,
    restore=None,
    step=0,
    concurrency=10**6,
    max_ready=10**6,
    environment=None,
    scorers=1,
    **how,
):
    scheduler = scheduler or ScriptedScheduler(version=step)
    issuer = GroupIssuer(PromptStream(tasks(n), seed=1), PassRates(retire_at=retire_at))
    if restore:
        issuer.restore(restore)
    rule = LagRule("pipeline", max_lag)
    coordinator = Coordinator(
        issuer, rule, prompts_per_step=P, group_size=G, step=step, max_ready=max_ready, smallest_group=1, **how
    )
    board, sampling = WeightBoard(), HowToSample(Sampling(4), 5, Sampling(4, 0.0), 6)
    sampler = LocalSampler(scheduler, board, sampling, slots=concurrency)
    worker = RolloutWorker(coordinator, environment or FirstSiblingIsRight(), [sampler], board, scorers=scorers)
    return worker, issuer, scheduler


def train_step(worker, issuer, step):
    groups = worker.next_groups()
    lags = [step - int(v) for g in groups for e in g.episodes for v in e.completion.versions_T]
    worker.publish(step + 1, lambda: None)
    issuer.settle(groups, {}, groups)
    return groups, lags


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_lag_never_exceeds_the_bound_and_groups_come_in_issue_order(max_lag):
    worker, issuer, _scheduler = make(max_lag=max_lag)
    worker.start()
    seen, lags = [], []
    for step in range(12):
        groups, step_lags = train_step(worker, issuer, step)
        seen += [g.group_id for g in groups]
        lags += step_lags
    worker.stop()
    assert seen == list(range(12 * P))
    assert 0 <= min(lags) <= max(lags) <= max_lag
    if max_lag == 0:
        assert set(lags) == {0}
    counts = issuer.counts()
    assert counts["prompts_issued"] == counts["prompts_trained"] + counts["prompts_in_flight"]
    assert counts["prompts_issued"] <= (12 + max_lag + 1) * P


@pytest.mark.parametrize(("concurrency", "max_ready"), [(1, P), (G, P), (2 * P * G, P), (P * G, 2 * P)])
def test_a_fast_sampler_makes_no_stock_of_stale_samples(concurrency, max_ready):
    scheduler = ScriptedScheduler(oldest_first=True)
    worker, issuer, _ = make(max_lag=8, concurrency=concurrency, max_ready=max_ready, scheduler=scheduler)
    worker.start()
    # One short of the stock, then what runs at once; and one more while the trainer is taking groups.
    most = max_ready - 1 + -(-concurrency // G) + 1
    lags = []
    for step in range(12):
        deadline = time.monotonic() + 10  # the trainer is slow: the sampler does all it is allowed to do
        while not (scheduler.idle and issuer.counts()["prompts_in_flight"] >= max_ready):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert issuer.counts()["prompts_in_flight"] <= most
        lags += train_step(worker, issuer, step)[1]
    worker.stop()
    assert max(lags) <= -(-most // P)  # in batches ahead of the trainer: far below the bound of 8


def test_every_sibling_has_its_own_random_stream():
    worker, issuer, scheduler = make(max_lag=0)
    worker.start()
    for step in range(3):
        train_step(worker, issuer, step)
    worker.stop()
    streams = [(r.seed, r.stream, r.sibling) for r in scheduler.submitted]
    assert len(set(streams)) == len(streams)
    assert streams[:G] == [(5, 0, 0), (5, 0, 1), (5, 0, 2)]


def test_a_failure_of_the_sampling_thread_reaches_the_trainer():
    worker, *_ = make(max_lag=0, scheduler=ScriptedScheduler(break_at=1))
    worker.start()
    with pytest.raises(RuntimeError, match="rollout thread failed") as error:
        worker.next_groups()
    assert isinstance(error.value.__cause__, FloatingPointError)
    worker.stop()


class BlockedOnReward(FirstSiblingIsRight):
    def __init__(self):
        self.open, self.asked = threading.Event(), []

    def episodes(self, task, completions):
        self.asked.append((task.task_id, len(completions)))
        self.open.wait(10)
        return super().episodes(task, completions)


def test_slow_rewards_do_not_hold_up_sampling_and_count_as_stock():
    environment = BlockedOnReward()
    scheduler = ScriptedScheduler(oldest_first=True)
    worker, issuer, _ = make(max_lag=8, concurrency=G, max_ready=4, environment=environment, scheduler=scheduler)
    worker.start()
    deadline = time.monotonic() + 10
    # Nothing has been scored, and yet four groups are sampled, and one that began before the fourth ended.
    while len(scheduler.submitted) < 5 * G or not scheduler.idle:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(scheduler.submitted) == 5 * G  # of 18 that the lag allows: more would only be stock
    assert len(environment.asked) == 1  # one group at a time
    environment.open.set()
    groups = [g for step in range(3) for g in train_step(worker, issuer, step)[0]]
    worker.stop()
    assert [g.group_id for g in groups] == list(range(3 * P))
    assert {count for _, count in environment.asked} == {G}  # siblings together


def test_several_scorers_take_a_group_each_and_a_slow_one_changes_no_order():
    class FirstIsSlow(FirstSiblingIsRight):
        def __init__(self):
            self.others, self.together = threading.Semaphore(0), []

        def episodes(self, task, completions):
            self.together.append(len(completions))
            if len(self.together) == 1:
                for _ in range(2):  # others go on meanwhile
                    assert self.others.acquire(timeout=10)
            else:
                self.others.release()
            return super().episodes(task, completions)

    environment = FirstIsSlow()
    worker, issuer, _ = make(max_lag=8, environment=environment, scorers=2)
    worker.start()
    groups = [g for step in range(3) for g in train_step(worker, issuer, step)[0]]
    worker.stop()
    assert [g.group_id for g in groups] == list(range(3 * P))
    assert set(environment.together) == {G}


def test_a_failure_of_the_scoring_thread_reaches_the_trainer():
    class Broken:
        def episodes(self, task, completions):
            raise FloatingPointError("judge on fire")

    worker, *_ = make(max_lag=0, environment=Broken())
    worker.start()
    with pytest.raises(RuntimeError, match="rewards thread failed") as error:
        worker.next_groups()
    assert isinstance(error.value.__cause__, FloatingPointError)
    worker.stop()


def test_stop_while_waiting_for_weights_does_not_hang():
    worker, issuer, _ = make(max_lag=0)
    worker.start()
    assert len(worker.next_groups()) == P  # the thread waits for the trainer
    assert issuer.counts()["prompts_issued"] == P
    worker.stop()


def test_retired_prompts_are_never_issued_again_and_the_run_ends_when_none_is_left():
    # Every prompt is right once in three, so 1/3 retires each after its first group: 6 prompts, then nothing.
    worker, issuer, _ = make(max_lag=0, n=6, retire_at=0.33)
    worker.start()
    issued = []
    for step in range(4):
        groups, _ = train_step(worker, issuer, step)
        issued += [g.task.task_id for g in groups]
    worker.stop()
    assert Counter(issued) == {f"t{i}": 1 for i in range(6)}
    assert issuer.counts()["prompts_retired"] == 6


def test_resume_issues_the_groups_in_flight_again_once_and_loses_no_prompt():
    worker, issuer, _ = make(max_lag=2)
    worker.start()
    first = [g for step in range(2) for g in train_step(worker, issuer, step)[0]]
    worker.stop()
    state = issuer.state()
    in_flight = [group for group, _ in state["ledger"]["in_flight"]]
    assert in_flight  # the sampler ran ahead
    again, issuer, scheduler = make(max_lag=2, restore=state, step=2)
    again.start()
    rest = [g for step in range(2, 10) for g in train_step(again, issuer, step)[0]]
    again.stop()
    ids = [g.group_id for g in first + rest]
    assert ids == list(range(20))
    stream = PromptStream(tasks(20), seed=1)
    assert [g.task.task_id for g in first + rest] == [stream[i].task_id for i in range(20)]  # one epoch, each once
    assert Counter(r.stream for r in scheduler.submitted)[in_flight[0]] == G


def test_the_board_keeps_the_newest_and_refuses_to_go_back():
    board = WeightBoard()
    board.publish(PolicyWeights(1, "a"))
    board.publish(PolicyWeights(4, "b"))
    assert board.newer_than(0).params == "b"
    assert board.newer_than(4) is None
    with pytest.raises(ValueError, match="version 4 published after version 4"):
        board.publish(PolicyWeights(4, "c"))


def test_digest_sees_one_bit_a_dtype_and_a_name():
    one = {"a": np.zeros(4, np.float32)}
    flipped = {"a": np.array([0, 0, 0, 1e-45], np.float32)}
    others = [
        flipped,
        {"a": np.zeros(4, np.int32)},
        {"b": np.zeros(4, np.float32)},
        {"a": np.zeros((2, 2), np.float32)},
    ]
    assert digest(one) == digest({"a": np.zeros(4, np.float32)})
    assert len({digest(x) for x in [one, *others]}) == 5


def test_epochs_are_shuffled_differently_and_hold_every_prompt_once():
    stream = PromptStream(tasks(50), seed=3)
    epochs = [[stream[i].task_id for i in range(e * 50, e * 50 + 50)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(t.task_id for t in tasks(50))
    assert epochs[0] != epochs[1]
    assert fingerprint(tasks(50)) != fingerprint(tasks(49))
