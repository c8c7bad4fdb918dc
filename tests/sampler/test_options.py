"""Per-request options of the sampler, through the scheduler, on a policy that shows each of them."""

from dataclasses import replace

import numpy as np
import pytest
from sampler_reference import (
    CONFIG,
    EOS,
    LONG_NEW,
    LONG_PROMPT,
    MARK,
    PHRASE,
    assert_same,
    make_engine,
    make_params,
    request,
    run,
)
from scipy import stats

from jaxrl_llm.envs.turns import answered, extended
from jaxrl_llm.rollout.turns import next_request
from jaxrl_llm.sampler.interruption import Interruption
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.types import Completion, QueueFullError, ThinkingBudget, Turn, UserError

VOCAB = CONFIG.vocab_size
THINK = ThinkingBudget(5, 12, 6)
OPTIONS = [
    {},
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_p": 0.6, "temperature": 0.7},
    {"min_p": 0.2, "temperature": 2.0},
    {"banned_ids": (2, 3, EOS)},
    {"min_new_tokens": 20, "stop_ids": (6,)},
    {"thinking": THINK},
    {"thinking": THINK, "top_k": 4, "min_new_tokens": 4},
    {"repetition_limit": 2},
    {"stop_ids": (9, 11)},
    {"logit_bias": ((2, 4.0), (9, -3.0)), "banned_ids": (7,), "top_k": 6},
]


def letters(ids):
    """A tokenizer of one letter per id; EOS is no text."""
    return "".join(chr(ord("a") + i) for i in ids if i != EOS)


@pytest.fixture(scope="module")
def long_params():
    params = make_params(CONFIG, 3)
    # EOS seldom, so that completions last; a flat-ish head, so that every token comes up.
    head = np.asarray(params["head"]) * 0.5
    return params | {"head": head}


def mixture(count=24, **more):
    rng = np.random.default_rng(1)
    asked = []
    for i in range(count):
        how = OPTIONS[i % len(OPTIONS)] | more
        prompt = rng.integers(0, VOCAB, 1 + i * 5 % LONG_PROMPT)
        asked.append(request(prompt, new=LONG_NEW, stream=i, **how))
    return asked


def test_logprobs_are_the_trainers_whatever_the_options(long_engine, long_trainer, long_params):
    asked = mixture(33)[:32]
    completions = run(Scheduler(long_engine, long_params), asked)
    for completion, (logprobs, _) in zip(completions, long_trainer(long_params, asked, completions), strict=True):
        np.testing.assert_allclose(completion.logprobs_T, logprobs, atol=1e-5)
    assert {len(r.tokens_T) > 10 for r in asked} == {True, False}  # in chunks, and whole


def test_options_of_neighbours_change_nothing(long_engine, long_params):
    asked = mixture(22)
    together = run(Scheduler(long_engine, long_params), asked)
    scheduler = Scheduler(long_engine, long_params)
    assert_same([run(scheduler, [r])[0] for r in asked[::3]], together[::3])
    assert_same(run(Scheduler(long_engine, long_params), asked[::-1])[::-1], together)


def test_top_k_of_one_is_greedy(long_engine, long_params):
    prompts = [[3, 4], [9, 2, 6]]
    one = run(Scheduler(long_engine, long_params), [request(p, new=12, top_k=1, temperature=3.0) for p in prompts])
    greedy = run(Scheduler(long_engine, long_params), [request(p, new=12, temperature=0.0) for p in prompts])
    for a, b in zip(one, greedy, strict=True):
        np.testing.assert_array_equal(a.tokens_T, b.tokens_T)


