"""Requests in, completions out: what a request gets never depends on who stands beside it."""

import os
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_reference import (
    CONFIG,
    EOS,
    NEW,
    PROMPT,
    assert_same,
    make_engine,
    make_requests,
    request,
    run,
    stacked_keys,
)

from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.types import QueueFullError, ThinkingBudget, UserError


@pytest.fixture(scope="module")
def compilations():
    """Counts compilations of this process; the count grows for ever, so compare two readings."""
    seen = []

    def listener(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listener)
    return lambda: len(seen)


def test_tokens_depend_on_the_request_alone(engine, params):
    asked = make_requests(16, siblings=4)
    expected = run(Scheduler(engine, params), asked)
    for slots in (1, 8):
        assert_same(run(Scheduler(make_engine(slots=slots), params), asked), expected)
    assert_same(run(Scheduler(engine, params), asked[::-1])[::-1], expected)
    scheduler = Scheduler(engine, params)
    assert_same([run(scheduler, [r])[0] for r in asked[:6]], expected[:6])


def test_an_aborted_neighbour_leaves_no_trace(engine, params):
    asked = make_requests(12, siblings=4)
    expected = run(Scheduler(engine, params), asked)
    scheduler = Scheduler(engine, params)
    ids = scheduler.submit(asked)
    done = dict(scheduler.step())
    running = [i for i in ids[:4] if i not in done]
    doomed = [running[0], ids[9], 10**6]  # in a slot, still queued, unknown
    scheduler.abort(doomed)
    done.update(scheduler.drain())
    assert sorted(done) == ids
    for i, whole in zip(ids, expected, strict=True):
        if i not in doomed:
            assert_same([done[i]], [whole])
        else:
            assert done[i].finish == "aborted"
            np.testing.assert_array_equal(done[i].tokens_T, whole.tokens_T[: len(done[i].tokens_T)])
    assert 0 < len(done[doomed[0]].tokens_T) < len(expected[ids.index(doomed[0])].tokens_T)
    assert len(done[doomed[1]].tokens_T) == 0
    assert scheduler.statistics.requests_aborted == 2
    scheduler.abort(ids)  # already returned: nothing to stop
    assert scheduler.idle


def test_an_aborted_slot_decodes_no_further(engine, params):
    asked = [request([5, 6], sibling=s, temperature=0.0, new=NEW) for s in range(4)]
    scheduler = Scheduler(engine, params)
    ids = scheduler.submit(asked)
    done = dict(scheduler.step())
    assert not done
    scheduler.abort(ids[:2])
    done.update(scheduler.drain())
    assert len(done[ids[0]].tokens_T) < len(done[ids[3]].tokens_T)
    assert scheduler.statistics.tokens_generated == sum(len(c.tokens_T) for c in done.values())


def test_other_streams_siblings_and_seeds_are_other_samples(engine, params):
    # Reported of other stacks.
    base = {"temperature": 50.0, "new": NEW}
    asked = [request([5, 6], **base, **{name: 1}) for name in ("seed", "stream", "sibling")] + [request([5, 6], **base)]
    tokens = {tuple(c.tokens_T) for c in run(Scheduler(engine, params), asked)}
    assert len(tokens) == 4


def test_siblings_are_prefilled_once(engine, params):
    prompts = [np.array([3, 4, 5], np.int32), np.array([6], np.int32)]
    asked = [request(p, stream=n, sibling=s, new=2) for n, p in enumerate(prompts) for s in range(8)]
    scheduler = Scheduler(engine, params)
    run(scheduler, asked)
    # 16 requests through 4 slots: no group is prefilled again for the siblings that had to wait
    assert (scheduler.statistics.prompts_prefilled, scheduler.statistics.prefill_tokens) == (2, 4)


