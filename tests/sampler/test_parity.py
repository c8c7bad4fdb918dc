"""The sampler's log-probabilities are the denominators of every ratio: they must be the trainer's."""

import jax
import numpy as np
from sampler_reference import (
    CONFIG,
    EOS,
    LENGTH,
    NEW,
    TIED,
    Trainer,
    assert_same,
    make_engine,
    make_params,
    make_requests,
    request,
    run,
)

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models.lora import attach, merge, trainable
from jaxrl_llm.sampler.scheduler import Scheduler


def assert_parity(views, completions):
    for completion, (logprobs, _) in zip(completions, views, strict=True):
        np.testing.assert_allclose(completion.logprobs_T, logprobs, atol=1e-5)


def test_logprobs_equal_the_teacher_forced_forward(engine, trainer, params):
    # Reported of other stacks: first token (prefill) and later ones (decode), temperatures .5, 1 and 2
    asked = make_requests(32)
    completions = run(Scheduler(engine, params), asked)
    views = trainer(params, asked, completions)
    assert_parity(views, completions)
    everything = np.concatenate([logprobs for logprobs, _ in views])
    assert np.std(everything) > 0.3  # neither flat nor certain, where anything would agree
    assert {len(c.tokens_T) for c in completions} >= {1, NEW}
    wrong = trainer(params, [request(r.tokens_T, temperature=1.0) for r in asked], completions)
    assert max(np.abs(w - c.logprobs_T).max() for (w, _), c in zip(wrong, completions, strict=True)) > 0.1


def test_a_tied_head_follows_the_embedding_through_a_push(tied_engine):
    # Reported of other stacks.
    asked, trainer = make_requests(32), Trainer(TIED)
    old, new = make_params(TIED, 3), make_params(TIED, 4)
    scheduler = Scheduler(tied_engine, old)
    completions = run(scheduler, asked)
    assert_parity(trainer(old, asked, completions), completions)
    scheduler.update_weights(new, 1)
    completions = run(scheduler, asked)
    assert_parity(trainer(new, asked, completions), completions)


def test_merged_adapters_are_sampled_as_the_trainer_sees_them_unmerged(engine, trainer, params):
    lora, rng = LoraConfig(rank=3, alpha=4.0), np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: 0.1 * rng.standard_normal(x.shape, np.float32), trainable(CONFIG, lora)[0])
    asked = make_requests(32)
    completions = run(Scheduler(engine, merge(params, adapters, lora)), asked)
    assert_parity(trainer(attach(params, adapters, lora), asked, completions), completions)
    without = trainer(params, asked, completions)
    assert max(np.abs(w - c.logprobs_T).max() for (w, _), c in zip(without, completions, strict=True)) > 0.1


def test_a_sampled_pad_id_is_a_token_like_any_other(engine, trainer, params):
    # Reported of other stacks: nearly flat, so the pad id 0 comes up in the middle of completions
    asked = make_requests(32, temperatures=(50.0,), seed=1)
    completions = run(Scheduler(engine, params), asked)
    assert sum((c.tokens_T[:-1] == 0).any() for c in completions) >= 3
    assert_parity(trainer(params, asked, completions), completions)


def test_greedy_is_the_argmax_with_its_logprob_at_temperature_1(engine, trainer, params):
    asked = make_requests(32, temperatures=(0.0,))
    completions = run(Scheduler(engine, params), asked)
    views = trainer(params, asked, completions)
    assert_parity(views, completions)
    for completion, (_, greedy) in zip(completions, views, strict=True):
        np.testing.assert_array_equal(completion.tokens_T, greedy)


def test_end_of_sequence_is_part_of_a_stopped_completion_only(engine, params):
    # Reported of other stacks.
    asked = make_requests(32, temperatures=(2.0,), seed=2)
    completions = run(Scheduler(engine, params), asked)
    for r, c in zip(asked, completions, strict=True):
        assert (c.tokens_T == EOS).sum() == (c.finish == "stop")
        assert (c.tokens_T[-1] == EOS) == (c.finish == "stop")
        assert c.finish == "stop" or len(c.tokens_T) == r.sampling.max_new_tokens
        assert 1 <= len(c.tokens_T) <= r.sampling.max_new_tokens
    assert {c.finish for c in completions} == {"stop", "length"}


def test_sequences_in_flight_through_swaps_keep_their_old_keys(engine, mixed, params, other_params):
    # Weights change after every dispatch: each token must carry its version and the logprob of exactly that mixture.
    versions = {v: params if v % 2 == 0 else other_params for v in range(50)}
    asked = [request([5, 6, 7], new=NEW, stream=s) for s in range(6)] + [request([2], new=NEW, stream=9)]
    scheduler, done, version = Scheduler(engine, params), {}, 0
    ids = scheduler.submit(asked)
    while not scheduler.idle:
        done.update(scheduler.step())
        version += 1
        scheduler.update_weights(versions[version], version)
    assert any(len(set(done[i].versions_T)) >= 3 for i in ids)
    plain = 0.0
    for i, r in zip(ids, asked, strict=True):
        completion = done[i]
        assert (np.diff(completion.versions_T) >= 0).all()
        np.testing.assert_allclose(completion.logprobs_T, mixed(versions, r, completion), atol=1e-5)
        newest = dict.fromkeys(range(50), versions[completion.versions_T[-1]])
        plain = max(plain, np.abs(mixed(newest, r, completion)[-1] - completion.logprobs_T[-1]))
    assert plain > 1e-3  # recomputed keys would have given other numbers


def test_nothing_prefilled_by_old_weights_serves_a_new_prompt(engine, params, other_params):
    # A group of 7 on 4 slots is half admitted when the weights change; the rest must be prefilled anew.
    group = [request([5, 6, 7, 8], temperature=0.0 if s == 6 else 1.0, sibling=s) for s in range(7)]
    scheduler = Scheduler(engine, params)
    ids = scheduler.submit(group)
    done = dict(scheduler.step())
    scheduler.update_weights(other_params, 1)
    done.update(scheduler.drain())
    late = [n for n, i in enumerate(ids) if done[i].versions_T[0] == 1]
    assert 6 in late
    assert 0 not in late
    fresh = run(Scheduler(engine, other_params), group)
    assert_same([done[ids[n]] for n in late], [fresh[n] for n in late])
    again = run(scheduler, group)
    assert_same(again, fresh)


def test_meshes_and_stacked_weights_change_nothing(trainer, params):
    asked = make_requests(24) + [request([3, 4], top_p=0.7, temperature=1.5, stream=s) for s in range(8)]
    for axes, unstack, config in (({"data": 2, "tensor": 1}, False, CONFIG), ({"data": 2, "tensor": 2}, True, TIED)):
        sharded = make_engine(config, axes=axes, unstack=unstack)
        weights = params if config is CONFIG else make_params(TIED, 3)
        completions = run(Scheduler(sharded, weights), asked)
        view = trainer if config is CONFIG else Trainer(TIED)
        assert_parity(view(weights, asked, completions), completions)
        state = sharded.init_decode_state()
        keys = state.cache[0].k if unstack else state.cache.k
        local = keys.addressable_shards[0].data.shape
        assert local[-4:] == (2, CONFIG.kv_heads // axes["tensor"], CONFIG.head_dim, LENGTH)
        assert local[:-4] == (() if unstack else (CONFIG.layers,))
        assert len(keys.sharding.device_set) == axes["data"] * axes["tensor"]
    assert jax.device_count() == 8
