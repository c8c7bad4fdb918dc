"""The curriculum against slow reference implementations: bands, subsets, orders, mixtures, history, resume."""

import functools
import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.data.curriculum import (
    PassRates,
    check_rated,
    easy_to_hard,
    read_pass_rates,
    stratified_subset,
    within_band,
)
from jaxrl_llm.data.prompts import PromptMixture, PromptStream, fingerprint
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.types import Completion, Episode, EpisodeGroup, PromptTask, Reward, UserError

EMPTY = Completion(*(np.zeros(0, np.int32),) * 4, finish="stop")


def tasks(n, source="s"):
    return [PromptTask(f"{source}/{i}", np.array([i], np.int32), str(i), str(i), source, "exact") for i in range(n)]


def rated(rights, of=16):
    members = tasks(len(rights))
    return members, {task.task_id: right / of for task, right in zip(members, rights, strict=True)}


def test_bands_are_closed_intervals():
    members, rates = rated(range(17))
    easy = [task.prompt for task in within_band(members, rates, (0.3, 0.6))]
    hard = [task.prompt for task in within_band(members, rates, (0.0, 0.0625))]
    assert easy == ["5", "6", "7", "8", "9"]  # 5/16 = .3125 ... 9/16 = .5625
    assert hard == ["0", "1"]  # 1/16 is in


def test_easy_to_hard_falls_and_only_equal_prompts_are_drawn():
    members, rates = rated([3, 16, 3, 0, 8, 3])
    orders = {tuple(t.prompt for t in easy_to_hard(members, rates, seed=seed)) for seed in range(20)}
    assert {(order[0], order[1], order[-1]) for order in orders} == {("1", "4", "3")}
    assert {frozenset(order[2:5]) for order in orders} == {frozenset("025")}
    assert len(orders) > 1
    assert easy_to_hard(members, rates, seed=3) == easy_to_hard(members, rates, seed=3)


@given(st.lists(st.integers(0, 16), min_size=1, max_size=60), st.data())
def test_subsets_have_every_strata_s_share(rights, data):
    members, rates = rated(rights)
    count, strata = data.draw(st.integers(1, len(members))), data.draw(st.integers(1, 12))
    subset = stratified_subset(members, rates, count, strata=strata, seed=5)
    assert len(subset) == count
    places = [members.index(task) for task in subset]
    assert places == sorted(set(places))  # in their order, each once

    def stratum(task):
        return min(strata - 1, int(Fraction(rates[task.task_id]) * strata)) if strata > 1 else 0

    whole, chosen = Counter(map(stratum, members)), Counter(map(stratum, subset))
    for s, size in whole.items():
        assert abs(chosen[s] - Fraction(count * size, len(members))) < 1
    with pytest.raises(UserError, match=f"unique_prompts = {len(members) + 1} is more than the {len(members)}"):
        stratified_subset(members, rates, len(members) + 1, strata=strata, seed=5)


def test_every_epoch_meets_every_prompt_once_and_then_the_source_is_used_up():
    stream = PromptStream(tasks(7), seed=1, epochs=3)
    epochs = [[stream[7 * e + i].prompt for i in range(7)] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[str(i) for i in range(7)]] * 3
    assert len(set(map(tuple, epochs))) == 3  # each in an order of its own
    assert [stream[i] for i in range(21, 60)] == [None] * 39
    ordered = PromptStream(tasks(7), seed=1, shuffle=False, epochs=2)
    assert [ordered[i].prompt for i in range(14)] == [str(i) for i in range(7)] * 2


def test_mixtures_keep_their_proportions_all_along():
    streams = [PromptStream(tasks(n, name), seed=0, shuffle=False) for n, name in ((5, "a"), (11, "b"), (2, "c"))]
    mixture = PromptMixture(streams, [5, 3, 2])
    sources = [mixture[i].source for i in range(400)]
    for n in (10, 37, 100, 400):
        counts = Counter(sources[:n])
        assert all(abs(counts[name] - n * w / 10) <= 2 for name, w in zip("abc", (5, 3, 2), strict=True))
    for start in (0, 13, 113):  # what PromptMixture promises: so many in a row meet everything
        met = {mixture[i].task_id for i in range(start, start + 2 * mixture.epoch_size)}
        assert len(met) == 18
    alone = streams[1]
    assert [t.task_id for i in range(400) if (t := mixture[i]).source == "b"] == [alone[i].task_id for i in range(120)]


def test_a_fingerprint_is_of_everything_a_run_sees_in_its_order():
    base = tasks(4)
    seen = {fingerprint(base), fingerprint(base[::-1]), fingerprint(base[:3])}
    for change in ({"answer": "x"}, {"source": "x"}, {"reward": "math"}, {"tokens_T": np.array([9], np.int32)}):
        seen.add(fingerprint([replace(base[0], **change), *base[1:]]))
    assert len(seen) == 7


