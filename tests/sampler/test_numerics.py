"""What int8, bfloat16, chunks, buckets and recomputed keys do to a log-probability, as stated budgets."""

import jax.numpy as jnp
import numpy as np
import pytest
from sampler_reference import CONFIG, LONG_NEW, NEW, assert_same, make_engine, make_requests, request, run

from jaxrl_llm.models.quantised import Int8Weight
from jaxrl_llm.sampler.scheduler import Scheduler

# Largest |sampler - trainer| in nats over about 150 sampled tokens of this policy,
# whose weights are large: its logits reach 20. docs/experiments.md has the figures.
BUDGETS = {"bfloat16": 0.6, "int8 cache": 0.35, "int8 weights": 0.4}


def difference(completions, views):
    return max(np.abs(c.logprobs_T - logprobs).max() for c, (logprobs, _) in zip(completions, views, strict=True))


@pytest.mark.parametrize(
    ("name", "changes", "compute"),
    [
        ("bfloat16", {"dtype": "bfloat16"}, "bfloat16"),
        ("int8 cache", {"kv_dtype": "int8"}, "float32"),
        ("int8 weights", {"int8_weights": True}, "float32"),
    ],
)
def test_a_sampler_of_fewer_bits_stays_within_its_budget(trainer, params, name, changes, compute):
    config = CONFIG.model_copy(update={"compute_dtype": compute})
    asked = make_requests(32)
    completions = run(Scheduler(make_engine(config, **changes), params), asked)
    found = difference(completions, trainer(params, asked, completions))
    assert 1e-4 < found < BUDGETS[name]  # it is another policy than the trainer's, and by no more than stated


def test_int8_is_what_it_says(params):
    engine = make_engine(kv_dtype="int8", int8_weights=True, axes={"data": 2, "tensor": 2})
    loaded, cache = engine.load_params(params), engine.init_decode_state().cache
    for layer in cache:
        assert layer.k.dtype == layer.v.dtype == jnp.int8
        assert layer.k_scale.shape == (*layer.k.shape[:2], 1, layer.k.shape[3])
        assert layer.v_scale.shape == (*layer.v.shape[:3], 1)
    for layer in loaded["layers"]:
        assert {name for name, leaf in layer.items() if isinstance(leaf, Int8Weight)} == {
            "q", "k", "v", "o", "gate", "up", "down",
        }  # fmt: skip
    assert loaded["head"].dtype == loaded["embed"].dtype == jnp.float32
    stacked = make_engine(kv_dtype="int8", int8_weights=True, unstack=False)
    asked = make_requests(12)
    assert_same(run(Scheduler(engine, params), asked), run(Scheduler(stacked, params), asked))


def test_chunks_and_buckets_change_nothing(long_engine, params):
    asked = [request(np.arange(n) % 19, new=6, stream=n) for n in (1, 3, 4, 5, 9, 10, 11, 15, 20, 21, 22)]
    completions = run(Scheduler(long_engine, params), asked)
    whole = make_engine(
        long_engine.model, max_prompt_tokens=22, max_new_tokens=LONG_NEW, slots=2, interruption=long_engine.interruption
    )
    assert_same(completions, run(Scheduler(whole, params), asked))


def test_others_decode_between_two_chunks_of_a_long_prompt(long_engine, params):
    scheduler = Scheduler(long_engine, params)
    short = scheduler.submit([request([3], new=LONG_NEW, temperature=0.0)])
    scheduler.step()
    long = scheduler.submit([request(np.arange(22) % 19, new=4, temperature=0.0, stream=s) for s in range(2)])
    counts = []
    while scheduler.so_far(long[0]) is None:
        counts.append(len(scheduler.so_far(short[0]).tokens_T))
        scheduler.step()
    assert len(set(counts)) >= 3  # three chunks, and tokens between them
    done = dict(scheduler.drain())
    assert scheduler.statistics.prompts_prefilled == 2  # the siblings shared theirs
    alone = run(Scheduler(long_engine, params), [request(np.arange(22) % 19, new=4, temperature=0.0, stream=1)])
    assert_same([done[long[1]]], alone)


def test_a_swap_restarts_a_prefill_in_chunks(long_engine, params, other_params):
    asked = [request(np.arange(22) % 19, new=5, temperature=0.0)]
    scheduler = Scheduler(long_engine, params)
    ids = scheduler.submit(asked)
    scheduler.step()  # the first chunk, by the old weights
    scheduler.update_weights(other_params, 1)
    done = dict(scheduler.drain())
    fresh = run(Scheduler(long_engine, other_params), asked)
    assert_same([done[ids[0]]], fresh)
    assert set(done[ids[0]].versions_T) == {1}
    ids = scheduler.submit(asked * 2)
    scheduler.step()
    scheduler.abort(ids[:1])
    done = dict(scheduler.drain())
    assert done[ids[0]].finish == "aborted"
    assert_same([done[ids[1]]], fresh)


def test_recomputed_keys_are_the_new_weights_own(long_engine, long_trainer, params, other_params):
    asked = [request(np.arange(n) % 19, new=LONG_NEW, stream=n, banned_ids=(1,)) for n in (2, 9, 12, 22)]
    for recompute in (True, False):
        scheduler = Scheduler(long_engine, params, recompute_kv=recompute)
        ids = scheduler.submit(asked)
        done = {}
        for _ in range(5):
            done.update(scheduler.step())
        scheduler.update_weights(other_params, 1)
        done.update(scheduler.drain())
        completions = [done[i] for i in ids]
        assert all(set(c.versions_T) == {0, 1} for c in completions)
        new = long_trainer(other_params, asked, completions)
        gap = max(
            np.abs(c.logprobs_T - logprobs)[c.versions_T == 1].max()
            for c, (logprobs, _) in zip(completions, new, strict=True)
        )
        assert gap < 3e-5 if recompute else gap > 1e-2


def test_the_same_request_gives_the_same_ids_with_1_8_or_64_slots(params):
    asked = make_requests(64, siblings=4) + [request([3, 5], top_p=0.8, temperature=1.5, stream=s) for s in range(8)]
    expected = run(Scheduler(make_engine(slots=8), params), asked)
    for slots in (1, 64):
        # Products of other row counts may round differently; the ids must not.
        assert_same(run(Scheduler(make_engine(slots=slots), params), asked), expected, atol=3e-5)
    assert {len(c.tokens_T) for c in expected} >= {1, NEW}
