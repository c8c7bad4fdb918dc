"""Continuous batching over a PolicyEngine: requests in, completions out, weights swapped between dispatches.

A synchronous core without threads: whoever owns the scheduler calls it from one thread, and it alone holds the decode
state. While the caller works on what `step` returned, the device decodes on.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jax import Array

from jaxrl_llm.sampler.checks import check_prompt, check_request, check_sampling
from jaxrl_llm.sampler.engine import DecodeState, PolicyEngine, Prefix
from jaxrl_llm.sampler.recorder import Recorder
from jaxrl_llm.sampler.results import PolicyResultTokens
from jaxrl_llm.sampler.scoring import ScoredPrompts
from jaxrl_llm.sampler.slots import FINISH, RUNNING
from jaxrl_llm.sampler.statistics import Statistics
from jaxrl_llm.sampler.stop_strings import first_stop
from jaxrl_llm.types import Completion, FinishReason, Params, QueueFullError, SampleRequest, UserError

Finished = tuple[int, Completion]

_Shared = tuple[bytes, bool]
"""What siblings have in common: the prompt's content, and whether it is scored."""

_NEWEST = 2**31 - 1  # a version is an int32 on the device


@dataclass(frozen=True)
class _Waiting:
    id: int
    request: SampleRequest
    shared: _Shared
    since: float

    @property
    def prompt(self) -> np.ndarray:
        return np.frombuffer(self.shared[0], np.int32)


@dataclass
class _LongPrefill:
    """A prompt that is prefilled in chunks, a chunk between two dispatches; slots are kept free for its requests."""

    shared: _Shared
    waiting: list[_Waiting]
    prefix: Prefix
    done: int = 0
    scores: list[Array] = field(default_factory=list)


@dataclass(frozen=True)
class _Prefilled:
    """A row of a prefix, and the same row's scores if its prompt was scored."""

    prefix: Prefix
    row: int
    scores: ScoredPrompts | None


@dataclass(frozen=True)
class _Dispatch:
    """A dispatch under way and who sat where when it began."""

    result: PolicyResultTokens
    owners: list[_Waiting | None]
    since: float