def test_banned_ids_never_come_and_the_end_not_before_the_minimum(long_engine, long_params):
    flat = long_params | {"head": np.zeros_like(long_params["head"])}
    banned = (0, 2, 4, 6, 8, 10, 12, 14)
    asked = [request([3], new=30, banned_ids=banned, min_new_tokens=9, stop_ids=(5,), stream=s) for s in range(16)]
    completions = run(Scheduler(long_engine, flat), asked)
    for completion in completions:
        assert not np.isin(completion.tokens_T, banned).any()
        assert not np.isin(completion.tokens_T[:9], (EOS, 5)).any()
        assert len(completion.tokens_T) > 9
    assert {c.tokens_T[-1] for c in completions if c.finish == "stop"} == {EOS, 5}
    plain = run(Scheduler(long_engine, flat), [request([3], new=30, stream=s) for s in range(16)])
    assert min(len(c.tokens_T) for c in plain) < 9


def test_a_stop_id_ends_a_completion_as_its_last_token(long_engine, long_params):
    asked = [request([5, 6], new=LONG_NEW, stream=s) for s in range(16)]
    whole = run(Scheduler(long_engine, long_params), asked)
    stopping = [request([5, 6], new=LONG_NEW, stream=s, stop_ids=(12, 13)) for s in range(16)]
    cut = run(Scheduler(long_engine, long_params), stopping)
    assert any(len(c.tokens_T) < len(w.tokens_T) for c, w in zip(cut, whole, strict=True))
    for c, w in zip(cut, whole, strict=True):
        hits = np.flatnonzero(np.isin(w.tokens_T, (12, 13, EOS)))
        length = hits[0] + 1 if len(hits) else LONG_NEW
        np.testing.assert_array_equal(c.tokens_T, w.tokens_T[:length])
        assert c.finish == ("stop" if len(hits) else "length")


def test_a_stop_string_cuts_at_the_token_that_completes_it(long_engine, long_params):
    asked = [request([5, 6], new=LONG_NEW, stream=s) for s in range(16)]
    whole = run(Scheduler(long_engine, long_params), asked)
    text = letters(whole[0].tokens_T)
    strings = (text[6:8], "never this one")
    stopping = [request([5, 6], new=LONG_NEW, stream=s, stop_strings=strings) for s in range(16)]
    scheduler = Scheduler(long_engine, long_params, decode=letters)
    cut = run(scheduler, stopping)
    assert cut[0].finish == "stop_string"
    for c, w in zip(cut, whole, strict=True):
        text = letters(w.tokens_T)
        at = text.find(strings[0])
        if at < 0:
            assert_same([c], [w])
        else:
            assert (letters(c.tokens_T), c.finish) == (text[: at + 2], "stop_string")
            np.testing.assert_array_equal(c.logprobs_T, w.logprobs_T[: len(c.tokens_T)])
    assert scheduler.statistics.tokens_generated == sum(len(c.tokens_T) for c in cut)


def test_an_interrupted_completion_holds_the_phrase_once_untrained_inside_its_range(long_engine, long_params):
    flat = long_params | {"head": np.zeros_like(long_params["head"])}
    asked = [request([3], new=LONG_NEW, thinking=THINK, banned_ids=(EOS, 4), stream=s) for s in range(320)]
    completions = run(Scheduler(long_engine, flat), asked)
    starts = []
    for c in completions:
        at = np.flatnonzero(c.forced_T)
        assert at.tolist() == list(range(at[0], at[0] + len(PHRASE)))
        np.testing.assert_array_equal(c.tokens_T[at], PHRASE)
        np.testing.assert_allclose(c.logprobs_T[at], -np.log(VOCAB), atol=1e-5)  # what the policy thought of them
        assert len(c.tokens_T) == at[0] + len(PHRASE) + THINK.answer_tokens
        assert c.finish == "length"
        starts.append(at[0])
    counts = np.bincount(starts, minlength=13)[5:13]
    assert counts.sum() == 320
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_completion_that_ends_its_thinking_itself_is_not_interrupted(long_engine, long_params):
    flat = long_params | {"head": np.zeros_like(long_params["head"])}
    asked = [
        request([3], new=LONG_NEW, thinking=ThinkingBudget(25, 31, 6), banned_ids=(EOS,), stream=s) for s in range(64)
    ]
    ended = 0
    for c in run(Scheduler(long_engine, flat), asked):
        tokens = c.tokens_T.tolist()
        marks = [i for i in range(len(tokens) - 1) if tuple(tokens[i : i + 2]) == MARK]
        forced = np.flatnonzero(c.forced_T)
        if marks and marks[0] + 2 <= (forced[0] if len(forced) else 31):
            assert not len(forced)
            assert len(tokens) == marks[0] + 2 + 6
            ended += 1
        else:
            assert len(forced) == len(PHRASE)
    assert ended >= 2


