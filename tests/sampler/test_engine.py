import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_reference import CONFIG, EOS, NEW, PROMPT, make_engine, request, run, stacked_keys

from jaxrl_llm.sampler.jetstream import Engine, ResultTokens
from jaxrl_llm.sampler.sampling import request_keys, sample, token_keys
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.types import UserError


def test_the_jetstream_calls_give_what_the_scheduler_gives(engine, params):
    asked = [request([3, 4, 5], temperature=0.9, seed=2, stream=7, sibling=s) for s in range(3)]
    expected = run(Scheduler(engine, params), asked)
    loaded, state = engine.load_params(params), engine.init_decode_state()
    padded = np.array([3, 4, 5, 9, 9, 9], np.int32)
    prefix, first = engine.prefill(params=loaded, padded_tokens=padded, true_length=3, request=asked[0])
    state = engine.insert(prefix, state, slot=2, request=asked[0])
    state = engine.bulk_insert(prefix, state, [0, 3], asked[1:])
    tokens = {slot: [] for slot in (2, 0, 3)}
    tokens[2] += np.asarray(first.get_result_at_slot(0).tokens).ravel().tolist()
    for slot, other in ((0, 1), (3, 2)):
        tokens[slot].append(expected[other].tokens_T[0])
    for _ in range(3):
        state, result = engine.generate(loaded, state)
        result.copy_to_host_async()
        result = result.convert_to_numpy()
        assert isinstance(result, ResultTokens)
        for slot, made in tokens.items():
            data = result.get_result_at_slot(slot)
            assert data.tokens.shape == data.valid.shape == (1, engine.decode_steps)
            made += data.tokens[data.valid != 0].tolist()
            assert data.lengths[0] == len(made)
    for slot, completion in zip(tokens, expected, strict=True):
        np.testing.assert_array_equal(tokens[slot], completion.tokens_T)


def test_a_token_is_drawn_with_the_key_of_its_request_and_position(engine, params):
    # A head of zeros is flat, so tokens are functions of their keys alone, the pad id 0 among them.
    flat = params | {"head": jnp.zeros_like(params["head"])}
    asked = [request([3], seed=1, stream=s, sibling=2) for s in range(8)]
    completions = run(Scheduler(engine, flat), asked)
    streams = np.arange(8, dtype=np.uint32)
    keys = request_keys(np.ones_like(streams), streams, np.full_like(streams, 2))
    for n in range(NEW):
        logits, temperatures = np.zeros((8, CONFIG.vocab_size), np.float32), np.ones(8, np.float32)
        tokens, softmax = sample(logits, temperatures, token_keys(keys, np.full(8, n)))
        logprobs = softmax.logprob(logits, tokens)
        for completion, token, logprob in zip(completions, tokens, logprobs, strict=True):
            if n < len(completion.tokens_T):
                assert completion.tokens_T[n] == token
                np.testing.assert_allclose(completion.logprobs_T[n], logprob, atol=1e-6)
                np.testing.assert_allclose(logprob, -np.log(CONFIG.vocab_size), atol=1e-6)
    assert any(0 in c.tokens_T[:-1] for c in completions)
    assert sum(len(c.tokens_T) for c in completions) > 40


def test_the_engine_describes_itself(engine):
    assert isinstance(engine, Engine)
    assert engine.max_concurrent_decodes == 4
    assert engine.samples_per_slot == 1
    assert engine.max_prefill_length == PROMPT
    assert engine.colocated_cpus is None
    assert engine.mesh.shape["tensor"] == 1
    assert make_engine(tokenizer_path="a/b.model").get_tokenizer().path == "a/b.model"
    assert jax.tree.structure(engine.get_prefix_destination_sharding()).num_leaves == 2 * CONFIG.layers + 3


def test_a_prompt_outside_the_engine_is_refused(engine, params):
    loaded = engine.load_params(params)
    for length in (0, PROMPT + 1):
        with pytest.raises(UserError, match=f"{length} tokens; this engine takes 1 to {PROMPT}"):
            engine.prefill(params=loaded, padded_tokens=np.zeros(16, np.int32), true_length=length)
    with pytest.raises(UserError, match="existing_prefix is given"):
        engine.prefill(params=loaded, existing_prefix=object(), padded_tokens=np.zeros(16, np.int32), true_length=3)


