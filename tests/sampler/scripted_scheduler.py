"""A scheduler without a model: what a request gets is plain arithmetic, and a test decides when a dispatch runs."""

import signal
import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from sampler_reference import CONFIG, EOS, NEW, PROMPT

from jaxrl_llm.types import Completion, QueueFullError, UserError


@pytest.fixture(autouse=True)
def no_test_waits_for_ever():
    """What waits for another thread fails after four minutes; so does what it still waits for while it is torn down."""

    def too_long(*_):
        raise TimeoutError("the test waited for four minutes")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 240, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def scripted(request, version=0):
    """Token n of a request is (stream + n) % 20, unless that is EOS; it ends at its budget."""
    count = request.sampling.max_new_tokens
    tokens = (request.stream + np.arange(count)) % CONFIG.vocab_size
    tokens = np.where(tokens == EOS, 2, tokens).astype(np.int32)
    return tokens, -0.5 - 0.01 * np.arange(count, dtype=np.float32)


class Statistics(SimpleNamespace):
    __dataclass_fields__: ClassVar = {}


class ScriptedScheduler:
    """One token a dispatch for each of `slots` requests. With `gated` a step makes nothing until `let` allows it."""

    def __init__(self, *, slots=4, max_queue=None, gated=False):
        self.engine = SimpleNamespace(
            slots=slots, max_prompt_tokens=PROMPT, max_new_tokens=NEW, eos_id=EOS, model=CONFIG, top_logprobs=0,
            load_params=lambda p: p,
        )  # fmt: skip
        self.version, self.paused, self.broken = 0, False, None
        self.statistics = Statistics(occupancy=0.5)
        self._max_queue, self._next = max_queue, 0
        self._waiting, self._running, self._aborted = [], {}, []
        self._gate = threading.Semaphore(0) if gated else None
        self.dispatched = self.stepped = 0
        self.owner = None

    def let(self, dispatches):
        self._gate.release(dispatches)

    @property
    def in_flight(self):
        return len(self._waiting) + len(self._running) + len(self._aborted)

    @property
    def idle(self):
        return self.in_flight == 0

    def submit(self, requests):
        self._check_owner()
        for request in requests:
            if not 1 <= len(request.tokens_T) <= PROMPT:
                raise UserError(f"a prompt has {len(request.tokens_T)} tokens; the sampler takes 1 to {PROMPT}")
        if self._max_queue is not None and len(self._waiting) + len(requests) > self._max_queue:
            raise QueueFullError(f"the queue holds {len(self._waiting)} of {self._max_queue} requests")
        ids = list(range(self._next, self._next + len(requests)))
        self._next += len(requests)
        self._waiting += zip(ids, requests, strict=True)
        return ids

    def step(self, between=None):
        self._check_owner()
        self.stepped += 1
        if between:
            between()
        finished, self._aborted = self._aborted, []
        if self.paused:
            return finished
        while self._waiting and len(self._running) < self.engine.slots:
            id, request = self._waiting.pop(0)
            self._running[id] = (request, [])
        if not self._running:
            return finished
        if self._gate is not None and not self._gate.acquire(timeout=0.001):
            return finished
        if self.broken:
            raise self.broken
        self.dispatched += 1
        for id, (request, versions) in list(self._running.items()):
            versions.append(self.version)
            if len(versions) == request.sampling.max_new_tokens:
                finished.append((id, self._completion(id, "length")))
                del self._running[id]
        return finished

    def so_far(self, id, since=0):
        return self._completion(id, "aborted", since) if id in self._running else None

    def _completion(self, id, finish, since=0):
        request, versions = self._running[id]
        made = slice(since, len(versions))
        tokens, logprobs = scripted(request)
        versions = np.array(versions, np.int32)[made]
        return Completion(tokens[made], logprobs[made], versions, np.zeros(len(versions), bool), finish)

    def abort(self, ids):
        self._check_owner()
        for id in ids:
            if id in self._running:
                self._aborted.append((id, self._completion(id, "aborted")))
                del self._running[id]
        nothing = np.zeros(0, np.int32)
        empty = Completion(nothing, nothing.astype(np.float32), nothing, nothing.astype(bool), "aborted")
        self._aborted += [(id, empty) for id, _ in self._waiting if id in ids]
        self._waiting = [(id, request) for id, request in self._waiting if id not in ids]

    def pause(self):
        self.paused = True

    def resume(self):
        self.paused = False

    def swap(self, loaded, version):
        self._check_owner()
        if version <= self.version:
            raise UserError(f"weights of version {version} come after version {self.version}; versions only go up")
        self.version = version

    def _check_owner(self):
        self.owner = self.owner or threading.get_ident()
        assert self.owner == threading.get_ident(), "another thread than the owner touched the scheduler"