def test_a_policy_that_stops_while_it_thinks_is_left_alone(long_engine, long_params):
    asked = [request([3], new=LONG_NEW, thinking=ThinkingBudget(30, 31, 6), stream=s) for s in range(24)]
    completions = run(Scheduler(long_engine, long_params), asked)
    early = [c for c in completions if c.finish == "stop" and not c.forced_T.any()]
    assert early
    assert all(c.tokens_T[-1] == EOS for c in early)


def test_certain_tokens_in_a_row_end_a_completion(long_engine, long_params):
    # So cold that every token is certain: the limit is met exactly.
    cold = {"new": 20, "temperature": 1e-4}
    asked = [request([3], repetition_limit=n, **cold) for n in (0, 1, 7, 20, 21)]
    completions = run(Scheduler(long_engine, long_params), asked)
    assert (np.exp(completions[0].logprobs_T) > 0.99).all()
    assert [len(c.tokens_T) for c in completions] == [20, 1, 7, 20, 20]
    assert [c.finish for c in completions] == ["length", "repetition", "repetition", "length", "length"]
    # One that is not certain starts the count again.
    warm = run(Scheduler(long_engine, long_params), [request([3], new=20, stream=s) for s in range(8)])
    asked = [request([3], new=20, stream=s, repetition_limit=2) for s in range(8)]
    for c, w in zip(run(Scheduler(long_engine, long_params), asked), warm, strict=True):
        sure = np.exp(w.logprobs_T) > 0.99
        pairs = np.flatnonzero(sure[1:] & sure[:-1])
        assert len(c.tokens_T) == (pairs[0] + 2 if len(pairs) else len(w.tokens_T))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"min_new_tokens": LONG_NEW + 1}, f"use 0 to max_new_tokens = {LONG_NEW}"),
        ({"repetition_limit": -1}, "repetition_limit is -1"),
        ({"stop_ids": (VOCAB,)}, f"stop_ids holds the id {VOCAB}"),
        ({"stop_ids": tuple(range(8))}, "stop_ids holds 8 ids; a slot has room for 7"),
        ({"banned_ids": (-1,)}, "banned_ids holds the id -1"),
        ({"banned_ids": tuple(range(17))}, "banned_ids holds 17 ids; a slot has room for 16"),
        ({"banned_ids": tuple(range(2, 18)), "stop_ids": (0, 18, 19)}, "leave no token"),
        ({"logit_bias": ((3, 100.5),)}, "logit_bias of id 3 is 100.5"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias of id 3 is nan"),
        ({"logit_bias": ((VOCAB, 1.0),)}, f"holds the id {VOCAB}"),
        ({"logit_bias": ((3, 1.0),) * 9, "banned_ids": (4,) * 8}, "17 ids; a slot has room for 16"),
        ({"stop_strings": ("",)}, "the empty string"),
        ({"stop_strings": ("a",) * 17}, "17 strings"),
        ({"stop_strings": ("a" * 257,)}, "257 bytes"),
        ({"stop_strings": ("a\ud800",)}, "half of a surrogate pair"),
        ({"thinking": ThinkingBudget(0, 4, 4)}, "thinking budget 0 ... 4 is no range"),
        ({"thinking": ThinkingBudget(5, 4, 4)}, "thinking budget 5 ... 4 is no range"),
        ({"thinking": ThinkingBudget(1, 4, 0)}, "answer budget is 0"),
        ({"thinking": ThinkingBudget(1, 34, 4)}, r"34 \+ phrase 3 \+ answer 4 = 41 tokens exceed max_new_tokens = 40"),
    ],
)
def test_an_option_that_means_nothing_is_refused_for_that_request_alone(long_engine, long_params, how, words):
    scheduler = Scheduler(long_engine, long_params, decode=letters)
    good = scheduler.submit([request([4], new=5)])
    with pytest.raises(UserError, match=words):
        scheduler.submit([request([5], new=LONG_NEW, **how)])
    assert [i for i, _ in scheduler.drain()] == good