class Reference:
    """A run written down as one list of events and worked out anew, slowly, whenever something is asked."""

    def __init__(self, endless, *, epochs, retire_at, most_replaced):
        self.endless, self.epochs = endless, epochs
        self.retire_at, self.most_replaced = retire_at, most_replaced
        self.events = []  # ("issue", group, index) | ("score", group, right, total, how) | ("settled",)

    def element(self, index):
        """The prompt at a place of the mixture: which of its source's own places that is, by counting."""
        task = self.endless[index]
        place = sum(other.source == task.source for other in self.endless[:index])
        size = len({other.task_id for other in self.endless if other.source == task.source})
        return None if self.epochs is not None and place >= self.epochs * size else task

    def history(self):
        counts, retired = {}, set()
        for event in self.events:
            if event[0] == "score":
                _, task_id, right, total, _ = event
                counts.setdefault(task_id, []).append((right, total))
                rights, totals = (sum(column) for column in zip(*counts[task_id], strict=True))
                if self.retire_at is not None and totals and rights >= self.retire_at * totals:
                    retired.add(task_id)
        return {t: [sum(c) for c in zip(*visits, strict=True)] for t, visits in counts.items()}, retired

    def next(self):
        issued = [event for event in self.events if event[0] == "issue"]
        first = issued[-1][2] + 1 if issued else 0
        _, retired = self.history()
        for index in range(first, first + 50):
            task = self.element(index)
            if task is not None and task.task_id not in retired:
                return len(issued), index, task
        return None

    def refuses(self, right, total):
        after = [e[0] for e in self.events]
        last = max((i for i, kind in enumerate(after) if kind == "settled"), default=-1)
        replaced = sum(e[0] == "score" and e[4] == "replaced" for e in self.events[last + 1 :])
        return total > 0 and right in (0, total) and replaced < self.most_replaced


def group(group_id, task, right, total, failed):
    rewards = [Reward(1.0, {"correct": 1.0})] * right + [Reward(-1.0, {"correct": 0.0})] * (total - right)
    rewards += [Reward(float("nan"), {}, failed="broken")] * failed
    return EpisodeGroup(group_id, task, tuple(Episode(EMPTY, np.zeros(0, bool), reward) for reward in rewards))


SHAPES = [((3,), (1.0,)), ((4, 3), (1.0, 1.0)), ((5, 2), (3.0, 1.0))]


def stream(shape, epochs):
    sizes, weights = shape
    # In the order given: grain's shuffle of three prompts takes a thousand times as long as the rest of a move.
    streams = [PromptStream(tasks(size, f"s{i}"), seed=0, shuffle=False, epochs=epochs) for i, size in enumerate(sizes)]
    return streams[0] if len(streams) == 1 else PromptMixture(streams, weights)


@functools.cache
def endless(shape):
    """The first prompts of the mixture if no source ever ends."""
    mixture = stream(shape, None)
    return [mixture[index] for index in range(130)]


@given(
    st.integers(0, 10**6),
    st.sampled_from(SHAPES),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([None, 0.5, 0.9]),
    st.sampled_from([0, 2]),
)
def test_state_equals_a_slow_reference_over_random_histories(seed, shape, epochs, retire_at, most_replaced):
    """Prompts, groups in flight, pass rates and retirement, with groups finishing in any order, drops, and crashes
    that fall back on a checkpoint: what the run meets is what the list of kept events says."""

    def fresh():
        return GroupIssuer(stream(shape, epochs), PassRates(retire_at=retire_at), most_replaced=most_replaced)

    rng = random.Random(seed)
    issuer = fresh()
    reference = Reference(endless(shape), epochs=epochs, retire_at=retire_at, most_replaced=most_replaced)
    flying, ready = {}, {}
    saved = json.dumps(issuer.state()), [], {}
    for _ in range(40):
        move = rng.random()
        if move < 0.45:
            expected = reference.next()
            taken = issuer.take()
            if expected is None:
                assert taken is None
                break
            group_id, index, task = expected
            assert taken is not None
            assert (taken[0], taken[1].task_id) == (group_id, task.task_id)
            reference.events.append(("issue", group_id, index))
            flying[group_id] = task
        elif move < 0.7 and flying:
            group_id = rng.choice(list(flying))
            total, failed = rng.choice([(4, 0), (3, 1), (0, 4)])
            right = rng.choice([0, total, rng.randint(0, total)])
            scored = group(group_id, flying[group_id], right, total, failed)
            refused = issuer.refuse(scored)
            assert refused == reference.refuses(right, total)
            if refused:
                reference.events.append(("score", flying.pop(group_id).task_id, right, total, "replaced"))
            else:
                ready[group_id] = scored
                flying.pop(group_id)
        elif move < 0.76 and flying:
            group_id = rng.choice(list(flying))
            flying.pop(group_id)
            issuer.drop(group_id, "straggler")
        elif move < 0.9 and ready:
            groups = [ready.pop(g) for g in rng.sample(list(ready), rng.randint(1, len(ready)))]
            dropped = {g.group_id: "zero_variance" for g in groups if rng.random() < 0.4}
            issuer.settle([g for g in groups if g.group_id not in dropped], dropped, groups)
            for g in groups:
                rewards = [e.reward for e in g.episodes if e.reward.failed is None]
                right = sum(r.parts["correct"] > 0 for r in rewards)
                reference.events.append(("score", g.task.task_id, right, len(rewards), "settled"))
            reference.events.append(("settled",))
        elif move < 0.95:
            open_groups = {**flying, **{g: r.task for g, r in ready.items()}}
            saved = json.dumps(issuer.state()), list(reference.events), open_groups
        else:  # a crash: everything since the checkpoint is gone, and its open groups are issued again, under their ids
            issuer = fresh()
            issuer.restore(json.loads(saved[0]))
            reference.events, flying, ready = list(saved[1]), {}, {}
            for group_id, task in sorted(saved[2].items()):
                again = issuer.take()
                assert (again[0], again[1].task_id) == (group_id, task.task_id)
                flying[group_id] = task
        counts, retired = reference.history()
        state = issuer.state()["pass_rates"]
        assert (state["counts"], set(state["retired"])) == (counts, retired)
        books = issuer.counts()
        assert books["prompts_issued"] == (
            books["prompts_trained"] + sum(books["prompts_dropped"].values()) + books["prompts_in_flight"]
        )