class Scheduler:
    """Feeds a PolicyEngine from a first-in-first-out queue.

    `params` are the policy's weights (copied, unless `loaded`: they come from `engine.load_params` then) and `version`
    their number. `decode` turns ids into text, for requests
    with stop strings. At most `max_queue` requests wait (None: any number). A dispatch ends as soon as `refill` slots
    have ended while requests wait for them; None is a 32nd of the slots. With `recompute_kv` a weight swap computes the
    keys of sequences in flight anew; otherwise they go on over those they have.

    A request's tokens depend on the request and the weights alone. Every submitted request comes back from `step`
    exactly once, aborted ones included.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        params: Params,
        *,
        version: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_queue: int | None = None,
        refill: int | None = None,
        recompute_kv: bool = False,
        loaded: bool = False,
    ):
        self.engine = engine
        self._params = params if loaded else engine.load_params(params)
        self._version = version
        self._decode = decode
        self._max_queue = max_queue
        self._refill = refill or max(1, engine.slots // 32)
        self._state: DecodeState = engine.init_decode_state(version)
        self._ids = itertools.count()
        self._queue: deque[_Waiting] = deque()
        self._long: _LongPrefill | None = None
        self._slots: list[_Waiting | None] = [None] * engine.slots
        self._slot_of: dict[int, int] = {}
        self._scores: list[tuple[ScoredPrompts, int] | None] = [None] * engine.slots  # and the prompt's row
        # A heap: the lowest slot first, so that what runs where never depends on what ran before. Rows of a matrix
        # product may round differently from place to place.
        self._free = list(range(engine.slots))
        self._aborted: list[Finished] = []
        self._statistics = Statistics()
        # Prompts prefilled before all their siblings found a slot, kept while the queue's head needs one of them.
        self._kept: dict[_Shared, _Prefilled] = {}
        self._recorder = Recorder(engine.slots, engine.max_new_tokens, engine.top_logprobs)
        self._pending: _Dispatch | None = None
        self._ready_since: float | None = None  # when the device last ran out of work while there was some
        self._paused = False
        self._recompute_kv = recompute_kv
        self._stale_keys = False

    @property
    def version(self) -> int:
        """Of the weights that the next dispatch samples with."""
        return self._version

    @property
    def params(self) -> Params:
        """The engine's copy of the weights that the next dispatch samples with."""
        return self._params

    @property
    def statistics(self) -> Statistics:
        return self._statistics

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def queued(self) -> int:
        """Requests that have no slot yet."""
        return len(self._queue) + (len(self._long.waiting) if self._long else 0)

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        return self.queued + self.engine.slots - len(self._free) + len(self._aborted)

    @property
    def idle(self) -> bool:
        return self.in_flight == 0

    def warm_up(self) -> None:
        """Compile all that requests will need. Only before the first of them."""
        assert self.idle
        self._state = self.engine.warm_up(self._params, self._state)

    def submit(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Queue requests; their ids come back in the same order.

        Requests with equal prompts that stand together in the queue are prefilled once. Raises UserError on the first
        request the engine cannot serve, QueueFullError if they do not fit the queue; nothing of the call is queued
        then.
        """
        if self._max_queue is not None and self.queued + len(requests) > self._max_queue:
            raise QueueFullError(
                f"{self.queued} requests wait and {len(requests)} more come; the queue holds {self._max_queue}"
            )
        # Siblings usually share the very objects.
        prompts = {id(r.tokens_T): r.tokens_T for r in requests}
        checked = {key: check_prompt(self.engine, prompt).tobytes() for key, prompt in prompts.items()}
        for how in {id(r.sampling): r.sampling for r in requests}.values():
            check_sampling(self.engine, how, has_text=self._decode is not None)
        for request in requests:
            check_request(self.engine, request)
        now = time.perf_counter()
        waiting = [_Waiting(next(self._ids), r, (checked[id(r.tokens_T)], r.score_prompt), now) for r in requests]
        self._queue.extend(waiting)
        self._count(requests_submitted=len(waiting))
        return [w.id for w in waiting]

    def step(self, between: Callable[[], None] | None = None) -> list[Finished]:
        """Wait for the dispatch under way, refill the slots it freed, start the next one; what has finished.

        `between` is called where weights may be swapped and requests submitted without costing a dispatch: after
        results are in, before slots are refilled. Without it that is before `step`, a dispatch later.
        """
        if self._pending is None:
            if between is not None:
                between()
            self._dispatch()
        finished = self._settle()
        if between is not None:
            between()
        self._dispatch()
        finished, self._aborted = self._aborted + finished, []
        return finished

    def drain(self) -> list[Finished]:
        """Step until nothing is in flight; everything that finished. Raises RuntimeError while paused."""
        if self._paused:
            raise RuntimeError("the scheduler is paused and would never drain; resume it first")
        finished = []
        while not self.idle:
            finished.extend(self.step())
        return finished

    def pause(self) -> None:
        """Start no dispatch until `resume`; the one under way is still settled by `step`."""
        self._paused, self._ready_since = True, None

    def resume(self) -> None:
        self._paused = False

    def so_far(self, id: int, since: int = 0) -> Completion | None:
        """What a request has produced beyond its first `since` tokens ("aborted" stands for its unknown finish).

        None without a slot. The prompt's scores come with the first token.
        """
        slot = self._slot_of.get(id)
        return None if slot is None else self._completion(slot, "aborted", since)

    def abort(self, ids: Iterable[int]) -> None:
        """Stop these requests; the next `step` returns them with finish "aborted" and the tokens they had.

        Ids that are unknown or already returned are ignored: a completion may cross an abort on its way.
        """
        ids = set(ids)
        queued = [w for w in self._queue if w.id in ids]
        if queued:
            self._queue = deque(w for w in self._queue if w.id not in ids)
        if self._long is not None:
            queued += [w for w in self._long.waiting if w.id in ids]
            self._long.waiting = [w for w in self._long.waiting if w.id not in ids]
            if not self._long.waiting:
                self._long = None
        slots = sorted(self._slot_of[id] for id in ids & self._slot_of.keys())
        if slots:
            self._state = self.engine.free_resource(self._state, slots)
        nothing = np.zeros(0, np.int32)
        empty = Completion(nothing, nothing.astype(np.float32), nothing, nothing.astype(bool), "aborted")
        self._aborted.extend((w.id, empty) for w in queued)
        self._aborted.extend(self._release(slot, "aborted") for slot in slots)
        self._count(requests_aborted=len(queued) + len(slots))

    def update_weights(self, params: Params, version: int) -> None:
        """Copy a policy's weights to the sampler and sample with them from the next dispatch on.

        Prompts prefilled by older weights serve nobody any more. Raises UserError on weights of another shape, and if
        `version` is not newer than the present one.
        """
        self.swap(self.engine.load_params(params), version)

    def swap(self, loaded: Params, version: int) -> None:
        """`update_weights` for weights that `engine.load_params` returned (another thread may have called it)."""
        if version <= self._version:
            raise UserError(f"weights of version {version} come after version {self._version}; versions only go up")
        if version > _NEWEST:
            raise UserError(f"weights have the version {version}; the greatest there can be is {_NEWEST}")
        self._params, self._version, self._kept = loaded, version, {}
        on_device = self.engine.device_version(version)
        self._state = replace(self._state, version=on_device)
        if self._long is not None:
            self._long = _LongPrefill(self._long.shared, self._long.waiting, self.engine.begin_prefill(on_device))
        self._stale_keys = self._recompute_kv
        self._count(weight_updates=1)

    def _count(self, **more: float) -> None:
        self._statistics = replace(
            self._statistics, **{name: getattr(self._statistics, name) + n for name, n in more.items()}
        )

    # Before a dispatch.

    def _dispatch(self) -> None:
        if self._paused or self._pending is not None:
            return
        # What is in flight is all on the host here: nothing is under way.
        if self._stale_keys:
            self._recompute_keys()
        self._admit()
        self._prefill_chunk()
        if len(self._free) == self.engine.slots:
            return
        now = time.perf_counter()
        if self._ready_since is not None:
            self._count(gap_s=now - self._ready_since)
        self._state, result = self.engine.generate(self._params, self._state, self._refill if self._queue else None)
        result.copy_to_host_async()
        self._pending = _Dispatch(result, list(self._slots), now)

    def _recompute_keys(self) -> None:
        sequences = {
            slot: np.concatenate([waiting.prompt, self._recorder.tokens(slot)])
            for slot, waiting in enumerate(self._slots)
            if waiting is not None and self._recorder.counts[slot]
        }
        if sequences:
            self._state = self.engine.recompute(self._params, self._state, sequences)
        self._stale_keys = False

    def _admit(self) -> None:
        """Give free slots to the head of the queue: prompts of one bucket together, each prompt once."""
        room = len(self._free) - (len(self._long.waiting) if self._long else 0)
        new: dict[tuple[int, bool], dict[_Shared, list[_Waiting]]] = {}
        while self._queue and room:
            head = self._queue[0]
            length = len(head.prompt)
            if head.shared in self._kept:
                siblings = self._take(head.shared, room)
                self._insert([(self._kept[head.shared], w) for w in siblings])
            elif length > self.engine.prefill_chunk:
                if self._long is not None:
                    break  # one at a time; what stands behind it waits, first in first out
                siblings = self._take(head.shared, room)
                prefix = self.engine.begin_prefill(self.engine.device_version(self._version))
                self._long = _LongPrefill(head.shared, siblings, prefix)
            else:
                siblings = self._take(head.shared, room)
                together = new.setdefault((self.engine.bucket(length), head.request.score_prompt), {})
                together.setdefault(head.shared, []).extend(siblings)
            room -= len(siblings)
        for (bucket, scored), prompts in new.items():
            rows = self.engine.prefill_rows(bucket)
            items = list(prompts.items())
            for start in range(0, len(items), rows):
                self._prefill(items[start : start + rows], scored)
        head = self._queue[0].shared if self._queue else None
        self._kept = {shared: kept for shared, kept in self._kept.items() if shared == head}

    def _take(self, shared: _Shared, most: int) -> list[_Waiting]:
        """Remove the requests for this prompt that stand together at the head of the queue, at most `most`."""
        taken = []
        while self._queue and len(taken) < most and self._queue[0].shared == shared:
            taken.append(self._queue.popleft())
        return taken

    def _prefill(self, items: Sequence[tuple[_Shared, list[_Waiting]]], scored: bool) -> None:
        prompts = [waiting[0].prompt for _, waiting in items]
        version, scores = self.engine.device_version(self._version), None
        if scored:
            prefix, columns = self.engine.prefill_scored(self._params, prompts, version)
            scores = ScoredPrompts([columns])
        else:
            prefix = self.engine.prefill_many(self._params, prompts, version)
        rows = [_Prefilled(prefix, row, scores) for row in range(len(items))]
        self._kept |= {shared: row for row, (shared, _) in zip(rows, items, strict=True)}
        self._insert([(row, w) for row, (_, waiting) in zip(rows, items, strict=True) for w in waiting])
        self._count_prefill(prompts, scored)

    def _count_prefill(self, prompts: Sequence[np.ndarray], scored: bool) -> None:
        count = len(prompts)
        self._count(
            prompts_prefilled=count, prompts_scored=count if scored else 0, prefill_tokens=sum(map(len, prompts))
        )

    def _prefill_chunk(self) -> None:
        """One chunk of the long prompt, so that those who decode wait for no more than that."""
        long = self._long
        if long is None:
            return
        prompt, (_, scored) = long.waiting[0].prompt, long.shared
        if scored:
            long.prefix, columns = self.engine.extend_scored(self._params, long.prefix, prompt, long.done)
            long.scores.append(columns)
        else:
            long.prefix = self.engine.extend_prefill(self._params, long.prefix, prompt, long.done)
        long.done += self.engine.prefill_chunk
        if long.done >= len(prompt):
            self._long = None
            whole = _Prefilled(long.prefix, 0, ScoredPrompts(long.scores) if scored else None)
            self._insert([(whole, w) for w in long.waiting])
            if self._queue and self._queue[0].shared == long.shared:
                self._kept[long.shared] = whole
            self._count_prefill([prompt], scored)

    def _insert(self, admitted: Sequence[tuple[_Prefilled, _Waiting]]) -> None:
        """Give slots to requests whose prompts are rows of one prefix."""
        entries, now, queued_s = [], time.perf_counter(), 0.0
        for prefilled, waiting in admitted:
            slot = heapq.heappop(self._free)
            self._slots[slot], self._slot_of[waiting.id] = waiting, slot
            self._scores[slot] = None if prefilled.scores is None else (prefilled.scores, prefilled.row)
            self._recorder.counts[slot] = 0
            queued_s += now - waiting.since
            entries.append((slot, prefilled.row, waiting.request))
        self._state = self.engine.insert_many(admitted[0][0].prefix, self._state, entries)
        self._count(requests_admitted=len(entries), queue_s=queued_s)

    # After a dispatch.

    def _settle(self) -> list[Finished]:
        """Wait for the dispatch under way, if any, and take in what it brought."""
        if self._pending is None:
            return []
        dispatch, self._pending = self._pending, None
        columns = dispatch.result.columns()
        now = time.perf_counter()
        valid = columns.valid
        if not np.isfinite(columns.logprobs[valid]).all():
            raise FloatingPointError(f"the sampler's log-probabilities are not finite with weights {self._version}")
        # A slot whose request was aborted meanwhile has reported to nobody.
        present = np.array(
            [w is not None and w is owner for w, owner in zip(self._slots, dispatch.owners, strict=True)]
        )
        before = self._recorder.counts.copy()
        self._recorder.record(columns, present)
        cut = self._cut_at_stop_strings(before)
        finished = [
            self._release(slot, "stop_string" if slot in cut else FINISH[int(columns.status[slot])])
            for slot in np.flatnonzero(present & (columns.status != RUNNING)).tolist() + list(cut)
            if self._slots[slot] is not None
        ]
        own = valid & present[:, None]
        steps = int(valid[:, 1:].any(axis=0).sum())
        self._count(
            dispatches=1,
            slot_steps=steps * self.engine.slots,
            decoded_tokens=int(own[:, 1:].sum()),
            tokens_generated=int(own.sum()) - sum(cut.values()),
            requests_completed=len(finished),
            busy_s=now - dispatch.since,
        )
        self._ready_since = now if self.queued or len(self._free) < self.engine.slots else None
        return finished

    def _cut_at_stop_strings(self, before: np.ndarray) -> dict[int, int]:
        """Cut completions at the token that completes a stop string: slot -> how many tokens went."""
        cut = {}
        for slot, waiting in enumerate(self._slots):
            if waiting is None or not (strings := waiting.request.sampling.stop_strings):
                continue
            assert self._decode is not None
            end = first_stop(self._decode, self._recorder.tokens(slot), strings, int(before[slot]))
            if end is not None:
                cut[slot] = int(self._recorder.counts[slot]) - end
                self._recorder.counts[slot] = end
        if cut:
            self._state = self.engine.free_resource(self._state, list(cut))
        return cut

    def _release(self, slot: int, finish: FinishReason) -> Finished:
        waiting, completion = self._slots[slot], self._completion(slot, finish)
        assert waiting is not None
        self._slots[slot] = self._scores[slot] = None
        del self._slot_of[waiting.id]
        heapq.heappush(self._free, slot)
        return waiting.id, completion

    def _completion(self, slot: int, finish: FinishReason, since: int = 0) -> Completion:
        waiting, scores = self._slots[slot], self._scores[slot]
        assert waiting is not None
        wanted = waiting.request.alternatives
        completion = self._recorder.completion(slot, finish, since=since, alternatives=wanted)
        # Before the first token came, the scores may not have been computed: nobody waits for them here.
        if scores is None or since or not self._recorder.counts[slot]:
            return completion
        scored, row = scores
        return replace(completion, prompt=scored.read(row, len(waiting.prompt), wanted))
