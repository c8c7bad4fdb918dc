"""What the compiled train step holds and moves, read from its own text."""

import math
import re

import jax
import numpy as np
import optax
import pytest
from tiny_policy import CISPO, TEMPERATURE, B, M, T

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses import chunks
from jaxrl_llm.losses.chunks import default_chunk
from jaxrl_llm.rollout.rows import RowShape, pack
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.state import abstract_state
from jaxrl_llm.train.step import make_train_step
from jaxrl_llm.types import Reach, TrainBatch

# A device has 53 or 106 rows of the vocabulary, a prime that no other size shares.
MODEL = ModelConfig(
    layers=1, d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=24, vocab_size=106, max_context=T, tie_embeddings=False
)
CHUNK = 16
SPLIT = {"data": 2, "context": 2, "tensor": 2}


def compiled(axes, chunk):
    mesh = make_mesh(axes, jax.devices()[: int(np.prod(list(axes.values()), dtype=int))])
    optimizer = optax.sgd(0.1)
    step = make_train_step(MODEL, optimizer, CISPO, mesh=mesh, temperature=TEMPERATURE, head_chunk=chunk, remat="none")
    ints, floats = (jax.ShapeDtypeStruct((M, B, T), dtype) for dtype in (np.int32, np.float32))
    batch = TrainBatch(
        tokens=ints, targets=ints, positions=ints, segment_ids=ints, token_weights=floats, advantages=floats,
        behavior_logprobs=floats, microbatches=jax.ShapeDtypeStruct((), np.int32),
    )  # fmt: skip
    return step.lower(abstract_state(MODEL, optimizer, mesh=mesh), batch).compile().as_text()


@pytest.fixture(scope="module")
def split():
    return compiled(SPLIT, CHUNK)


def numbers(text, kinds=r"f32|bf16|f64|pred|s32|u32"):
    """Elements of every array named in a compiled program, as one device holds it."""
    return {math.prod(map(int, dims.split(","))) for dims in re.findall(rf"\b(?:{kinds})\[([\d,]+)\]", text)}


def beside_vocabulary(text, rows):
    """Of the largest array that has an axis of the vocabulary, the product of its other axes, in units of `rows`."""
    return max(n for n in numbers(text) if n % 53 == 0) / rows


def test_no_array_of_tokens_by_vocabulary_exists():
    # The head's own width is 16, so is a chunk's; a microbatch has 128 tokens.
    assert beside_vocabulary(compiled({}, CHUNK), 106) == CHUNK
    assert beside_vocabulary(compiled({}, B * T), 106) == B * T  # the same search finds it where it exists


def test_no_device_of_a_mesh_has_one_either(split):
    # A device has 32 tokens and 53 rows of the head; 4 devices share a chunk's 16 tokens.
    assert beside_vocabulary(split, 53) == MODEL.d_model
    assert CHUNK // 4 * 53 in numbers(split)


def test_unless_told_otherwise_a_device_has_512_tokens_or_96_mib_of_logits_at_once(monkeypatch, split):
    assert default_chunk(49152) * 49152 == default_chunk(98304) * 98304 == 24 * 2**20
    assert default_chunk(98304, shards=4, vocab_shards=2) == default_chunk(32, shards=4) == 4 * 512
    assert default_chunk(10**9, shards=4) == 4  # a token of each device at least
    monkeypatch.setattr(chunks, "_LOGITS", CHUNK // 4 * 53)
    assert numbers(compiled(SPLIT, None)) == numbers(split)


def test_devices_along_context_exchange_keys_and_values_alone(split):
    # A device has 4 rows of 8 tokens and one key head of width 4.
    moved = re.findall(r"= (\w+)\[([\d,]*)\]\S* (all-gather|reduce-scatter|all-to-all|collective-permute)\(", split)
    floats = {(kind, shape) for dtype, shape, kind in moved if dtype != "s32"}
    assert floats == {("all-gather", "4,16,1,4"), ("reduce-scatter", "4,8,1,4")}
    ids = {shape for dtype, shape, _ in moved if dtype == "s32"}
    assert ids == {"4,16"}


@pytest.mark.parametrize("share", [False, True])
def test_scores_of_rows_longer_than_their_documents_reach_are_never_worked_out_whole(share):
    # Rows of 384 tokens, documents of at most 64: blocks of 64 queries see 128 keys, or 64 and the prompt's 32 more.
    length, reach = 384, Reach(64, 32) if share else Reach(64)
    optimizer, mesh = optax.sgd(0.1), make_mesh({"data": 1}, jax.devices()[:1])

    def lowered(reach):
        how = {"mesh": mesh, "temperature": 1.0, "head_chunk": CHUNK, "remat": "none"}
        step = make_train_step(MODEL, optimizer, CISPO, share_prompts=share, reach=reach, **how)
        batch = pack([], RowShape(1, 2, length, share_prompts=share, reach=reach))
        return step.lower(abstract_state(MODEL, optimizer, mesh=mesh), batch).as_text()

    assert re.search(rf"tensor<[\dx]*x{length}x{length}xf32>", lowered(None))
    near = lowered(reach)
    assert not re.search(rf"tensor<[\dx]*x{length}x{length}x\w+>", near)
    assert re.search(rf"tensor<[\dx]*x64x{160 if share else 128}xf32>", near)
