"""Evaluation by the samplers of training: pinned to one version, the same tokens as a scheduler of its own gives."""

import hashlib
import threading

import numpy as np
import pytest
from test_worker import FirstSiblingIsRight, tasks

from jaxrl_llm.data.curriculum import PassRates
from jaxrl_llm.data.prompts import PromptStream
from jaxrl_llm.evaluate import evaluate, evaluate_with
from jaxrl_llm.rollout.coordinator import Coordinator
from jaxrl_llm.rollout.exchange import Exchange
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.lag import LagRule
from jaxrl_llm.rollout.requests import HowToSample
from jaxrl_llm.types import Completion, Sampling

HELD_OUT, SAMPLES, SEED = tasks(7), 3, 11
HOW = HowToSample(Sampling(4, 1.0), 1, Sampling(5, 0.5), SEED)


def completion(request, version):
    """Tokens that depend on the request and the weights alone, as the engine's do."""
    said = f"{request.tokens_T.tolist()} {request.sampling} {request.seed} {request.stream} {request.sibling} {version}"
    token = np.frombuffer(hashlib.sha256(said.encode()).digest()[:4], np.int32) % 2
    return Completion(token, np.float32([-0.5]), np.int32([version]), np.zeros(1, bool), "stop")


class Alone:
    """A scheduler that has one version and nobody else's requests."""

    def __init__(self, version):
        self.version, self._queue = version, []

    def submit(self, requests):
        self._queue = list(enumerate(requests))
        return list(range(len(requests)))

    def step(self):
        number, request = self._queue.pop()
        return [(number, completion(request, self.version))]

    @property
    def idle(self):
        return not self._queue


class Sampler:
    """A sampler in a thread, which turns to a newer version as soon as it may, and notes what it did."""

    def __init__(self, name, version, slots=2, meeting=None):
        self.name, self.version, self.newest, self.slots = name, version, version, slots
        self.meeting = meeting  # where it waits, with its first work, for the others to have theirs
        self.did = []  # (pinned or None, version)

    def start(self, exchange):
        exchange.join(self.name, self.version, self.slots)
        self._thread = threading.Thread(target=self._run, args=(exchange,), daemon=True)
        self._thread.start()

    def stop(self):
        self._thread.join()

    def _run(self, exchange):
        while not exchange.stopping:
            exchange.wait_for_work(self.name, or_until=lambda: self.newest > self.version)
            if self.newest > self.version and exchange.may_swap(self.name):
                self.version = self.newest
                exchange.holds(self.name, self.version)
            for assignment in exchange.work(self.name)[0]:
                if self.meeting is not None and assignment.pinned is not None:
                    self.meeting.wait(20)
                    self.meeting = None
                for request in HOW.requests(assignment):
                    self.did.append((assignment.pinned, self.version))
                    done = completion(request, self.version)
                    exchange.completed(self.name, assignment.group_id, assignment.attempt, request.sibling, done)


@pytest.fixture
def exchange():
    issuer = GroupIssuer(PromptStream(tasks(20), seed=0), PassRates(retire_at=None))
    coordinator = Coordinator(issuer, LagRule("pipeline", 2), prompts_per_step=2, group_size=2, step=4, max_ready=4)
    exchange = Exchange(coordinator)
    yield exchange
    exchange.stop()


def ends(groups):
    return [[e.completion.tokens_T.tolist() for e in group.episodes] for group in groups]


def test_the_same_tokens_as_a_scheduler_of_its_own(exchange):
    alone = Alone(4)
    meeting = threading.Barrier(2)
    samplers = [Sampler("a", 4, meeting=meeting), Sampler("b", 4, slots=5, meeting=meeting)]
    for sampler in samplers:
        sampler.start(exchange)
    theirs = evaluate_with(exchange.sample_pinned, 4, HELD_OUT, FirstSiblingIsRight(), samples=SAMPLES)
    mine = evaluate(
        alone, HELD_OUT, FirstSiblingIsRight(), samples=SAMPLES, sampling=HOW.evaluation, seed=HOW.evaluation_seed
    )
    assert ends(theirs) == ends(mine)
    assert [g.task.task_id for g in theirs] == [t.task_id for t in HELD_OUT]
    assert {token for each in ends(mine) for (token,) in each} == {0, 1}  # tokens tell requests apart
    # Another version is another evaluation, with other streams.
    exchange.published(5, lambda: None)
    for sampler in samplers:
        sampler.newest = 5
    exchange.wake_samplers()
    later = evaluate_with(exchange.sample_pinned, 5, HELD_OUT, FirstSiblingIsRight(), samples=SAMPLES)
    assert ends(later) != ends(mine)
    exchange.stop()
    for sampler in samplers:
        sampler.stop()
    # Both took part, training went on beside it, and nothing of an evaluation saw another version.
    assert all(any(pinned is not None for pinned, _ in s.did) for s in samplers)
    assert any(pinned is None for s in samplers for pinned, _ in s.did)
    assert all(pinned in (None, version) for s in samplers for pinned, version in s.did)


def test_a_sampler_of_another_version_takes_no_part(exchange):
    exchange.published(5, lambda: None)
    behind, right = Sampler("behind", 4), Sampler("right", 5)
    for sampler in (behind, right):
        sampler.start(exchange)
    evaluate_with(exchange.sample_pinned, 5, HELD_OUT, FirstSiblingIsRight(), samples=SAMPLES)
    exchange.stop()
    for sampler in (behind, right):
        sampler.stop()
    assert all(pinned is None for pinned, _ in behind.did)
    assert sum(pinned is not None for pinned, _ in right.did) == len(HELD_OUT) * SAMPLES