def test_a_prompt_is_retired_for_good():
    rates = PassRates(retire_at=0.9)
    rates.record("a", right=9, total=10)
    assert rates.retired("a")
    rates.record("a", right=0, total=10)  # it was in flight when it was retired
    assert (rates.rate("a"), rates.retired("a"), rates.retired_count) == (0.45, True, 1)
    other = PassRates(retire_at=0.9)
    other.restore(json.loads(json.dumps(rates.state())))
    assert (other.rate("a"), other.retired("a"), other.rate("b")) == (0.45, True, None)


def test_dynamic_sampling_has_a_bound_and_says_what_it_met(caplog):
    issuer = GroupIssuer(PromptStream(tasks(8), seed=0), PassRates(retire_at=None), most_replaced=2)
    taken = [issuer.take() for _ in range(5)]
    assert issuer.refuse(group(*taken[0], 0, 4, 0))
    assert not issuer.refuse(group(*taken[1], 2, 4, 0))  # mixed
    assert not issuer.refuse(group(*taken[1], 0, 0, 4))  # no reward: nothing is known of it
    assert issuer.refuse(group(*taken[2], 4, 4, 0))
    assert not issuer.refuse(group(*taken[3], 0, 4, 0))
    assert not issuer.refuse(group(*taken[4], 0, 4, 0))
    assert [record.message for record in caplog.records] == [
        "dynamic sampling has replaced 2 prompts in one step (1 of pass rate 0, 1 of pass rate 1), as many as "
        "algorithm.dynamic_sampling allows; the step goes on with what it gets"
    ]
    assert issuer.counts()["prompts_dropped"] == {"all_wrong": 1, "all_right": 1}
    issuer.settle([group(*taken[1], 2, 4, 0)], {}, [group(*taken[1], 2, 4, 0)])
    assert issuer.refuse(group(*taken[3], 0, 4, 0))  # the next step has a bound of its own
    assert not GroupIssuer(PromptStream(tasks(8), seed=0), PassRates(retire_at=None)).refuse(group(*taken[0], 0, 4, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; make them with"),
        ('{"task_id": "a", "right": 3, "total": 2}\n', "line 1 is not .* with 0 <= right <= total"),
        ('{"task_id": "a", "right": 0, "total": 0}\n', "line 1 is not "),
        ('{"measured": {}}\n{"task_id": "a", "right": 1}\n', "line 2 is not "),
        (
            '{"task_id": "a", "right": 1, "total": 2}\n{"task_id": "a", "right": 1, "total": 2}',
            "line 2: task a stands twi",
        ),
        ("nonsense", "line 1 is not "),
    ],
)
def test_a_bad_file_of_pass_rates_is_one_error(tmp_path, text, message):
    path = tmp_path / "rates.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_pass_rates(str(path))
    with pytest.raises(UserError, match="gone cannot be read"):
        read_pass_rates(str(tmp_path / "gone"))


def test_a_prompt_without_a_pass_rate_is_not_guessed():
    members, rates = rated([1, 2])
    with pytest.raises(UserError, match="no pass rate of 1 of 3 training prompts, s/2 among them"):
        check_rated(tasks(3), rates, "file")
    check_rated(members, rates, "file")