def test_statistics_count_what_happened(engine, params):
    scheduler = Scheduler(engine, params)
    completions = run(scheduler, [request([5], new=NEW, temperature=0.0) for _ in range(2)])
    length = len(completions[0].tokens_T)
    statistics = scheduler.statistics
    assert statistics.tokens_generated == 2 * length
    assert statistics.decoded_tokens == 2 * (length - 1)
    assert statistics.slot_steps == 4 * (length - 1)  # stops with the last active slot, in the middle of a dispatch
    assert statistics.occupancy == 0.5
    assert statistics.dispatches == -(-(length - 1) // engine.decode_steps)
    assert scheduler.idle


def test_a_dispatch_ends_with_the_last_active_slot(engine, params):
    # A decode step writes into every slot's cache, active or not; untouched positions show that none was taken.
    loaded, state = engine.load_params(params), engine.init_decode_state()
    state = state.replace(slots=state.slots.replace(positions=state.slots.positions + 9))
    state, result = engine.generate(loaded, state)
    assert not stacked_keys(state.cache).any()
    assert not result.columns()[1].any()
    prefix = engine.prefill_many(loaded, [np.array([3, 4])], engine.device_version(0))
    state = engine.insert(prefix, state, 2, request([3, 4], new=2, temperature=0.0))  # one decode step of three
    state, result = engine.generate(loaded, state)
    assert result.columns()[1].sum() == 2
    idle_slot = stacked_keys(state.cache)[:, 0, 0, :, 0]
    assert np.flatnonzero(idle_slot.any(axis=0)).tolist() == [9]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "0 tokens"),
        ({"prompt": [1] * (PROMPT + 1)}, f"{PROMPT + 1} tokens; the sampler takes 1 to {PROMPT}"),
        ({"prompt": [[1, 2]]}, "flat array"),
        ({"prompt": [3, CONFIG.vocab_size]}, f"id {CONFIG.vocab_size}, outside the vocabulary"),
        ({"prompt": [-1]}, "id -1"),
        ({"new": 0}, "max_new_tokens is 0"),
        ({"new": NEW + 1}, f"hold 1 to {NEW}"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"seed": -1}, "seed is -1"),
        ({"stream": 2**32}, "stream is 4294967296"),
        ({"sibling": -7}, "sibling is -7"),
    ],
)
def test_a_bad_request_is_refused_and_hurts_nobody(engine, params, change, words):
    scheduler = Scheduler(engine, params)
    bad = request(**{"prompt": [5], **change})
    with pytest.raises(UserError, match=words):
        scheduler.submit([request([4]), bad])
    assert scheduler.idle  # not even the good one of the same call was queued


def test_floats_are_no_prompt(engine, params):
    bad = request([5])
    object.__setattr__(bad, "tokens_T", np.array([5.0]))
    with pytest.raises(UserError, match="float64"):
        Scheduler(engine, params).submit([bad])


def test_prompts_of_every_boundary_length_share_one_program(engine, params, compilations):
    # Reported of other stacks, and 1,000 mixed lengths with 20 swaps in small
    scheduler = Scheduler(engine, params, version=0)
    run(scheduler, [request([5], new=NEW)])
    scheduler.update_weights(params, 1)
    run(scheduler, make_requests(5, siblings=1))
    ids = scheduler.submit([request([5], new=NEW, temperature=0.0)])
    scheduler.step()
    scheduler.abort(ids)
    scheduler.drain()
    before = compilations()
    for version in range(2, 8):
        asked = make_requests(24, seed=version, temperatures=(0.0, 0.7, 1.0))
        asked += [request([3] * n, stream=n) for n in (1, PROMPT - 1, PROMPT)]
        ids = scheduler.submit(asked)
        scheduler.step()
        scheduler.update_weights(jax.tree.map(np.asarray, params), version)
        scheduler.abort(ids[3:5])
        scheduler.drain()
    assert compilations() == before
    make_engine(slots=2).init_decode_state()
    assert compilations() > before  # the listener listens


def test_versions_only_go_up(engine, params):
    scheduler = Scheduler(engine, params, version=5)
    for version in (5, 4):
        with pytest.raises(UserError, match=f"version {version} come after version 5"):
            scheduler.update_weights(params, version)
    scheduler.update_weights(params, 9)
    assert scheduler.version == 9
    assert set(run(scheduler, [request([5], new=3)])[0].versions_T) == {9}


def test_a_refused_version_changes_nothing(engine, params, other_params):
    scheduler = Scheduler(engine, params, version=5)
    for version, words in ((5, "only go up"), (-1, "only go up"), (2**31, "2147483647"), (2**40, "2147483647")):
        with pytest.raises(UserError, match=words):
            scheduler.update_weights(other_params, version)
    (completion,) = run(scheduler, [request([5, 6])])
    assert set(completion.versions_T) == {5}
    np.testing.assert_array_equal(
        completion.logprobs_T, run(Scheduler(engine, params), [request([5, 6])])[0].logprobs_T
    )


def test_weights_that_are_not_finite_are_noticed(engine, params):
    broken = params | {"final_norm": params["final_norm"] * np.nan}
    scheduler = Scheduler(engine, broken)
    scheduler.submit([request([5])])
    with pytest.raises(FloatingPointError, match="not finite with weights 0"):
        scheduler.drain()


def test_a_thousand_mixed_requests_and_twenty_swaps_compile_nothing(long_engine, params, compilations):
    rng = np.random.default_rng(0)
    options = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.7},
        {"top_k": 3, "min_p": 0.1},
        {"banned_ids": (2,), "stop_ids": (4,)},
    ]
    options += [{"thinking": ThinkingBudget(2, 4, 3)}, {"repetition_limit": 3, "min_new_tokens": 2}]
    options += [{"logit_bias": ((5, 2.0),)}]

    def some(count):
        plain = [
            request(rng.integers(0, 20, rng.integers(1, 23)), new=int(rng.integers(10, 15)), stream=i, **options[i % 8])
            for i in range(count)
        ]
        return [replace(r, alternatives=i % 4, score_prompt=i % 3 == 0) for i, r in enumerate(plain)]

    scheduler = Scheduler(long_engine, params, version=0)
    scheduler.warm_up()
    before = compilations()
    for version in range(1, 21):
        ids = scheduler.submit(some(50))
        done = scheduler.step()
        scheduler.abort(ids[3:5])
        scheduler.update_weights(jax.tree.map(np.asarray, params), version)
        assert sorted(i for i, _ in done + scheduler.drain()) == ids
    assert compilations() == before
    assert scheduler.statistics.requests_submitted == 1000
    assert scheduler.statistics.prompts_scored > 200