def test_loaded_weights_share_no_buffer_with_the_trainer(engine, params):
    # Replicated over two devices of which the engine holds one: device_put alone would alias that shard.
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x", axis_types=(jax.sharding.AxisType.Auto,))
    both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    trainers = [jax.device_put(params, place) for place in (jax.devices()[0], both)]
    for theirs in trainers:
        ours = engine.load_params(theirs)
        pointers = {s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(theirs) for s in x.addressable_shards}
        assert not pointers & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(ours)}
        for layer, tree in enumerate(ours["layers"]):
            jax.tree.map(
                lambda a, b, i=layer: np.testing.assert_array_equal(a, np.asarray(b)[i]), tree, params["layers"]
            )
        for name in ("embed", "head", "final_norm"):
            np.testing.assert_array_equal(ours[name], params[name])


def test_weights_are_cast_to_the_sampler(params):
    # Reported of other stacks.
    loaded = make_engine(dtype="bfloat16").load_params(params)
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "number", "nested"])
def test_wrong_weights_are_refused_by_name(engine, params, change):
    wrong = {**params, "layers": dict(params["layers"])}
    if change == "missing":
        del wrong["head"]
        words = "lack the leaf head"
    elif change == "extra":
        wrong["lora"] = params["embed"]
        words = "have a leaf lora"
    elif change == "number":
        wrong["final_norm"] = 1.0
        words = r"final_norm has shape \(\)"
    elif change == "nested":
        del wrong["layers"]["k"]
        words = r"lack the leaf layers\.k"
    else:
        wrong["layers"]["gate"] = params["layers"]["gate"][:, :, 1:]
        words = r"layers\.gate has shape \(2, 32, 47\); this model needs \(2, 32, 48\)"
    with pytest.raises(UserError, match=words):
        engine.load_params(wrong)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slots": 3, "axes": {"data": 2, "tensor": 1}}, "sampler.slots 3 does not divide over data 2"),
        ({"axes": {"data": 1, "tensor": 4}}, "kv_heads 2 does not divide over tensor 4"),
        ({"max_prompt_tokens": 12}, r"12 \+ max_new_tokens 8 exceeds model.max_context 16"),
        ({"eos_id": CONFIG.vocab_size}, f"id {CONFIG.vocab_size} is outside the vocabulary"),
        ({"decode_steps": 0}, "decode_steps is 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens is 0"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        make_engine(**changes)


def test_only_the_slots_named_are_written(engine, params):
    loaded, state = engine.load_params(params), engine.init_decode_state()
    state = state.replace(cache=jax.tree.map(lambda x: x + 7, state.cache))
    before = stacked_keys(state.cache)
    prompts = [np.array([3, 4]), np.array([5, 6, 7])]
    prefix = engine.prefill_many(loaded, prompts, engine.device_version(3))
    state = engine.insert_many(prefix, state, [(3, 1, request([5], new=4)), (1, 0, request([5], new=1))])
    after = stacked_keys(state.cache)
    np.testing.assert_array_equal(after[:, [0, 2]], before[:, [0, 2]])
    np.testing.assert_array_equal(after[:, 3, :, :3], stacked_keys(prefix.cache)[:, 1, :, :3])
    np.testing.assert_array_equal(after[:, 1, :, :2], stacked_keys(prefix.cache)[:, 0, :, :2])
    np.testing.assert_array_equal(after[:, :, :, PROMPT:], before[:, :, :, PROMPT:])
    assert np.asarray(state.first.flags).tolist() == [0, 1, 0, 1]
    assert not state.slots.active[1]  # its limit is its first token
    assert state.slots.active[3] == (state.slots.tokens[3] != EOS)
    assert np.asarray(state.first.versions).tolist() == [0, 3, 0, 3]
    state = engine.free_resource(state, [3])
    assert np.asarray(state.first.flags).tolist() == [0, 1, 0, 0]
    assert not state.slots.active[3]


def test_a_decode_step_works_its_rotations_out_once_whatever_the_number_of_layers():
    # One sine for the dispatch's first step and one in its loop, not one for the queries and keys of every layer.
    def sines(layers):
        text = make_engine(CONFIG.model_copy(update={"layers": layers})).lower_generate().compile().as_text()
        return text.count(" sine(")

    assert sines(2) == sines(3) == 2
