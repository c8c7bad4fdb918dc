"""One run in virtual time: the real coordinator, issuer, board, rewards' shapes and batching between simulated devices.

    trainer: take -> select -> pack -> busy for train_s -> settle, publish -> (evaluate, checkpoint) -> take ...
    sampler: attach -> push of the newest weights -> join -> { work -> completed } | { push -> swap -> holds } -> dies

What a trainer process remembers dies with it (`crash_trainer`): a new one starts from the last checkpoint, and its
samplers attach to it anew, whatever they hold. Every rule that this file checks while it runs raises BrokenRuleError.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.data.curriculum import PassRates
from jaxrl_llm.envs.turns import answered
from jaxrl_llm.pipeline.clock import Clock
from jaxrl_llm.pipeline.decoder import Decoder, Weights
from jaxrl_llm.pipeline.network import Network, send
from jaxrl_llm.rollout.batching import Selection, select
from jaxrl_llm.rollout.coordinator import Assignment, Call, Cancel, Coordinator, Event
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.rows import RowShape, pack
from jaxrl_llm.rollout.statistics import age_by_length, measure_lag
from jaxrl_llm.types import Completion, Episode, EpisodeGroup, FinishReason, PolicyWeights, PromptTask, Reward, Turn
from jaxrl_llm.weights import WeightBoard
from jaxrl_llm.weights.fan_out import FanOut


class BrokenRuleError(AssertionError):
    """What must never happen has happened in a simulated run."""


class Prompts:
    """A stream of prompts without text: element i is prompt i modulo `count`. See data.prompts.PromptStream."""

    def __init__(self, count: int):
        self.epoch_size = count
        self.next_index = 0

    def __getitem__(self, index: int) -> PromptTask:
        return PromptTask(f"t{index % self.epoch_size}", np.ones(1, np.int32), "", "", "s", "exact")


@dataclass(frozen=True)
class SamplerSpec:
    """One sampler: its slots, tokens per dispatch, seconds per token when so many sequences run, and per prompt."""

    slots: int
    chunk: int
    step_s: Callable[[int], float]
    prefill_s: float = 0.0


@dataclass(frozen=True)
class RunSpec:
    """The run. `length(group_id, sibling)` is a completion's length, `reward(group_id, sibling)` its reward.

    A completion has `turns(group_id, sibling)` turns, each of that length; tools answer after `tool_s`, with one token.
    A step on so many tokens of so many completions takes `train_s(tokens, documents)`, a group's rewards `score_s`.
    Samplers in the trainer's own process (`local`) get work only between two dispatches. Every `evaluate_every` steps
    an evaluation of `evaluate_prompts` runs on the samplers, every `checkpoint_every` steps a checkpoint is written,
    every `heartbeat_s` samplers say that they live (0: never). What broke off is tried again after `retry_s`.
    As many samplers as `fan_out` says fetch weights from one place at a time.
    """

    steps: int
    prompts_per_step: int
    group_size: int
    coordinator: Callable[[GroupIssuer, int], Coordinator]
    samplers: Sequence[SamplerSpec]
    length: Callable[[int, int], int]
    reward: Callable[[int, int], float]
    train_s: Callable[[int, int], float]
    selection: Selection
    shape: RowShape | None = None
    score_s: float = 0.0
    prompts: int = 10**9
    local: bool = False
    evaluate_every: int = 0
    evaluate_prompts: int = 0
    checkpoint_every: int = 1
    retry_s: float = 0.1
    heartbeat_s: float = 0.0
    fan_out: int = 2
    turns: Callable[[int, int], int] = lambda group_id, sibling: 1
    tool_s: float = 0.0


@dataclass
class Books:
    """What happened, over the whole run; times are in seconds."""

    steps: int = 0
    trained: int = 0
    tokens: int = 0
    trainer_busy_s: float = 0.0
    lag_max: int = 0
    lag_sum: float = 0.0
    lag_tokens: int = 0


class Simulation:
    """Drive it with `run`, and disturb it meanwhile with the methods named after what they break."""

    def __init__(self, spec: RunSpec, network: Network):
        self.spec, self.network, self.clock, self.books = spec, network, Clock(), Books()
        self.records: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self._contents = 0
        self._disk: tuple[int, dict[str, Any], int] | None = None  # step, issuer's state, content of its weights
        self._trained_at: dict[int, int] = {}  # group -> step that trained it, in the trainer's present past
        self._content_of: dict[int, int] = {}
        self.life = 0
        self.hosts = [_Host(self, number, sampler) for number, sampler in enumerate(spec.samplers)]
        self.trainer = _Trainer(self)
        for host in self.hosts:
            host.start()

    def run(self, *, max_events: int, disturb: Callable[[], None] = lambda: None) -> Books:
        """Until `spec.steps` steps are done; `disturb` is called after every event.

        Raises BrokenRuleError for a deadlock: nothing left to happen, or more than `max_events` events.
        """
        while not self.trainer.done:
            if not self.clock.step() or self.clock.events > max_events:
                raise BrokenRuleError(
                    f"deadlock at step {self.trainer.step} of {self.spec.steps} after {self.clock.now:.3f} s: the "
                    f"trainer waits for {self.trainer.coordinator.trainer_waits_for()}"
                )
            disturb()
        self.trainer.check_books()
        return self.books

    def new_content(self) -> int:
        self._contents += 1
        return self._contents

    def crash_trainer(self, down_s: float) -> None:
        """The trainer's process dies, and a new one goes on from its last checkpoint."""
        self.life += 1
        self.clock.after(down_s, partial(self._restart_trainer, self.life))

    def _restart_trainer(self, life: int) -> None:
        if life == self.life:
            self.trainer = _Trainer(self)
            for host in self.hosts:
                host.attach()