@pytest.mark.slow
def test_soak(long_engine, params, other_params):
    """Half an hour (SOAK_MINUTES) of anything in any order: every request comes back once, and memory stays flat."""
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    rng = np.random.default_rng(0)
    loaded = [long_engine.load_params(params), long_engine.load_params(other_params)]
    scheduler = Scheduler(long_engine, params, max_queue=200)
    open_ids, submitted, returned, version, refused = set(), 0, 0, 0, 0
    started, sizes = time.monotonic(), []

    def collect(finished):
        nonlocal returned
        for i, completion in finished:
            open_ids.remove(i)
            returned += 1
            assert len(completion.tokens_T) == len(completion.logprobs_T) == len(completion.forced_T)

    while (elapsed := time.monotonic() - started) < 60 * minutes:
        action = rng.choice(
            ["submit", "step", "abort", "swap", "drain", "pause"], p=[0.25, 0.6, 0.07, 0.05, 0.01, 0.02]
        )
        if action == "submit":
            how = [{}, {"top_p": 0.8}, {"thinking": ThinkingBudget(3, 9, 4)}, {"temperature": 0.0}][rng.integers(4)]
            prompt = rng.integers(0, 20, rng.integers(1, 23))
            asked = [request(prompt, new=20, stream=submitted, sibling=s, **how) for s in range(rng.integers(1, 9))]
            more = {"alternatives": int(rng.integers(4)), "score_prompt": bool(rng.integers(2))}
            asked = [replace(r, **more) for r in asked]
            try:
                open_ids |= set(scheduler.submit(asked))
                submitted += len(asked)
            except QueueFullError:
                refused += 1
        elif action == "step":
            collect(scheduler.step())
        elif action == "abort" and open_ids:
            scheduler.abort(rng.choice(sorted(open_ids), 2).tolist())
        elif action == "swap":
            version += 1
            scheduler.swap(loaded[version % 2], version)
        elif action == "drain":
            collect(scheduler.drain())
        elif action == "pause":
            scheduler.pause()
            collect(scheduler.step())
            scheduler.resume()
        if elapsed > 60 * minutes * (len(sizes) + 1) / 12:
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    collect(scheduler.drain())
    assert not open_ids
    assert submitted == returned
    print(f"{submitted} requests, {version} swaps, {refused} refusals; resident MiB {[round(s) for s in sizes]}")
    assert max(sizes[3:]) - sizes[2] < 20


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 9), st.integers(1, 4)),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.lists(st.integers(0, 40), max_size=4)),
        st.tuples(st.just("swap")),
        st.tuples(st.just("drain")),
    ),
    max_size=25,
)


@settings(max_examples=30)
@given(actions=ACTIONS, seed=st.integers(0, 3))
def test_every_request_comes_back_once_whatever_happens(engine, params, other_params, actions, seed):
    loaded = [engine.load_params(params), engine.load_params(other_params)]
    scheduler, asked, done, aborted, version = Scheduler(engine, params), {}, {}, set(), 0

    def collect(finished):
        for i, completion in finished:
            assert i not in done
            done[i] = completion

    for name, *arguments in actions:
        if name == "submit":
            count, siblings = arguments
            requests = make_requests(count, siblings=siblings, seed=seed)
            asked.update(zip(scheduler.submit(requests), requests, strict=True))
        elif name == "step":
            collect(scheduler.step())
        elif name == "abort":
            aborted |= set(arguments[0]) & (set(asked) - set(done))
            scheduler.abort(arguments[0])
        elif name == "swap":
            version += 1
            scheduler.swap(loaded[version % 2], version)
        else:
            collect(scheduler.drain())
        assert scheduler.in_flight == len(asked) - len(done)
    collect(scheduler.drain())
    assert set(done) == set(asked)
    assert scheduler.idle
    for i, completion in done.items():
        assert (completion.finish == "aborted") == (i in aborted)
        count = len(completion.tokens_T)
        assert count <= asked[i].sampling.max_new_tokens
        assert (count and completion.tokens_T[-1] == EOS) == (completion.finish == "stop")
        assert (completion.logprobs_T <= 0).all()
        assert (np.diff(completion.versions_T) >= 0).all()
        assert (completion.versions_T <= version).all()
    statistics = scheduler.statistics
    assert statistics.requests_submitted == len(asked)
    assert statistics.requests_completed + statistics.requests_aborted == len(asked)
    assert statistics.requests_aborted == len(aborted)
    assert statistics.tokens_generated == sum(len(c.tokens_T) for c in done.values())
