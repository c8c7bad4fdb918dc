"""Who samples which group, what has come back, and what the trainer gets next: a pure state machine.

No thread, clock or I/O: callers pass `now` (seconds of any clock that never goes back) and carry the answers out.
The in-process worker, the clients of remote samplers and the simulator all drive this one class.

    join, holds -> admit -> (sampler) -> completed | failed | leave -> unscored -> (rewards) -> scored -> take
                     ^--------- back-off, another attempt ----'            overdue -> straggler's fate
                     ^-- another turn -- answered <- (tool) <- call <- completed, in a run with tools

A group has an id for life (the ledger's) and attempts; attempts are numbered, and what arrives for another attempt than
the one that a sibling waits for is counted and ignored. A sibling that called a tool is nobody's to sample until it has
been answered; then it is missing like one whose attempt failed, with what it has so far. A sampler has a name for life:
one that restarts joins under a new name, so that a message of its past life can never speak for it.
"""

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jaxrl_llm.envs.turns import extended
from jaxrl_llm.rollout.lag import LagRule
from jaxrl_llm.types import Completion, EpisodeGroup, PromptTask, RunFailedError, Turn

Order = Literal["issue", "finished"]
"""Which groups the trainer gets: in the order they were issued, or the first finished first."""

Straggler = Literal["drop", "train", "reissue"]
"""What becomes of a group whose samplers take too long: nothing of it trains, its finished siblings do, or the missing
siblings are asked of another sampler."""

Priority = Literal["evaluation", "training"]
"""Whose groups get free slots first; the others get what is left."""


class Issuer(Protocol):
    """Where groups come from and where their fate is written down; rollout.issue.GroupIssuer is one."""

    def take(self) -> tuple[int, PromptTask] | None: ...

    def drop(self, group_id: int, reason: str) -> None: ...


@dataclass(frozen=True)
class Assignment:
    """Siblings of one group that `sampler` shall sample now.

    `attempt` must come back with every answer. Token n of a sibling has the key fold(seed, stream, sibling, n).
    `pinned` is None for training; an evaluation's groups name the one version that all their tokens must have.
    `turn` is what the one sibling has already and how many tokens may follow; None where siblings begin.
    """

    sampler: str
    group_id: int
    attempt: int
    task: PromptTask
    siblings: tuple[int, ...]
    stream: int
    pinned: int | None = None
    turn: Turn | None = None


