"""Log-probabilities of prompts, and the likeliest tokens beside every token, against the trainer's forward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_reference import CONFIG, LONG, LONG_NEW, LONG_PROMPT, assert_same, make_engine, request, run

from jaxrl_llm.losses.logprobs import project_f32
from jaxrl_llm.models.transformer import forward, head_weight
from jaxrl_llm.sampler import engine as engine_module
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.types import ThinkingBudget, UserError

LENGTH, KEPT = LONG_PROMPT + LONG_NEW, 3
# One token; both sides of the buckets of 4 and 10; of one, two and the most chunks of 10.
LENGTHS = (1, 2, 3, 4, 5, 9, 10, 11, 19, 20, 21, 22)


@pytest.fixture(scope="module")
def params(params):
    # Logits of 20 at temperature .5 would differ by 1e-5 from rounding alone.
    return params | {"head": params["head"] * 0.5}


@jax.jit
def _everything(params, tokens_BT, temperature_B):
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    hidden_BTD = forward(LONG, params, tokens_BT, positions, jnp.ones_like(tokens_BT))
    logits = jax.lax.map(lambda hidden_TD: project_f32(hidden_TD, head_weight(params)), hidden_BTD)
    return jax.nn.log_softmax(logits / temperature_B[:, None, None], axis=-1)


def everything(params, sequences, temperatures=None):
    """[T, V] of each sequence: the log-probabilities of whatever might come after each of its tokens."""
    tokens = np.zeros((32, LENGTH), np.int32)
    for row, sequence in zip(tokens, sequences, strict=False):
        row[: len(sequence)] = sequence
    given = np.ones(32, np.float32)
    given[: len(sequences)] = 1 if temperatures is None else temperatures
    return np.asarray(_everything(params, tokens, given))


def scored(r, alternatives=KEPT):
    return dataclasses.replace(r, alternatives=alternatives, score_prompt=True)


def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(0, CONFIG.vocab_size, length) for length in LENGTHS]


def assert_places(known, own, wanted_TV, tokens_T):
    """`known` alternatives and the tokens' `own` log-probabilities are those of `wanted_TV`."""
    places = np.arange(len(tokens_T))
    np.testing.assert_allclose(own, wanted_TV[places, tokens_T], atol=1e-5)
    best = np.sort(wanted_TV, axis=1)[:, ::-1][:, : known.ids_TN.shape[1]]
    np.testing.assert_allclose(known.logprobs_TN, best, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(wanted_TV, known.ids_TN, axis=1), best, atol=1e-5)
    same = known.ids_TN == np.asarray(tokens_T)[:, None]
    assert (np.broadcast_to(own[:, None], same.shape)[same] == known.logprobs_TN[same]).all()  # bit for bit
    return same.sum()


def test_a_prompts_scores_are_the_trainers(long_engine, params):
    given = prompts()
    completions = run(
        Scheduler(long_engine, params), [scored(request(p, new=2, stream=i)) for i, p in enumerate(given)]
    )
    hits = 0
    for prompt, completion, wanted in zip(given, completions, everything(params, given), strict=False):
        scores = completion.prompt
        assert scores.logprobs_T.dtype == np.float32
        assert len(scores.logprobs_T) == len(scores.alternatives.ids_TN) == len(prompt) - 1
        hits += assert_places(scores.alternatives, scores.logprobs_T, wanted[: len(prompt) - 1], prompt[1:])
    assert hits > 10


def test_scores_come_in_pieces_whose_logits_fit(params, monkeypatch):
    # 7 places at a time, which does not divide the bucket.
    monkeypatch.setattr(engine_module, "_SCORE_LOGITS", 7 * CONFIG.vocab_size)
    small = make_engine(LONG, max_prompt_tokens=10, max_new_tokens=2, prefill_buckets=(10,), top_logprobs=2)
    given = [prompt for prompt in prompts() if len(prompt) <= 10]
    completions = run(Scheduler(small, params), [scored(request(p, new=1), 2) for p in given])
    for prompt, completion, wanted in zip(given, completions, everything(params, given), strict=False):
        assert_places(
            completion.prompt.alternatives, completion.prompt.logprobs_T, wanted[: len(prompt) - 1], prompt[1:]
        )