def test_what_a_sampler_lacks_is_said(engine, params):
    scheduler = Scheduler(engine, params)
    with pytest.raises(UserError, match="no tokenizer to find them with"):
        scheduler.submit([request([5], stop_strings=("a",))])
    with pytest.raises(UserError, match="no interruption phrase"):
        scheduler.submit([request([5], thinking=ThinkingBudget(1, 2, 1))])
    for interruption, words in ((Interruption(()), "phrase is empty"), (Interruption((VOCAB,)), f"the id {VOCAB}")):
        with pytest.raises(UserError, match=words):
            make_engine(interruption=interruption)
    for buckets in ((), (0, 6), (3, 5), (3, 7)):
        with pytest.raises(UserError, match="prefill_buckets is"):
            make_engine(prefill_buckets=buckets)


def test_a_full_queue_refuses_and_keeps_what_it_has(engine, params):
    scheduler = Scheduler(engine, params, max_queue=6)
    ids = scheduler.submit([request([5], stream=s) for s in range(4)])
    with pytest.raises(QueueFullError, match="4 requests wait and 3 more come; the queue holds 6"):
        scheduler.submit([request([5], stream=s) for s in range(3)])
    ids += scheduler.submit([request([5], stream=s) for s in range(2)])
    assert sorted(i for i, _ in scheduler.drain()) == ids


def test_a_paused_scheduler_decodes_nothing(engine, params):
    scheduler = Scheduler(engine, params)
    ids = scheduler.submit([request([5], temperature=0.0, stream=s) for s in range(6)])
    done = scheduler.step()
    scheduler.pause()
    done += scheduler.step()  # what was under way
    dispatches = scheduler.statistics.dispatches
    assert scheduler.step() == []
    assert scheduler.statistics.dispatches == dispatches
    with pytest.raises(RuntimeError, match="paused"):
        scheduler.drain()
    scheduler.abort(ids[-1:])
    assert [c.finish for _, c in scheduler.step()] == ["aborted"]
    scheduler.resume()
    done += scheduler.drain()
    assert sorted(i for i, _ in done) == ids[:-1]


def test_a_request_can_be_watched(engine, params):
    scheduler = Scheduler(engine, params)
    (id,) = scheduler.submit([request([5], temperature=0.0)])
    assert scheduler.so_far(id) is None
    seen = []
    done = scheduler.step()
    while not done:
        seen.append(scheduler.so_far(id))
        done = scheduler.step()
    completion = dict(done)[id]
    assert seen
    for part in seen:
        count = len(part.tokens_T)
        assert 0 < count < len(completion.tokens_T)
        np.testing.assert_array_equal(part.tokens_T, completion.tokens_T[:count])
        np.testing.assert_array_equal(part.logprobs_T, completion.logprobs_T[:count])
    assert scheduler.so_far(id) is None


def test_freed_slots_are_refilled_before_the_next_dispatch(engine, params):
    """What `between` submits is decoded by the dispatch that follows, not by the one after it."""
    scheduler = Scheduler(engine, params, refill=1)
    waiting = [request([5], temperature=0.0, stream=s, new=3) for s in range(12)]
    done = []

    def between():
        while waiting and scheduler.in_flight < engine.slots:
            scheduler.submit([waiting.pop()])

    while waiting or not scheduler.idle:
        done += scheduler.step(between)
    assert len(done) == 12
    assert scheduler.statistics.occupancy == 1.0


