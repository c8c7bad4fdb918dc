"""Continuous batching over a PolicyEngine: requests in, completions out, weights swapped between dispatches.

A synchronous core without threads: whoever owns the scheduler calls it from one thread, and it alone holds the decode
state.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_llm.sampler.engine import DecodeState, PolicyEngine, Prefix, SlotSampling
from jaxrl_llm.types import Completion, FinishReason, Params, SampleRequest, UserError

_UINT32 = 2**32


@dataclass(frozen=True)
class Statistics:
    """Totals since the scheduler was made.

    `slot_steps` counts decode steps times slots, `decoded_tokens` those of them that made a token: their ratio is
    the occupancy. The first token of a completion comes from its prompt's prefill and is in `tokens_generated` only.
    """

    requests_submitted: int = 0
    requests_completed: int = 0
    requests_aborted: int = 0
    prompts_prefilled: int = 0
    prefill_tokens: int = 0
    tokens_generated: int = 0
    decoded_tokens: int = 0
    slot_steps: int = 0
    dispatches: int = 0
    weight_updates: int = 0

    @property
    def occupancy(self) -> float:
        """Share of slot-steps that made a token; 0 before the first step."""
        return self.decoded_tokens / self.slot_steps if self.slot_steps else 0.0


@dataclass(frozen=True)
class _Waiting:
    id: int
    request: SampleRequest
    prompt: bytes  # the prompt's content: siblings share it


class Scheduler:
    """Feeds a PolicyEngine from a first-in-first-out queue.

    `params` are the policy's weights (copied) and `version` their number. A request's tokens depend on the request
    and the weights alone. Every submitted request comes back from `step` exactly once, aborted ones included.
    """

    def __init__(self, engine: PolicyEngine, params: Params, *, version: int = 0):
        self.engine = engine
        self._params = engine.load_params(params)
        self._version = version
        self._state: DecodeState = engine.init_decode_state(version)
        self._ids = itertools.count()
        self._queue: deque[_Waiting] = deque()
        self._slots: list[_Waiting | None] = [None] * engine.slots
        # A heap: the lowest slot first, so that what runs where never depends on what ran before. Rows of a matrix
        # product may round differently from place to place.
        self._free = list(range(engine.slots))
        self._aborted: list[tuple[int, Completion]] = []
        self._statistics = Statistics()
        # The prompts prefilled last, kept while the queue's head still needs one of them.
        self._kept: tuple[Prefix, dict[bytes, int]] | None = None
        shape = (engine.slots, engine.max_new_tokens)
        self._tokens = np.zeros(shape, np.int32)
        self._logprobs = np.zeros(shape, np.float32)
        self._versions = np.zeros(shape, np.int32)
        self._counts = np.zeros(engine.slots, np.int64)

    @property
    def version(self) -> int:
        """Of the weights the next token is sampled with."""
        return self._version

    @property
    def statistics(self) -> Statistics:
        return self._statistics

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._queue) + self.engine.slots - len(self._free) + len(self._aborted)

    @property
    def idle(self) -> bool:
        return self.in_flight == 0

    def submit(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Queue requests; their ids come back in the same order.

        Requests with equal prompts that stand together in the queue are prefilled once.
        Raises UserError on the first request the engine cannot serve; none of the call's requests is queued then.
        """
        prompts = {id(r.tokens_T): r.tokens_T for r in requests}  # siblings usually share the very array
        checked = {key: self._checked_prompt(prompt) for key, prompt in prompts.items()}
        for request in requests:
            self._check_sampling(request)
        waiting = [_Waiting(next(self._ids), r, checked[id(r.tokens_T)]) for r in requests]
        self._queue.extend(waiting)
        self._count(requests_submitted=len(waiting))
        return [w.id for w in waiting]

    def _checked_prompt(self, prompt: np.ndarray) -> bytes:
        engine, tokens = self.engine, np.asarray(prompt)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise UserError(f"a prompt must be a flat array of integer ids, not {tokens.dtype} {tokens.shape}")
        if not 1 <= len(tokens) <= engine.max_prompt_tokens:
            raise UserError(
                f"a prompt has {len(tokens)} tokens; the sampler takes 1 to {engine.max_prompt_tokens} "
                f"(rollout.max_prompt_tokens)"
            )
        if tokens.min() < 0 or tokens.max() >= engine.model.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= engine.model.vocab_size)][0]
            raise UserError(f"a prompt holds the id {bad}, outside the vocabulary of {engine.model.vocab_size} tokens")
        return tokens.astype(np.int32).tobytes()

    def _check_sampling(self, request: SampleRequest) -> None:
        if not 1 <= request.max_new_tokens <= self.engine.max_new_tokens:
            raise UserError(
                f"max_new_tokens is {request.max_new_tokens}; the sampler's slots hold 1 to "
                f"{self.engine.max_new_tokens} (rollout.max_new_tokens)"
            )
        # Below this, logits divided by the temperature may overflow float32.
        if request.temperature != 0 and not 1e-6 <= request.temperature < math.inf:
            raise UserError(f"temperature is {request.temperature}; use 0 (greedy) or a finite number from 1e-6 on")
        for name in ("seed", "stream", "sibling"):
            if not 0 <= getattr(request, name) < _UINT32:
                raise UserError(f"{name} is {getattr(request, name)}; it must be in 0 ... 2**32 - 1")

    def step(self) -> list[tuple[int, Completion]]:
        """Fill free slots from the queue, decode one dispatch, return what finished (and what was aborted since)."""
        finished, self._aborted = self._aborted, []
        self._admit()
        if len(self._free) < self.engine.slots:
            self._state, result = self.engine.generate(self._params, self._state)
            finished.extend(self._collect(*result.columns()))
        return finished

    def drain(self) -> list[tuple[int, Completion]]:
        """Step until nothing is in flight; everything that finished."""
        finished = []
        while not self.idle:
            finished.extend(self.step())
        return finished

    def abort(self, ids: Iterable[int]) -> None:
        """Stop these requests; the next `step` returns them with finish "aborted" and the tokens they had.

        Ids that are unknown or already returned are ignored: a completion may cross an abort on its way.
        """
        ids = set(ids)
        queued = [w for w in self._queue if w.id in ids]
        if queued:
            self._queue = deque(w for w in self._queue if w.id not in ids)
        slots = [slot for slot, w in enumerate(self._slots) if w is not None and w.id in ids]
        if slots:
            self._state = self.engine.free_resource(self._state, slots)
        nothing = np.zeros(0, np.int32)
        empty = Completion(nothing, nothing.astype(np.float32), nothing, "aborted")
        self._aborted.extend((w.id, empty) for w in queued)
        self._aborted.extend(self._release(slot, "aborted") for slot in slots)
        self._count(requests_aborted=len(queued) + len(slots))

    def update_weights(self, params: Params, version: int) -> None:
        """Copy a policy's weights to the sampler and sample every later token with them.

        In-flight sequences go on over the keys and values they have; prompts prefilled by older weights are dropped.
        Raises UserError on weights of another shape, and if `version` is not newer than the present one.
        """
        self.swap(self.engine.load_params(params), version)

    def swap(self, loaded: Params, version: int) -> None:
        """`update_weights` for weights that `engine.load_params` returned (another thread may have called it)."""
        if version <= self._version:
            raise UserError(f"weights of version {version} come after version {self._version}; versions only go up")
        self._params, self._version, self._kept = loaded, version, None
        self._state = replace(self._state, version=self.engine.device_version(version))
        self._count(weight_updates=1)

    def _count(self, **more: int) -> None:
        self._statistics = replace(
            self._statistics, **{name: getattr(self._statistics, name) + n for name, n in more.items()}
        )

    def _admit(self) -> None:
        admitted = [self._queue.popleft() for _ in range(min(len(self._free), len(self._queue)))]
        if not admitted:
            return
        kept = self._kept[1] if self._kept else {}
        old = [w for w in admitted if w.prompt in kept]
        new = [w for w in admitted if w.prompt not in kept]
        if old and self._kept:
            self._insert(*self._kept, old)
        if new:
            rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(w.prompt for w in new))}
            prompts = [np.frombuffer(prompt, np.int32) for prompt in rows]
            version = self.engine.device_version(self._version)
            prefix = self.engine.prefill_many(self._params, prompts, version, rows=self.engine.slots)
            self._kept = (prefix, rows)
            self._insert(prefix, rows, new)
            self._count(prompts_prefilled=len(prompts), prefill_tokens=sum(map(len, prompts)))
        if self._kept and (not self._queue or self._queue[0].prompt not in self._kept[1]):
            self._kept = None

    def _insert(self, prefix: Prefix, rows: dict[bytes, int], admitted: Sequence[_Waiting]) -> None:
        entries = []
        for waiting in admitted:
            slot, request = heapq.heappop(self._free), waiting.request
            self._slots[slot] = waiting
            self._counts[slot] = 0
            sampling = SlotSampling(
                request.max_new_tokens, request.temperature, request.seed, request.stream, request.sibling
            )
            entries.append((slot, rows[waiting.prompt], sampling))
        self._state = self.engine.insert_many(prefix, self._state, entries)

    def _collect(self, tokens, valid, logprobs, versions, active) -> list[tuple[int, Completion]]:
        for column in range(tokens.shape[1]):
            slots = np.flatnonzero(valid[:, column])
            at = (slots, self._counts[slots])
            self._tokens[at] = tokens[slots, column]
            self._logprobs[at] = logprobs[slots, column]
            self._versions[at] = versions[slots, column]
            self._counts[slots] += 1
        if not np.isfinite(logprobs[valid]).all():
            raise FloatingPointError(f"the sampler's log-probabilities are not finite with weights {self._version}")
        decoded = int(valid[:, 1:].sum())
        steps = int(valid[:, 1:].any(axis=0).sum())
        ended = [slot for slot, waiting in enumerate(self._slots) if waiting is not None and not active[slot]]
        finished = []
        for slot in ended:
            last = self._tokens[slot, self._counts[slot] - 1]
            finished.append(self._release(slot, "stop" if last == self.engine.eos_id else "length"))
        self._count(
            dispatches=1,
            slot_steps=steps * self.engine.slots,
            decoded_tokens=decoded,
            tokens_generated=int(valid.sum()),
            requests_completed=len(finished),
        )
        return finished

    def _release(self, slot: int, finish: FinishReason) -> tuple[int, Completion]:
        waiting, count = self._slots[slot], self._counts[slot]
        assert waiting is not None
        completion = Completion(
            self._tokens[slot, :count].copy(),
            self._logprobs[slot, :count].copy(),
            self._versions[slot, :count].copy(),
            finish,
        )
        self._slots[slot] = None
        heapq.heappush(self._free, slot)
        return waiting.id, completion