def _sibling(completion: Completion) -> int:
    return int(-1 - completion.logprobs_T[0])


class _Trainer:
    """A trainer's process: everything in it is gone when it dies."""

    def __init__(self, simulation: Simulation):
        self._sim, self._spec, self._clock = simulation, simulation.spec, simulation.clock
        self.life = simulation.life
        self.issuer = GroupIssuer(Prompts(self._spec.prompts), PassRates(retire_at=None))  # pyrefly: ignore
        self.step, content = 0, 0
        if simulation._disk is not None:
            self.step, state, content = simulation._disk
            self.issuer.restore(state)
        else:
            content = simulation.new_content()
            self._save(content)
        simulation._trained_at = {g: s for g, s in simulation._trained_at.items() if s < self.step}
        simulation._content_of = {v: c for v, c in simulation._content_of.items() if v < self.step}
        simulation._content_of[self.step] = content
        self.coordinator = self._spec.coordinator(self.issuer, self.step)
        self.board, self.fan_out = WeightBoard(), FanOut("trainer", self._spec.fan_out)
        self.board.publish(PolicyWeights(self.step, content))
        self._busy = self._scoring = False
        self._pinned: list[int] | None = None
        self._alarm: float | None = None
        self._wait_since = self._clock.now
        self._waits: dict[str, float] = {}

    @property
    def alive(self) -> bool:
        return self.life == self._sim.life

    @property
    def busy(self) -> bool:
        return self._busy

    @property
    def done(self) -> bool:
        return self.alive and self.step >= self._spec.steps and not self._busy and self._pinned is None

    def _save(self, content: int) -> None:
        self._sim._disk = (self.step, self.issuer.state(), content)

    # What samplers' messages do.

    def heard(self, say: Callable[[Coordinator, float], object]) -> None:
        """A message has arrived."""
        if self.alive:
            say(self.coordinator, self._clock.now)
            if self._spec.local:  # a sampler asks between two dispatches, and where it has nothing to do
                for host in self._sim.hosts:
                    host.look()
            else:
                self.distribute()
            self.go_on()

    def distribute(self) -> None:
        """Give out work and cancellations, and set the alarm for what time alone will bring."""
        now = self._clock.now
        cancels, assignments = self.coordinator.overdue(now), self.coordinator.admit(now)
        self._sim.events += self.coordinator.take_events()
        hosts = {host.name: host for host in self._sim.hosts}
        for cancel in cancels:
            if cancel.sampler in hosts:
                hosts[cancel.sampler].cancel(cancel)
        for assignment in assignments:
            # One to a past life is lost: that this life is over is heard later.
            if assignment.sampler in hosts:
                hosts[assignment.sampler].assign(assignment)
        due = self.coordinator.next_event(now)
        if due is not None and (self._alarm is None or now + due < self._alarm or self._alarm <= now):
            self._alarm = now + due
            self._clock.after(due, self._ring)

    def _ring(self) -> None:
        if self.alive:
            self._alarm = None
            self.distribute()
            self.go_on()

    # Tools, rewards and steps.

    def _answered(self, call: Call) -> None:
        if self.alive:
            told = answered(call.completion, call.completion.tokens_T[-1:])
            self.coordinator.answered(call, Turn(told, more=1), self._clock.now)
            self.distribute()
            self.go_on()

    def go_on(self) -> None:
        while (call := self.coordinator.call()) is not None:
            self._clock.after(self._spec.tool_s, partial(self._answered, call))
        if not self._scoring and (group := self.coordinator.unscored()) is not None:
            self._scoring = True
            self._clock.after(self._spec.score_s, lambda: self._scored(group))
        if self._pinned is not None:
            self._finish_evaluation()
        if self._busy or self._pinned is not None or self.step >= self._spec.steps:
            return
        reason = self.coordinator.trainer_waits_for()
        groups = self.coordinator.take(self._clock.now)
        if groups is None:
            return
        self._waits[reason] = self._waits.get(reason, 0.0) + self._clock.now - self._wait_since
        self._train(groups)

    def _scored(self, group) -> None:
        if not self.alive:
            return
        self._scoring = False
        episodes = []
        for completion in group.completions:
            value = self._spec.reward(group.group_id, _sibling(completion))
            episodes.append(Episode(completion, ~completion.forced_T, Reward(value, {"correct": float(value > 0)})))
        self.coordinator.scored(EpisodeGroup(group.group_id, group.task, tuple(episodes)))
        self.go_on()

    def _train(self, groups: list[EpisodeGroup]) -> None:
        self._busy = True
        ages = self.coordinator.ages_s
        lag = self._check_batch(groups)
        chosen = select(groups, self._spec.selection)
        if self._spec.shape is not None:
            pack(chosen.documents, self._spec.shape)
        tokens = sum(len(document.completion_C) for document in chosen.documents)
        cost_s = self._spec.train_s(tokens, len(chosen.documents))
        for host in self._sim.hosts:
            host.look()

        def trained() -> None:
            if self.alive:
                self._trained(groups, chosen, lag, ages, cost_s)

        self._clock.after(cost_s, trained)

    def _trained(self, groups, chosen, lag, ages, cost_s: float) -> None:
        sim, books = self._sim, self._sim.books
        self.step += 1
        content = sim.new_content()
        sim._content_of[self.step] = content
        self.issuer.settle(chosen.trained, chosen.dropped, groups)
        for group in groups:
            if group.group_id in sim._trained_at:
                raise BrokenRuleError(f"group {group.group_id} went through two steps")
            sim._trained_at[group.group_id] = self.step - 1
        self.check_books()
        sampled = sum(len(e.completion.tokens_T) for g in groups for e in g.episodes)
        books.steps += 1
        books.trained += len(groups)
        books.tokens += sampled
        books.trainer_busy_s += cost_s
        books.lag_max = max(books.lag_max, lag["lag_max"])
        books.lag_sum += lag["lag_mean"] * sampled
        books.lag_tokens += sampled
        waits = self.coordinator.take_waits(self._clock.now)
        sim.records.append(
            {
                "step": self.step,
                "at_s": self._clock.now,
                "tokens": sampled,
                "train_s": cost_s,
                **lag,
                "trainer_waits_s": self._waits,
                "sampler_waits_s": waits.empty_s,
                "sampler_idle": waits.idle_share,
                "age_by_length_s": age_by_length(groups, ages),
            }
        )
        self._waits, self._wait_since = {}, self._clock.now
        if self.coordinator.publishes(self.step):
            self.coordinator.published(self.step)
            self.board.publish(PolicyWeights(self.step, content))
            for host in sim.hosts:
                host.push()
        self._busy = False
        for host in sim.hosts:
            host.look()
        every = self._spec.evaluate_every
        if every and self.step % every == 0 and self.coordinator.publishes(self.step):
            tasks = [
                PromptTask(f"e{i}", np.ones(1, np.int32), "", "", "s", "exact")
                for i in range(self._spec.evaluate_prompts)
            ]
            self._pinned = self.coordinator.pin(self.step, tasks, self._spec.group_size)
        elif self.step % self._spec.checkpoint_every == 0:
            self._save(content)
        self.distribute()
        self.go_on()

    def _finish_evaluation(self) -> None:
        assert self._pinned is not None
        completions = self.coordinator.take_pinned(self._pinned)
        if completions is None:
            return
        if any((c.versions_T != self.step).any() for group in completions for c in group):
            raise BrokenRuleError(f"an evaluation of version {self.step} has tokens of another one")
        self._check_contents([c for group in completions for c in group])
        for stream, group in enumerate(completions):
            self._check_turns(stream, group)
        self._pinned = None
        if self.step % self._spec.checkpoint_every == 0:
            self._save(self._sim._content_of[self.step])
        self.distribute()
        self.go_on()

    # Rules.

    def _check_batch(self, groups: Sequence[EpisodeGroup]) -> dict[str, Any]:
        spec = self._spec
        lag = measure_lag(groups, version=self.step, bound=self.coordinator.rule.bound)
        if len(groups) != spec.prompts_per_step:
            raise BrokenRuleError(f"a step got {len(groups)} groups of {spec.prompts_per_step}")
        if self.coordinator.rule.mode != "pipeline":
            versions = {v for g in groups for e in g.episodes for v in e.completion.versions_T.tolist()}
            if len(versions) > 1:
                raise BrokenRuleError(f"a batch of mode {self.coordinator.rule.mode} has tokens of {versions}")
        for group in groups:
            marks = [_sibling(episode.completion) for episode in group.episodes]
            if len(set(marks)) != len(marks) or len(marks) > spec.group_size:
                raise BrokenRuleError(f"group {group.group_id} came with the siblings {marks}")
            self._check_turns(group.group_id, [episode.completion for episode in group.episodes])
        self._check_contents([e.completion for g in groups for e in g.episodes])
        return lag

    def _check_turns(self, stream: int, completions: Sequence[Completion]) -> None:
        for completion in completions:
            length, turns = (f(stream, _sibling(completion)) for f in (self._spec.length, self._spec.turns))
            wanted = ([False] * length + [True]) * turns
            if completion.forced_T.tolist() != wanted[:-1] or len(completion.turns) != turns - 1:
                raise BrokenRuleError(
                    f"a completion of {turns} turns of {length} tokens came with {len(completion.turns)} answers, at "
                    f"{np.flatnonzero(completion.forced_T).tolist()} of {len(completion.tokens_T)} tokens"
                )

    def _check_contents(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            versions = completion.versions_T
            if (versions[1:] < versions[:-1]).any():
                raise BrokenRuleError(f"a completion was sampled by versions {versions.tolist()}, which go back")
            for version, content in zip(versions.tolist(), completion.tokens_T.tolist(), strict=True):
                if self._sim._content_of[version] != content:
                    raise BrokenRuleError(
                        f"a token of version {version} was sampled by other weights than that version"
                    )

    def check_books(self) -> None:
        counts = self.issuer.counts()
        settled = counts["prompts_trained"] + sum(counts["prompts_dropped"].values())
        if counts["prompts_issued"] != settled + counts["prompts_in_flight"]:
            raise BrokenRuleError(f"the ledger does not balance: {counts}")
        if counts["prompts_in_flight"] != (out := self.coordinator.outstanding + self.issuer.waiting):
            raise BrokenRuleError(f"the ledger has {counts['prompts_in_flight']} groups in flight, samplers {out}")


class _Host:
    """A machine that samples for whichever trainer lives: its process, and the trainer's connection to it."""

    def __init__(self, simulation: Simulation, number: int, spec: SamplerSpec):
        self._sim, self._number, self._spec, self._clock = simulation, number, spec, simulation.clock
        self._lives = 0
        self._session = 0  # counts attachments: a message of an earlier one is never delivered
        self._pushing = self._down = False
        self._place = f"place {number}"
        self._avoid: str | None = None
        self._again_at = 0.0
        self._holds = -1
        self._stopped_until = 0.0
        self.name = ""
        self._decoder: Decoder | None = None
        self._arrived: Weights | None = None
        self._finishes: dict[Any, FinishReason] = {}
        self._on_their_way = 0

    @property
    def _trainer(self) -> _Trainer:
        return self._sim.trainer

    def start(self) -> None:
        """A new process, without weights."""
        self._decoder = None
        self.attach()

    def attach(self) -> None:
        """The trainer of now meets the process of now: it gets the newest weights, then joins."""
        self._session += 1
        self._lives += 1
        self.name = f"s{self._number}.{self._lives}"
        if self._decoder is not None:
            self._decoder.kill()
            self._decoder = None
        self._pushing = self._down = False
        self._holds, self._avoid, self._again_at = -1, None, 0.0
        self.push()

    def crash(self, notice_s: float, restart_s: float) -> None:
        """The process is killed; the trainer notices after `notice_s`, and another one starts after `restart_s`."""
        if self._decoder is not None:
            self._decoder.kill()
        name, session = self.name, self._session
        self._session += 1  # connections are gone
        self._down = True
        self._trainer.fan_out.gone(self._place)

        def notice() -> None:
            self._trainer.heard(lambda coordinator, now: coordinator.leave(name, "its connection broke", now))

        def restart() -> None:
            if self._session == session + 1:
                self.start()

        self._clock.after(notice_s, notice)
        self._clock.after(max(restart_s, notice_s), restart)

    def stop(self, seconds: float) -> None:
        """SIGSTOP and, so much later, SIGCONT."""
        if self._decoder is not None and self._clock.now >= self._stopped_until:
            self._stopped_until = self._clock.now + seconds
            self._decoder.hold(seconds)

    @property
    def busy(self) -> bool:
        return self._decoder is not None and self._decoder.busy

    def look(self) -> None:
        if self._decoder is not None and self._spec_is_local:
            self._decoder.look()

    @property
    def _spec_is_local(self) -> bool:
        return self._sim.spec.local

    def _to_host(self, kind: str, receive: Callable[[], None]) -> None:
        session = self._session
        send(self._clock, self._sim.network, kind, lambda: receive() if session == self._session else None)

    def _to_trainer(self, kind: str, say: Callable[[Coordinator, float], object]) -> None:
        trainer, session = self._trainer, self._session
        send(
            self._clock,
            self._sim.network,
            kind,
            lambda: trainer.heard(say) if session == self._session or kind == "reply" else None,
        )

    # Weights.

    def push(self) -> None:
        """Fetch the newest weights from whoever has them and a place free, unless a transfer is under way."""
        trainer = self._trainer
        able = trainer.alive and not self._pushing and not self._down
        newest = trainer.board.newer_than(self._holds) if able else None
        if newest is None or self._clock.now < self._again_at:
            return
        source = trainer.fan_out.begin(newest.version, self._place, () if self._avoid is None else (self._avoid,))
        if source is None:
            return  # whoever is through next calls again
        self._pushing, session = True, self._session
        sources = {host._place: host for host in self._sim.hosts}
        source_session = sources[source]._session if source in sources else None
        weights = Weights(newest.version, newest.params)
        seconds, whole = self._sim.network.push()

        def arrived() -> None:
            trainer.fan_out.end(source)
            source_lives = source not in sources or sources[source]._session == source_session
            if session == self._session and trainer is self._trainer and trainer.alive:
                if whole and source_lives:
                    self._avoid, self._arrived = None, weights
                    self._commit()
                else:  # its digest is wrong: nothing of it is used
                    self._pushing, self._avoid = False, source if source in sources else None
                    self._again_at = self._clock.now + self._sim.spec.retry_s
                    self._clock.after(self._sim.spec.retry_s, lambda: self.push() if session == self._session else None)
            if trainer.alive:
                for host in self._sim.hosts:
                    host.push()

        self._clock.after(seconds, arrived)

    def _commit(self) -> None:
        """Swap what has arrived in, as soon as no evaluation needs the old version."""
        if self._decoder is None:
            self._start_decoding()
            return
        if not self._trainer.alive:
            return
        session = self._session
        if not self._trainer.coordinator.may_swap(self.name):
            self._clock.after(self._sim.spec.retry_s, lambda: self._commit() if session == self._session else None)
            return
        assert self._arrived is not None
        self._decoder.swap(self._arrived)

    def _start_decoding(self) -> None:
        weights, spec = self._arrived, self._spec
        assert weights is not None
        self._decoder = Decoder(
            self._clock,
            slots=spec.slots,
            chunk=spec.chunk,
            step_s=spec.step_s,
            prefill_s=spec.prefill_s,
            weights=weights,
            finished=self._finished,
            swapped=self._swapped,
            boundary=self._at_boundary,
        )
        name = self.name
        self._holds, self._pushing = weights.version, False
        self._trainer.fan_out.ready(self._place, weights.version)
        self._trainer.heard(lambda coordinator, now: coordinator.join(name, weights.version, spec.slots, now))
        self._trainer.distribute()
        self._beat()
        self.push()

    def _swapped(self, weights: Weights) -> None:
        """Say so, until a newer swap says more: the message may be lost."""
        name, session = self.name, self._session
        self._holds, self._pushing = weights.version, False
        self._trainer.fan_out.ready(self._place, weights.version)

        def say() -> None:
            if session == self._session and self._holds == weights.version:
                self._to_trainer("holds", lambda coordinator, _: coordinator.holds(name, weights.version))
                if self._trainer.coordinator.samplers.get(name, weights.version) < weights.version:
                    self._clock.after(self._sim.spec.retry_s, say)

        say()
        self.push()

    # Work.

    def assign(self, assignment: Assignment) -> None:
        decoder, name = self._decoder, self.name

        def refuse(coordinator: Coordinator, now: float) -> None:
            coordinator.failed(name, assignment.group_id, assignment.attempt, "it refused", now)

        def receive() -> None:
            if decoder is None or decoder is not self._decoder:
                return
            if self._sim.network.refuses():
                self._to_trainer("heard", refuse)
            else:
                for sibling in assignment.siblings:
                    key = (assignment.group_id, assignment.attempt, sibling)
                    had = 0 if assignment.turn is None else len(assignment.turn.completion.turns)
                    last = had + 1 == self._sim.spec.turns(assignment.stream, sibling)
                    self._finishes[key] = "stop" if last else "stop_string"
                    decoder.submit(key, self._sim.spec.length(assignment.stream, sibling))

        if self._spec_is_local:
            receive()
        else:
            self._to_host("assign", receive)

    def cancel(self, cancel: Cancel) -> None:
        decoder = self._decoder

        def receive() -> None:
            if decoder is not None and decoder is self._decoder:
                for sibling in cancel.siblings:
                    decoder.cancel((cancel.group_id, cancel.attempt, sibling))

        self._to_host("cancel", receive)

    def _beat(self) -> None:
        """A process that is not stopped says that it is alive, as long as its connection lasts."""
        name, session, every = self.name, self._session, self._sim.spec.heartbeat_s

        def beat() -> None:
            if session != self._session or not self._trainer.alive or not every:
                return
            if self._clock.now >= self._stopped_until:
                self._to_trainer("heard", lambda coordinator, now: coordinator.heard(name, now))
            self._clock.after(every, beat)

        self._clock.after(every, beat)

    def _finished(self, key: Any, length: int, spans: list[tuple[int, Weights]]) -> None:
        group_id, attempt, sibling = key
        versions, contents = np.empty(length, np.int32), np.empty(length, np.int32)
        for (first, weights), last in zip(spans, [first for first, _ in spans[1:]] + [length], strict=True):
            versions[first:last], contents[first:last] = weights.version, weights.content
        # What the tokens are says which weights made them, and the log-probabilities say whose they are.
        made = contents, np.full(length, -1.0 - sibling), versions, np.zeros(length, bool)
        completion = Completion(*made, self._finishes[key])
        name = self.name
        self._on_their_way += 1

        def say(coordinator: Coordinator, now: float) -> None:
            coordinator.completed(name, group_id, attempt, sibling, completion, now)

        self._to_trainer("reply", say)

    def _at_boundary(self) -> None:
        """In the trainer's own process: work is handed out here, before what has finished is handed in."""
        if self._spec_is_local and self._trainer.alive:
            self._trainer.coordinator.ended(self.name, self._on_their_way)
            self._trainer.distribute()
        self._on_their_way = 0