@dataclass(frozen=True)
class Cancel:
    """Siblings that `sampler` need not finish; whatever it still answers about this attempt is ignored."""

    sampler: str
    group_id: int
    attempt: int
    siblings: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A sibling that waits for a tool: its completion so far ends with the call."""

    group_id: int
    sibling: int
    task: PromptTask
    completion: Completion


@dataclass(frozen=True)
class Unscored:
    """A group that waits for its rewards: the completions there are, in the order of their siblings."""

    group_id: int
    task: PromptTask
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class Event:
    """Something worth a line in the log, in plain words, once."""

    at: float
    kind: Literal["joined", "left", "retried", "dropped", "straggler", "silent", "heard"]
    words: str
    sampler: str | None = None
    group_id: int | None = None


@dataclass(frozen=True)
class Waits:
    """Seconds since the last report, added over all samplers.

    `samplers`: how many there were, averaged over time. `empty_s`: how long they had nothing to do at all, by reason:
    "trainer" (the lag bound), "stock" (enough finished groups wait), "weights" (it could start with newer ones, which
    it does not hold yet), "prompts" (none left), "back_off", "silent" (it has not answered in time), "start",
    "tools" (siblings wait for them).
    `idle_share`: share of slot seconds without a sequence.
    """

    samplers: float
    empty_s: dict[str, float]
    idle_share: float


@dataclass
class _Sampler:
    name: str
    version: int
    slots: int
    in_flight: int = 0
    ended: int = 0  # of those in flight, as many as are on their way back
    silent: bool = False
    reason: str = "start"  # why it gets nothing more, as of the last admit

    @property
    def occupied(self) -> int:
        return self.in_flight - self.ended


@dataclass
class _Run:
    """One attempt: where its siblings are being sampled."""

    sampler: str
    siblings: set[int]
    since: float
    version: int


@dataclass
class _Group:
    group_id: int
    task: PromptTask
    stream: int
    size: int
    deadline: int
    issued_at: float
    pinned: int | None = None
    missing: list[int] = field(default_factory=list)  # siblings that nobody samples now, and somebody should
    turns: dict[int, Turn] = field(default_factory=dict)  # of siblings that have some turns and are not done
    calls: dict[int, Call] = field(default_factory=dict)  # of siblings that wait for a tool
    runs: dict[int, _Run] = field(default_factory=dict)  # attempt -> run
    done: dict[int, Completion] = field(default_factory=dict)
    attempts: int = 0
    failures: int = 0
    not_before: float = 0.0
    avoid: str | None = None
    stage: Literal["sampling", "unscored", "scoring", "ready"] = "sampling"
    scored: EpisodeGroup | None = None
    failed: str | None = None


class Coordinator:
    """The books of all groups between the prompt stream and the trainer, and of all samplers.

    `step` is the version that the next batch is trained at, which is also the newest that exists. `max_ready` groups,
    at least a step's, may be finished and not taken before no new one is admitted (None: any number). A group whose
    attempts fail more than `retries` times is dropped; the n-th failure is followed by a pause of
    `back_off_s` 2^(n-1), at most `longest_back_off_s`. `straggler_timeout_s` after an attempt began its group becomes
    what `straggler` says (None: never). A group that would train with fewer than `smallest_group` siblings is dropped.
    A scored group that `refuse` takes, books and all, never trains; the next one takes its place. With `tools`, a
    completion that ends with a stop string has called one.
    """

    def __init__(
        self,
        issuer: Issuer,
        rule: LagRule,
        *,
        prompts_per_step: int,
        group_size: int,
        step: int = 0,
        order: Order = "issue",
        max_ready: int | None = None,
        straggler: Straggler = "reissue",
        straggler_timeout_s: float | None = None,
        smallest_group: int = 2,
        retries: int = 8,
        back_off_s: float = 0.5,
        longest_back_off_s: float = 30.0,
        priority: Priority = "evaluation",
        refuse: Callable[[EpisodeGroup], bool] = lambda group: False,
        tools: bool = False,
    ):
        if max_ready is not None and max_ready < prompts_per_step:
            raise ValueError(f"max_ready {max_ready} is below a step's {prompts_per_step} groups: nothing would train")
        self._issuer, self._rule, self._order, self._priority = issuer, rule, order, priority
        self._refuse, self._tools = refuse, tools
        self._per_step, self._group_size, self._max_ready = prompts_per_step, group_size, max_ready
        self._straggler, self._smallest = straggler, smallest_group
        self._timeout = math.inf if straggler_timeout_s is None else straggler_timeout_s
        self._retries, self._back_off, self._longest = retries, back_off_s, longest_back_off_s
        self._step = self._published = step
        self._samplers: dict[str, _Sampler] = {}
        self._names: set[str] = set()
        self._groups: dict[int, _Group] = {}  # training's, in issue order, until they are taken or dropped
        self._pinned: dict[int, _Group] = {}  # evaluation's, until they are taken
        self._next_pinned = -1
        self._waiting: dict[int, _Group] = {}  # of both, those with siblings that nobody samples
        self._unscored: deque[_Group] = deque()
        self._calls: deque[Call] = deque()
        self._stock = 0  # of training's groups, those sampled
        self._finished: list[int] = []  # ready groups, in the order they became so
        self._ages_s: dict[int, float] = {}
        self._exhausted = False
        self._now = 0.0
        self._started = False
        self._elapsed_s = self._present_s = self._slot_s = self._idle_slot_s = 0.0
        self._empty_s: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._cancels: list[Cancel] = []
        self._events: list[Event] = []

    # Samplers.

    def join(self, sampler: str, version: int, slots: int, now: float) -> None:
        """`sampler` is there, holds `version` and decodes `slots` sequences at once.

        Raises ValueError for a name that has been used before and for a version that does not exist yet.
        """
        self._advance(now)
        if sampler in self._names:
            raise ValueError(f"sampler {sampler} has joined before; one that restarts joins under a new name")
        self._check_exists(sampler, version)
        self._names.add(sampler)
        self._samplers[sampler] = _Sampler(sampler, version, slots)
        self._event("joined", f"sampler {sampler} joined with version {version} and {slots} slots", sampler)

    def leave(self, sampler: str, reason: str, now: float) -> None:
        """`sampler` is gone; what it was sampling is tried again elsewhere. Unknown names are ignored."""
        self._advance(now)
        if self._samplers.pop(sampler, None) is None:
            return
        self._event("left", f"sampler {sampler} left: {reason}", sampler)
        for group in self._all_groups():
            for attempt in [a for a, run in group.runs.items() if run.sampler == sampler]:
                if attempt in group.runs:  # the group may have been dropped meanwhile
                    self._fail(group, attempt, reason)

    def heard(self, sampler: str, now: float) -> None:
        """`sampler` answered something: if it was taken for stopped, it gets work again."""
        self._advance(now)
        self._heard(sampler)

    def holds(self, sampler: str, version: int) -> None:
        """`sampler` decodes with `version` from now on. An older report that comes late is ignored.

        Raises ValueError for a version that does not exist yet.
        """
        self._check_exists(sampler, version)
        if sampler in self._samplers:
            self._heard(sampler)
            known = self._samplers[sampler]
            known.version = max(known.version, version)

    def ended(self, sampler: str, count: int) -> None:
        """`count` completions of `sampler` are on their way here: its slots are free already."""
        if sampler in self._samplers:
            self._samplers[sampler].ended = count

    def published(self, version: int) -> None:
        """Samplers may get `version` now. Raises ValueError unless versions go up."""
        if version <= self._published:
            raise ValueError(f"version {version} published after version {self._published}")
        self._published = version

    def publishes(self, version: int) -> bool:
        """Whether samplers get `version` at all."""
        return self._rule.publishes(version)

    def may_swap(self, sampler: str) -> bool:
        """False while `sampler` works on an evaluation of the version it holds: it must finish that first, and so must
        those siblings that wait for a tool now, whoever samples their next turn."""
        known = self._samplers.get(sampler)
        return not any(
            (known is not None and group.pinned == known.version and bool(group.calls or group.turns))
            or any(run.sampler == sampler for run in group.runs.values())
            for group in self._pinned.values()
        )

    @property
    def samplers(self) -> dict[str, int]:
        """name -> version that it holds."""
        return {name: sampler.version for name, sampler in self._samplers.items()}

    # Work for samplers.

    def admit(self, now: float) -> list[Assignment]:
        """What samplers shall start on now: groups that failed before first, then new ones as far as the lag rule,
        the stock and free slots allow. Every assignment is given out once."""
        self._advance(now)
        new = [self._admit_pinned, self._admit_new] if self._priority == "evaluation" else [
            self._admit_new, self._admit_pinned
        ]  # fmt: skip
        assignments = self._admit_again(pinned=False)
        for admit in new:
            assignments += admit()
        self._note_reasons()
        return assignments

    def completed(
        self, sampler: str, group_id: int, attempt: int, sibling: int, completion: Completion, now: float
    ) -> bool:
        """A sibling is there. False if nobody waits for it: a duplicate, a reply that comes late, or one sampled by
        weights it must not be sampled by (then the attempt has failed)."""
        self._advance(now)
        self._heard(sampler)
        group = self._find(group_id)
        run = group.runs.get(attempt) if group is not None else None
        if group is None or run is None or run.sampler != sampler or sibling not in run.siblings:
            duplicate = group is not None and sibling in group.done
            self._counts["duplicates" if duplicate else "late"] += 1
            return False
        if wrong := self._wrong_versions(group, run, completion):
            self._counts["wrong_versions"] += 1
            self._fail(group, attempt, wrong)
            return False
        run.siblings.remove(sibling)
        known = self._samplers[sampler]
        known.in_flight, known.ended = known.in_flight - 1, max(0, known.ended - 1)
        if not run.siblings:
            del group.runs[attempt]
        if sibling in group.turns:
            completion = extended(group.turns[sibling].completion, completion)
        if self._calls_tool(completion):
            call = group.calls[sibling] = Call(group_id, sibling, group.task, completion)
            self._calls.append(call)
        else:
            self._end(group, sibling, completion)
        return True

    def failed(self, sampler: str, group_id: int, attempt: int, reason: str, now: float) -> None:
        """What is missing of an attempt will not come. It is tried again after a pause, or the group is dropped."""
        self._advance(now)
        self._heard(sampler)
        group = self._find(group_id)
        if group is None or attempt not in group.runs or group.runs[attempt].sampler != sampler:
            self._counts["late"] += 1
            return
        self._fail(group, attempt, reason)

    def overdue(self, now: float) -> list[Cancel]:
        """Give every group that takes too long its declared fate. What samplers may stop working on, also because of
        groups dropped since the last call."""
        self._advance(now)
        for group in self._all_groups() if self._timeout < math.inf else ():
            late = {a: run for a, run in group.runs.items() if now >= run.since + self._timeout}
            if late:
                self._straggle(group, late)
        cancels, self._cancels = self._cancels, []
        return cancels

    def next_event(self, now: float) -> float | None:
        """Seconds until `admit` or `overdue` may have something to do although nobody reported anything."""
        if self._cancels:
            return 0.0
        due = [g.not_before for g in self._waiting.values() if g.not_before > now]
        if self._timeout < math.inf:
            due += [run.since + self._timeout for g in self._all_groups() for run in g.runs.values()]
        return max(0.0, min(due) - now) if due else None

    # Tools, rewards and the trainer.

    def call(self) -> Call | None:
        """The next call of a tool to answer, given out once; None if none waits."""
        while self._calls:
            call = self._calls.popleft()
            if self._waits_for(call) is not None:
                return call
        return None

    def answered(self, call: Call, turn: Turn, now: float) -> bool:
        """What became of a call. False if nobody waits for it any more: its group was dropped, or has gone on without
        this sibling."""
        self._advance(now)
        group = self._waits_for(call)
        if group is None:
            self._counts["late"] += 1
            return False
        if turn.more:
            del group.calls[call.sibling]
            group.turns[call.sibling] = turn
            group.missing = sorted([*group.missing, call.sibling])
            self._waiting[group.group_id] = group
        else:
            self._end(group, call.sibling, turn.completion)
        return True

    def unscored(self) -> Unscored | None:
        """The next group to work out rewards for, given out once; None if none waits."""
        if not self._unscored:
            return None
        group = self._unscored.popleft()
        group.stage = "scoring"
        return Unscored(group.group_id, group.task, tuple(group.done[s] for s in sorted(group.done)))

    def scored(self, group: EpisodeGroup) -> bool:
        """The rewards of a group that `unscored` gave out. False if it was refused: there is room for another."""
        known = self._groups[group.group_id]
        if known.stage != "scoring":
            raise RuntimeError(f"group {group.group_id} was scored while it was {known.stage}")
        if self._refuse(group):
            del self._groups[group.group_id]
            self._stock -= 1
            return False
        known.stage, known.scored = "ready", group
        self._finished.append(group.group_id)
        return True

    def take(self, now: float) -> list[EpisodeGroup] | None:
        """The next step's groups, or None as long as they are not there; fewer only when no prompt is left.

        Whoever takes them trains them at the version `step`, which goes up by one.
        """
        self._advance(now)
        chosen = self._next_batch()
        if chosen is None:
            return None
        groups = []
        self._ages_s = {}
        for group_id in chosen:
            self._finished.remove(group_id)
            group = self._groups.pop(group_id)
            self._stock -= 1
            assert group.scored is not None
            groups.append(group.scored)
            self._ages_s[group_id] = self._now - group.issued_at
        self._step += 1
        return groups

    def trainer_waits_for(self) -> str:
        """Whom a trainer that gets None from `take` waits for: "samplers" (none is there), "retry", "sampling", "tools"
        or "rewards"."""
        open_groups = [g for g in self._wanted() if g.stage != "ready"] or list(self._groups.values())
        if any(g.stage in ("unscored", "scoring") for g in open_groups) and not any(
            g.stage == "sampling" for g in open_groups
        ):
            return "rewards"
        if not self._samplers:
            return "samplers"
        if any(sibling not in g.turns for g in open_groups for sibling in g.missing):
            return "retry"
        waits = any(g.calls for g in open_groups) and not any(g.runs or g.missing for g in open_groups)
        return "tools" if waits else "sampling"

    @property
    def step(self) -> int:
        """The version that the next batch is trained at."""
        return self._step

    @property
    def rule(self) -> LagRule:
        return self._rule

    # Evaluation on the samplers of training.

    def pin(self, version: int, tasks: Sequence[PromptTask], siblings: int, *, first_stream: int = 0) -> list[int]:
        """Ask for `siblings` completions of every task, all tokens by `version`; ids for `take_pinned`.

        Task i has the random stream `first_stream` + i. Only samplers that hold exactly this version get them, and
        keep it until they are through (`may_swap`). Raises ValueError for a version that was never published.
        """
        if version > self._published:
            raise ValueError(f"version {version} cannot be evaluated: the newest published is {self._published}")
        ids = []
        for index, task in enumerate(tasks):
            group_id, self._next_pinned = self._next_pinned, self._next_pinned - 1
            group = _Group(group_id, task, first_stream + index, siblings, version, self._now, pinned=version)
            group.missing = list(range(siblings))
            self._pinned[group_id] = self._waiting[group_id] = group
            ids.append(group_id)
        return ids

    def take_pinned(self, ids: Sequence[int]) -> list[list[Completion]] | None:
        """The completions of these pinned groups, in their order, once all are there; None before.

        Raises RunFailedError if one of them failed too often.
        """
        groups = [self._pinned[group_id] for group_id in ids]
        if broken := [group for group in groups if group.failed is not None]:
            for group_id in ids:
                self._waiting.pop(group_id, None)
                del self._pinned[group_id]
            raise RunFailedError(f"evaluation of version {broken[0].pinned} gave up: {broken[0].failed}")
        if any(len(group.done) < group.size for group in groups):
            return None
        for group_id in ids:
            del self._pinned[group_id]
        return [[group.done[s] for s in range(group.size)] for group in groups]

    # Books.

    @property
    def outstanding(self) -> int:
        """Groups issued and neither taken nor dropped."""
        return len(self._groups)

    @property
    def exhausted_prompts(self) -> bool:
        """No prompt is left to issue."""
        return self._exhausted

    @property
    def ages_s(self) -> dict[int, float]:
        """group id -> seconds from its issue to the last `take`, for the groups that it returned."""
        return dict(self._ages_s)

    @property
    def counts(self) -> dict[str, int]:
        """Totals: duplicates, late, wrong_versions, retries, stragglers."""
        names = ("duplicates", "late", "wrong_versions", "retries", "stragglers")
        return {name: self._counts[name] for name in names}

    def take_waits(self, now: float) -> Waits:
        """How samplers have waited since the last call."""
        self._advance(now)
        waits = Waits(
            samplers=self._present_s / self._elapsed_s if self._elapsed_s else 0.0,
            empty_s=dict(self._empty_s),
            idle_share=self._idle_slot_s / self._slot_s if self._slot_s else 0.0,
        )
        self._elapsed_s = self._present_s = self._slot_s = self._idle_slot_s = 0.0
        self._empty_s = defaultdict(float)
        return waits

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    # Inside.

    def _all_groups(self) -> list[_Group]:
        return [*self._groups.values(), *self._pinned.values()]

    def _find(self, group_id: int) -> _Group | None:
        return self._groups.get(group_id) or self._pinned.get(group_id)

    def _check_exists(self, sampler: str, version: int) -> None:
        if version > self._published:
            raise ValueError(
                f"sampler {sampler} says it holds version {version}; the newest published is {self._published}"
            )

    def _event(self, kind, words: str, sampler: str | None = None, group_id: int | None = None) -> None:
        self._events.append(Event(self._now, kind, words, sampler, group_id))

    def _advance(self, now: float) -> None:
        """Book the time since the last call to what samplers did in it."""
        passed = max(0.0, now - self._now) if self._started else 0.0
        self._now, self._started = max(self._now, now), True
        self._elapsed_s += passed
        for sampler in self._samplers.values():
            self._present_s += passed
            self._slot_s += passed * sampler.slots
            self._idle_slot_s += passed * max(0, sampler.slots - sampler.occupied)
            if passed and not sampler.occupied:
                self._empty_s[sampler.reason] += passed

    def _heard(self, sampler: str) -> None:
        known = self._samplers.get(sampler)
        if known is not None and known.silent:
            known.silent = False
            self._event("heard", f"sampler {sampler} answers again", sampler)

    # Admission.

    def _stocked(self) -> bool:
        """Whether enough groups wait for nobody but the trainer (or their rewards)."""
        if self._max_ready is None or self._stock < self._max_ready:
            return False
        # In issue order those behind a group that is still sampled wait for that one.
        head = itertools.islice(self._groups.values(), self._max_ready)
        return self._order == "finished" or all(group.stage != "sampling" for group in head)

    def _new_may_start(self, version: int) -> bool:
        """Whether one more group that starts under `version` would be trained in time, whatever happens."""
        deadline = self._rule.deadline(version)
        if self._order == "issue":
            return self._step + len(self._groups) // self._per_step <= deadline
        # Groups may overtake each other: for every version, those due by then must fit into the steps until then.
        due = Counter(group.deadline for group in self._groups.values())
        due[deadline] += 1
        total = 0
        for version_due in sorted(due):
            total += due[version_due]
            if version_due >= deadline and total > self._per_step * (version_due - self._step + 1):
                return False
        return True

    def _trained_by(self, group: _Group) -> int:
        """The newest version at which `group` may come to be trained."""
        if self._order == "finished":
            return group.deadline
        return self._step + list(self._groups).index(group.group_id) // self._per_step

    def _free(self, allowed: Callable[[_Sampler], bool]) -> _Sampler | None:
        """The emptiest sampler of those with a free slot that are `allowed`."""
        able = [s for s in self._samplers.values() if s.occupied < s.slots and not s.silent and allowed(s)]
        return min(able, key=lambda s: s.occupied / s.slots, default=None)

    def _admit_again(self, *, pinned: bool) -> list[Assignment]:
        assignments = []
        for group in list(self._waiting.values()):
            if (group.pinned is not None) == pinned and group.not_before <= self._now:
                if group.pinned is not None:
                    able = [s for s in self._samplers.values() if s.version == group.pinned]
                else:
                    needed = self._trained_by(group)
                    able = [s for s in self._samplers.values() if self._rule.deadline(s.version) >= needed]
                for siblings in self._alike(group):
                    # No token of an episode comes from weights older than those before it.
                    turn = group.turns.get(siblings[0])
                    newest = 0 if turn is None else int(turn.completion.versions_T[-1])
                    young = [s for s in able if s.version >= newest]
                    others = [s for s in young if s.name != group.avoid] or young
                    sampler = self._free(lambda s, others=others: s in others)
                    if sampler is not None:
                        assignments.append(self._assign(group, sampler, siblings))
        return assignments

    def _alike(self, group: _Group) -> list[list[int]]:
        """The missing siblings by what a sampler is given: those that begin together, each other one alone."""
        begin = [sibling for sibling in group.missing if sibling not in group.turns]
        return ([begin] if begin else []) + [[sibling] for sibling in group.missing if sibling in group.turns]

    def _admit_pinned(self) -> list[Assignment]:
        return self._admit_again(pinned=True)

    def _admit_new(self) -> list[Assignment]:
        assignments = []
        while not self._exhausted and not self._stocked():
            sampler = self._free(lambda s: self._new_may_start(s.version))
            if sampler is None:
                break
            issued = self._issuer.take()
            if issued is None:
                self._exhausted = True
                break
            group_id, task = issued
            group = _Group(group_id, task, group_id, self._group_size, self._rule.deadline(sampler.version), self._now)
            group.missing = list(range(self._group_size))
            self._groups[group_id] = group
            assignments.append(self._assign(group, sampler, group.missing))
        return assignments

    def _assign(self, group: _Group, sampler: _Sampler, siblings: Sequence[int]) -> Assignment:
        """`siblings` are missing, and alike."""
        group.missing = [sibling for sibling in group.missing if sibling not in siblings]
        if not group.missing:
            self._waiting.pop(group.group_id, None)
        attempt, group.attempts = group.attempts, group.attempts + 1
        group.runs[attempt] = _Run(sampler.name, set(siblings), self._now, sampler.version)
        sampler.in_flight += len(siblings)
        task, stream, turn = group.task, group.stream, group.turns.get(siblings[0])
        return Assignment(sampler.name, group.group_id, attempt, task, tuple(siblings), stream, group.pinned, turn)

    def _note_reasons(self) -> None:
        for sampler in self._samplers.values():
            if sampler.silent:
                sampler.reason = "silent"
            elif self._exhausted:
                sampler.reason = "prompts"
            elif any(group.not_before > self._now for group in self._waiting.values()):
                sampler.reason = "back_off"
            elif self._stocked():
                sampler.reason = "stock"
            elif self._tools and any(group.calls for group in self._all_groups()):
                sampler.reason = "tools"
            elif self._new_may_start(self._published):
                sampler.reason = "weights"
            else:
                sampler.reason = "trainer"

    # What happens to a group.

    def _end(self, group: _Group, sibling: int, completion: Completion) -> None:
        """`completion` is all that `sibling` will have."""
        group.calls.pop(sibling, None)
        group.turns.pop(sibling, None)
        group.done[sibling] = completion
        self._finish(group)

    def _calls_tool(self, completion: Completion) -> bool:
        return self._tools and completion.finish == "stop_string"

    def _waits_for(self, call: Call) -> _Group | None:
        """The group in which a sibling waits for the answer to this very call."""
        group = self._find(call.group_id)
        return group if group is not None and group.calls.get(call.sibling) is call else None

    def _abandon(self, group: _Group) -> None:
        """Nobody samples or answers what is not done."""
        self._cancel(group, list(group.runs))
        group.missing, group.turns, group.calls = [], {}, {}
        self._waiting.pop(group.group_id, None)

    def _finish(self, group: _Group) -> None:
        """Nothing is missing any more: on to the rewards."""
        if not group.runs and not group.missing and not group.calls and group.pinned is None:
            group.stage = "unscored"
            self._unscored.append(group)
            self._stock += 1

    def _wrong_versions(self, group: _Group, run: _Run, completion: Completion) -> str | None:
        versions = completion.versions_T
        if not len(versions):
            return "a call of a tool without a token" if self._calls_tool(completion) else None
        lowest, highest = int(versions.min()), int(versions.max())
        if group.pinned is not None and (lowest, highest) != (group.pinned, group.pinned):
            return f"tokens of versions {lowest} to {highest} in an evaluation of version {group.pinned}"
        if lowest < run.version or highest > self._published or (versions[1:] < versions[:-1]).any():
            return (
                f"tokens of versions {lowest} to {highest}, begun under version {run.version} with "
                f"{self._published} the newest"
            )
        return None

    def _close(self, group: _Group, attempt: int) -> _Run:
        """An attempt is over; what it did not bring is missing."""
        run = group.runs.pop(attempt)
        if run.sampler in self._samplers:
            self._samplers[run.sampler].in_flight -= len(run.siblings)
        group.missing = sorted([*group.missing, *run.siblings])
        self._waiting[group.group_id] = group
        return run

    def _fail(self, group: _Group, attempt: int, reason: str) -> None:
        run = self._close(group, attempt)
        group.failures += 1
        group.avoid = run.sampler
        if group.failures > self._retries:
            self._drop(group, "sampler_failed", f"after {group.failures} failed attempts, the last: {reason}")
            return
        self._counts["retries"] += 1
        pause = min(self._longest, self._back_off * 2 ** (group.failures - 1))
        group.not_before = self._now + pause
        self._event(
            "retried",
            f"group {group.group_id} is tried again in {pause:g} s: {reason} ({run.sampler})",
            run.sampler,
            group.group_id,
        )

    def _drop(self, group: _Group, reason: str, words: str) -> None:
        self._abandon(group)
        self._event("dropped", f"group {group.group_id} is dropped ({reason}) {words}", None, group.group_id)
        if group.pinned is not None:
            group.failed = words
        else:
            del self._groups[group.group_id]
            self._issuer.drop(group.group_id, reason)

    def _cancel(self, group: _Group, attempts: Iterable[int]) -> None:
        for attempt in attempts:
            run = self._close(group, attempt)
            self._cancels.append(Cancel(run.sampler, group.group_id, attempt, tuple(sorted(run.siblings))))

    def _straggle(self, group: _Group, late: dict[int, _Run]) -> None:
        self._counts["stragglers"] += 1
        names = sorted({run.sampler for run in late.values()})
        for name in names:
            self._silence(name)
        words = f"because {', '.join(names)} did not finish it in {self._timeout:g} s"
        if group.pinned is not None or self._straggler == "reissue":
            self._cancel(group, late)
            group.failures += 1
            group.avoid = names[0]
            if group.failures > self._retries:
                self._drop(group, "straggler", words)
                return
            self._counts["retries"] += 1
            group.not_before = self._now
            self._event("straggler", f"group {group.group_id} is asked for again {words}", None, group.group_id)
        elif self._straggler == "drop" or len(group.done) < self._smallest:
            self._drop(group, "straggler", words)
        else:
            self._abandon(group)
            self._event(
                "straggler",
                f"group {group.group_id} goes on with {len(group.done)} of {group.size} siblings {words}",
                None,
                group.group_id,
            )
            self._finish(group)

    def _silence(self, name: str) -> None:
        sampler = self._samplers.get(name)
        if sampler is not None and not sampler.silent:
            sampler.silent = True
            self._event("silent", f"sampler {name} gets nothing new until it answers", name)

    # Batches.

    def _wanted(self) -> list[_Group]:
        """Groups that the next batch cannot do without."""
        if self._order == "issue":
            return list(self._groups.values())[: self._per_step]
        return [group for group in self._groups.values() if group.deadline <= self._step]

    def _next_batch(self) -> list[int] | None:
        if self._exhausted and len(self._groups) <= self._per_step:
            whole = all(group.stage == "ready" for group in self._groups.values())
            return (list(self._groups) if self._order == "issue" else list(self._finished)) if whole else None
        if len(self._finished) < self._per_step:
            return None
        if self._order == "issue":
            head = self._wanted()
            return [group.group_id for group in head] if all(group.stage == "ready" for group in head) else None
        return self._first_finished()

    def _first_finished(self) -> list[int] | None:
        """The first finished, except that those stay possible which would otherwise be trained too late.

        After this step, the groups due by version d must fit into the d - step steps that are left for them.
        """
        due = Counter(group.deadline for group in self._groups.values())
        chosen: list[int] = []
        total = 0
        for deadline in sorted(due):
            total += due[deadline]
            needed = total - self._per_step * (deadline - self._step)
            able = [g for g in self._finished if g not in chosen and self._groups[g].deadline <= deadline]
            have = len(chosen)
            if needed - have > len(able):
                return None
            chosen += able[: max(0, needed - have)]
        chosen += [g for g in self._finished if g not in chosen][: self._per_step - len(chosen)]
        return [g for g in self._finished if g in chosen]