def test_alternatives_are_of_the_distribution_that_the_token_was_drawn_from(long_engine, params):
    options = [{}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_k": 2, "temperature": 2.0}, {"banned_ids": (3, 4)}]
    options += [{"thinking": ThinkingBudget(2, 4, 6)}, {"logit_bias": ((5, 3.0),)}, {"min_new_tokens": 9}]
    asked = [
        dataclasses.replace(
            request([3, 4, i], new=14, stream=i, **options[i % len(options)]), alternatives=1 + i % KEPT
        )
        for i in range(16)
    ]
    completions = run(Scheduler(long_engine, params), asked)
    sequences = [np.concatenate([r.tokens_T, c.tokens_T]) for r, c in zip(asked, completions, strict=True)]
    views = everything(params, sequences, [r.sampling.temperature or 1.0 for r in asked])
    for r, completion, wanted in zip(asked, completions, views, strict=False):
        assert completion.prompt is None
        assert completion.alternatives.ids_TN.shape == (len(completion.tokens_T), r.alternatives)
        at = slice(2, 2 + len(completion.tokens_T))
        assert_places(completion.alternatives, completion.logprobs_T, wanted[at], completion.tokens_T)
    assert any(c.forced_T.any() for c in completions)


def test_asking_for_more_changes_no_token(long_engine, params):
    plain = [request(p, new=6, stream=i, sibling=s) for i, p in enumerate(prompts()) for s in range(3)]
    mixed = [dataclasses.replace(r, alternatives=i % (KEPT + 1), score_prompt=i % 2 == 0) for i, r in enumerate(plain)]
    completions = run(Scheduler(long_engine, params), mixed)
    assert_same(completions, run(Scheduler(long_engine, params), plain))
    for r, completion in zip(mixed, completions, strict=True):
        assert (completion.alternatives is None) == (r.alternatives == 0)
        assert (completion.prompt is None) == (not r.score_prompt)


def test_a_group_is_scored_once_and_watched_as_its_tokens_come(long_engine, params):
    scheduler = Scheduler(long_engine, params)
    ids = scheduler.submit([scored(request(np.arange(22) % 19, new=12, stream=s, temperature=0.0)) for s in range(11)])
    parts, done = {id: [] for id in ids}, {}
    while not scheduler.idle:
        done |= dict(scheduler.step())
        for id in ids:
            seen = sum(len(part.tokens_T) for part in parts[id])
            new = scheduler.so_far(id, seen)
            if new is not None and len(new.tokens_T):
                parts[id].append(new)
    assert (scheduler.statistics.prompts_scored, scheduler.statistics.prompts_prefilled) == (1, 1)
    for id, completion in done.items():
        assert parts[id]
        assert [part.prompt is not None for part in parts[id]] == [True] + [False] * (len(parts[id]) - 1)
        np.testing.assert_array_equal(parts[id][0].prompt.logprobs_T, completion.prompt.logprobs_T)
        tokens = np.concatenate([part.tokens_T for part in parts[id]])
        np.testing.assert_array_equal(tokens, completion.tokens_T[: len(tokens)])
        likeliest = np.concatenate([part.alternatives.ids_TN for part in parts[id]])
        np.testing.assert_array_equal(likeliest, completion.alternatives.ids_TN[: len(tokens)])


def test_weights_swapped_between_two_chunks_score_the_prompt_anew(long_engine, params, other_params):
    prompt = np.arange(22) % 19
    scheduler = Scheduler(long_engine, params)
    scheduler.submit([request([3], new=LONG_NEW, temperature=0.0)])
    (id,) = scheduler.submit([scored(request(prompt, new=2))])
    scheduler.step()
    scheduler.update_weights(other_params, 1)
    completion = dict(scheduler.drain())[id]
    assert completion.versions_T.tolist() == [1, 1]
    wanted = everything(other_params, [prompt])[0, :21]
    assert_places(completion.prompt.alternatives, completion.prompt.logprobs_T, wanted, prompt[1:])


def test_a_scored_prompt_may_be_aborted_at_any_time(long_engine, params):
    for steps in range(5):
        scheduler = Scheduler(long_engine, params)
        gone = scheduler.submit([scored(request(np.arange(22) % 19, new=30, stream=s)) for s in range(3)])
        beside = scheduler.submit([scored(request([3, 4], new=30, temperature=0.0))])
        done = {}
        for _ in range(steps):
            done |= dict(scheduler.step())
        scheduler.abort(gone)
        done |= dict(scheduler.drain())
        assert sorted(done) == gone + beside
        for id in gone:
            made = len(done[id].tokens_T)
            assert (done[id].prompt is not None) == (made > 0)
        assert len(done[beside[0]].prompt.logprobs_T) == 1


def test_what_the_engine_does_not_keep_is_refused(engine, long_engine, params):
    for served, r, words in (
        (long_engine, scored(request([3]), KEPT + 1), "4 alternatives are asked for; this sampler keeps 0 to 3"),
        (long_engine, scored(request([3]), -1), "-1 alternatives"),
        (engine, scored(request([3]), 0), "scores no prompts"),
    ):
        with pytest.raises(UserError, match=words):
            Scheduler(served, params).submit([r])
    with pytest.raises(UserError, match="top_logprobs is 21; use 0"):
        make_engine(top_logprobs=CONFIG.vocab_size + 1)


def test_a_sharded_engine_scores_the_same(long_engine, params):
    sharded = make_engine(
        LONG,
        axes={"data": 2, "tensor": 2},
        max_prompt_tokens=10,
        max_new_tokens=2,
        prefill_buckets=(10,),
        top_logprobs=KEPT,
    )
    asked = [scored(request(p, new=2, stream=i)) for i, p in enumerate(prompts()) if len(p) <= 10]
    for one, two in zip(
        run(Scheduler(sharded, params), asked), run(Scheduler(long_engine, params), asked), strict=True
    ):
        np.testing.assert_allclose(one.prompt.logprobs_T, two.prompt.logprobs_T, atol=1e-5)
        np.testing.assert_array_equal(one.prompt.alternatives.ids_TN, two.prompt.alternatives.ids_TN)
        np.testing.assert_array_equal(one.alternatives.ids_TN, two.alternatives.ids_TN)