def beginning(completion, count):
    parts = (completion.tokens_T, completion.logprobs_T, completion.versions_T, completion.forced_T)
    return Completion(*(part[:count] for part in parts), "stop_string")


def test_an_episode_in_turns_is_the_one_request_it_would_have_been(long_engine, long_trainer, long_params):
    hows = [{}, {"temperature": 2.0}, {"top_p": 0.6}, {"top_k": 3, "min_p": 0.1}]
    asked = [request([3, 5, 7], new=LONG_NEW, stream=s, banned_ids=(EOS,), **hows[s % 4]) for s in range(16)]
    whole = run(Scheduler(long_engine, long_params), asked)
    firsts = [beginning(c, 1 + s) for s, c in enumerate(whole)]  # prompts of a bucket, and of more than one chunk
    later = [next_request(r, Turn(c, LONG_NEW - len(c.tokens_T))) for r, c in zip(asked, firsts, strict=True)]
    seconds = run(Scheduler(long_engine, long_params), later)
    assert_same([extended(*both) for both in zip(firsts, seconds, strict=True)], whole)
    # Keys that began anew would have drawn other tokens.
    anew = run(Scheduler(long_engine, long_params), [replace(r, first=0) for r in later])
    assert sum((a.tokens_T != b.tokens_T).any() for a, b in zip(anew, seconds, strict=True)) >= 15
    # With an answer between them: log-probabilities as of one sequence of ids, but for those of the answer.
    answers = [answered(c, np.array([9, 2], np.int32)) for c in firsts]
    later = [next_request(r, Turn(c, 12)) for r, c in zip(asked, answers, strict=True)]
    seconds = run(Scheduler(long_engine, long_params), later)
    joined = [extended(*both) for both in zip(answers, seconds, strict=True)]
    for completion, (logprobs, _) in zip(joined, long_trainer(long_params, asked, joined), strict=True):
        sampled = ~completion.forced_T
        np.testing.assert_allclose(completion.logprobs_T[sampled], logprobs[sampled], atol=1e-5)
        assert (~sampled).sum() == 2


def test_a_requests_limits_count_its_own_tokens_whatever_the_number_of_the_first(long_engine, long_params):
    flat = long_params | {"head": np.zeros_like(long_params["head"])}
    least = [request([3], new=30, min_new_tokens=20, stream=s) for s in range(16)]
    think = [
        request([3], new=LONG_NEW, thinking=ThinkingBudget(5, 5, 6), banned_ids=(EOS, 4), stream=s) for s in (1, 2)
    ]
    asked = [replace(r, first=9) for r in (*least, *think)]
    completions = run(Scheduler(long_engine, flat), asked)
    assert all(20 <= len(c.tokens_T) <= 30 for c in completions[:16])
    assert {len(c.tokens_T) for c in completions[:16]} > {30}
    for c in completions[16:]:
        assert np.flatnonzero(c.forced_T).tolist() == [5, 6, 7]
        assert len(c.tokens_T) == 5 + 3 + 6


def test_a_first_tokens_number_is_checked(engine, params):
    scheduler = Scheduler(engine, params)
    for first in (-1, 2**30):
        with pytest.raises(UserError, match=f"first is {first}"):
            scheduler.submit([replace(request([5]), first=first)])


def test_a_slot_may_have_less_room_than_the_longest_prompt_and_completion_need():
    turns = make_engine(max_prompt_tokens=13, max_new_tokens=8, context=14)
    scheduler = Scheduler(turns, make_params(CONFIG, 3), loaded=True)
    with pytest.raises(
        UserError, match=r"13 tokens and max_new_tokens = 2 need 15 places; the sampler's slots have 14"
    ):
        scheduler.submit([request(np.arange(13), new=2)])
    assert len(scheduler.submit([request(np.arange(13), new=1), request([1] * 6, new=8)])) == 2
    for context in (13, 17):
        with pytest.raises(UserError, match=f"context {context} is not above max_prompt_tokens 13 and"):
            make_engine(max_prompt_tokens=13, max_new_tokens=8, context=context)
